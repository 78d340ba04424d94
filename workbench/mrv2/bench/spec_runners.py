"""Every way of drafting under both runners, sync and async: what a user sees is the runner's doing.

Model, drafters, kernels, verification and requests are the same; V1 lacks some combinations, which are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mrv2.bench.environment import environment
from mrv2.bench.speculation import OFF, measure_speculation
from mrv2.config import Knobs
from mrv2.engine.core import EngineCore
from mrv2.errors import ConfigError

KIND = "mrv2-speculation-runners"


def settings_of(runners: Sequence[str], modes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return label -> changes of knobs, for each runner and mode ("sync", "async")."""
    for name, given, legal in (("runners", runners, ("v1", "v2")), ("modes", modes, ("sync", "async"))):
        for value in given:
            if value not in legal:
                raise ConfigError(f"{name} {','.join(given)}: legal are {', '.join(legal)}, or both with a comma")
    return {
        f"{runner} {mode}": {"runner": runner, "async_scheduling": mode == "async", "queue_depth": 2}
        for runner in runners
        for mode in modes
    }


def legal_methods(knobs: Knobs, methods: Sequence[str], note: Callable[[str], None]) -> list[str]:
    """Return the methods that `knobs` may draft with; `note` is told why one is left out."""
    found = []
    for method in methods:
        try:
            knobs.with_changes(spec_method=method)
            found.append(method)
        except ConfigError as error:
            note(f"left out: {error}")
    return found


def measure_runners(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    methods: Sequence[str],
    settings: dict[str, dict[str, Any]],
    batch_sizes: Sequence[int],
    *,
    num_tokens: int,
    repetitions: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure all methods under each setting, as `measure_speculation` does; return the record."""
    rows: list[dict[str, Any]] = []
    for label, changes in settings.items():
        core.set_knobs(spec_method=OFF, **changes)
        mine = legal_methods(core.knobs, methods, progress)
        outcomes = measure_speculation(
            core,
            prompts,
            mine,
            batch_sizes,
            num_tokens=num_tokens,
            repetitions=repetitions,
            progress=lambda text, label=label: progress(f"{label}: {text}"),
        )
        rows += [{"setting": label, **asdict(each)} for each in outcomes]
    return {
        "kind": KIND,
        "environment": environment(),
        "model": core.model_config.name,
        "speculators": list(core.config.speculators),
        "synthetic_acceptance": list(core.config.synthetic_acceptance),
        "num_tokens": num_tokens,
        "knobs": core.knobs.as_dict(),
        "outcomes": rows,
    }


def headline(record: dict[str, Any]) -> dict[str, Any]:
    """Return the one line for machines: time per output token and tau."""
    rows = {
        f"{e['setting']} {e['method']}@{e['batch_size']}": [round(e["tpot_ms"], 4), round(e["tau"], 3)]
        for e in record["outcomes"]
    }
    return {"kind": KIND, "model": record["model"], "tpot_ms_and_tau": rows}


def report(record: dict[str, Any]) -> str:
    """Return the record as a table, the settings of a method below each other."""
    lines = [
        f"{record['model']}, {record['num_tokens']} tokens a request, verification={record['knobs']['verification']}, "
        f"cuda_graphs={record['knobs']['cuda_graphs']}",
        f"{'batch':>6}{'method':>13}{'drafts':>8}  {'setting':<10}{'tok/s':>10}{'of v1 async':>13}"
        f"{'TPOT ms':>9}{'tau':>7}",
    ]
    rows = record["outcomes"]
    speed = {(e["batch_size"], e["method"], e["setting"]): e["tokens_per_second"] for e in rows}
    methods = list(dict.fromkeys(each["method"] for each in rows))
    for batch_size in dict.fromkeys(each["batch_size"] for each in rows):
        for method in methods:
            for each in rows:
                if (each["batch_size"], each["method"]) != (batch_size, method):
                    continue
                base = speed.get((batch_size, method, "v1 async"))
                of_base = "-" if base is None else f"{each['tokens_per_second'] / base:.2f}"
                lines.append(
                    f"{batch_size:>6}{method:>13}{each['num_drafts']:>8}  {each['setting']:<10}"
                    f"{each['tokens_per_second']:>10,.0f}{of_base:>13}{each['tpot_ms']:>9.3f}{each['tau']:>7.2f}"
                )
    return "\n".join(lines)
