"""What ``mrv2 bench`` prints: a record as text."""

from __future__ import annotations

from typing import Any

from mrv2.commands.printing import number, percent, text_table

_HEADER = (
    "setting",
    "tok/s",
    "best",
    "of floor",
    "ms/step",
    "host ms",
    "device ms",
    "overlap",
    "idle",
    "steps",
    "replays",
    "preempted",
    "waits per step",
)
_LEGEND = """\
tok/s: median of the timed runs (output tokens); of floor: share of the memory floor's tok/s; host, device: busy ms a
step in the recorded pass (host: waits excluded); overlap: share of device time with the host at work; idle: share of
the time between the first and last device stage with none running; a dash: not collected."""


def report(record: dict[str, Any], *, with_stages: bool = False) -> str:
    """Return the text of a record."""
    model, limits = record["model"], record["limits"]
    parts = [
        f"{model['name']}, {model['num_parameters'] / 1e6:,.1f} M weights, {model['dtype']}, on {_where(record)}",
        f"reads {limits['read_bytes_per_s'] / 1e9:,.1f} GB/s ({limits['read_method']}), multiplies "
        f"{limits['matmul_flops_per_s'] / 1e12:,.3f} TFLOP/s ({limits['matmul_method']})",
    ]
    for workload in record["workloads"]:
        parts += ["", _workload(workload, with_stages=with_stages)]
    return "\n".join([*parts, "", _LEGEND])


def _where(record: dict[str, Any]) -> str:
    environment = record["environment"]
    gpu = environment["gpu"]
    versions = environment["packages"]
    with_triton = f", triton {versions['triton']}" if "triton" in versions else ""
    software = f"torch {environment['torch_build']}{with_triton}, python {environment['python']}"
    if record["device"] == "cuda" and gpu:
        return f"{gpu['name']} ({gpu['num_sms']} SMs, driver {gpu['driver'] or 'unknown'}), {software}"
    return f"host ({environment['cpu']}), {software}"


def _workload(workload: dict[str, Any], *, with_stages: bool) -> str:
    card, variants = workload["roofline"], workload["variants"]
    lines = [
        f"workload {workload['name']}: {workload['description']}",
        f"  {workload['num_requests']} requests, {workload['num_input_tokens']:,} tokens in, "
        f"{workload['num_output_tokens']:,} out",
        f"  a step reads {card['weight_bytes_per_step'] / 1e9:,.4g} GB of weights and "
        f"{card['kv_bytes_per_token']:,} bytes of KV for each token of context",
        f"  {card['num_steps']:,} steps ({card['num_prefill_steps']:,} with prefill): "
        f"{card['weight_bytes'] / 1e9:,.4g} GB weights + {card['kv_read_bytes'] / 1e9:,.4g} GB KV read, "
        f"{card['kv_written_bytes'] / 1e9:,.4g} GB written, {card['flops'] / 1e12:,.4g} TFLOP",
        f"  floor: {number(card['memory_seconds'], 3)} s by memory, {number(card['seconds'], 3)} s with compute; "
        f"at most {number(card['memory_tok_s'], 0)} tok/s; a decode step at least "
        f"{number(card['decode_step_floor_ms_median'], 3)} ms (median)",
        "",
        text_table(_HEADER, [_row(variant) for variant in variants]),
        "",
        _agreement(workload),
        *(_comparison(each) for each in workload["comparisons"]),
    ]
    if with_stages:
        lines += ["", *(_stages(variant) for variant in variants if variant["profile"])]
    return "\n".join(lines)


def _agreement(workload: dict[str, Any]) -> str:
    differences = workload["differences"]
    if differences is None:
        return "same tokens in every setting: yes"
    return (
        f"same tokens in every setting: no, {differences['num_requests']} request(s) differ from the first setting, "
        f"{differences['num_ties']} of them in a tie; worst: {differences['worst']}"
    )


def _row(variant: dict[str, Any]) -> tuple[str, ...]:
    stages = variant["profile"] or dict.fromkeys(("host_ms", "device_ms", "overlap", "device_idle"))
    waits = ", ".join(f"{reason} {count:.2f}" for reason, count in variant["waits_per_step"].items())
    return (
        variant["label"],
        number(variant["tok_s_median"], 1),
        number(variant["tok_s_best"], 1),
        percent(variant["roofline_share"], 1),
        number(variant["step_ms"], 3),
        number(stages["host_ms"], 3),
        number(stages["device_ms"], 3),
        percent(stages["overlap"]),
        percent(stages["device_idle"]),
        str(variant["num_steps"]),
        str(variant["num_graph_replays"]),
        str(variant["num_preemptions"]),
        waits or "none",
    )


def _comparison(comparison: dict[str, Any]) -> str:
    text = f"{comparison['changed']}: {comparison['reached']:.2f} x {comparison['baseline']}"
    if comparison["expected"] is None:
        return text
    text = f"{text}; (h + d) / max(h, d) of the sync run: {comparison['expected']:.2f}"
    if comparison["attainable"] is not None:
        text = f"{text}, less what overlaps in it already: {comparison['attainable']:.2f}"
    recorded = comparison["recorded"]
    return text if recorded is None else f"{text}; in the recorded passes: {recorded:.2f} x"


def _stages(variant: dict[str, Any]) -> str:
    """Return a variant's stages, ms a step, longest first."""
    stages = variant["profile"]
    kinds = (("host", "host_stages_ms"), ("device", "device_stages_ms"), ("wait", "waits_ms"))
    lines = [f"{variant['label']}: ms a step by stage (host stages nest)"]
    for kind, field in kinds:
        times = sorted(stages[field].items(), key=lambda item: -item[1])
        lines.append(f"  {kind}: " + ", ".join(f"{name} {ms:.3f}" for name, ms in times))
    if stages["num_dropped_spans"]:
        lines.append(f"  {stages['num_dropped_spans']} spans did not fit the recorder: the beginning is missing")
    return "\n".join(lines)
