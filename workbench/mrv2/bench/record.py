"""Benchmark records: one JSON file says what was measured, on what, and against which floor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mrv2.bench.agreement import Difference
from mrv2.bench.bandwidth import DeviceLimits
from mrv2.bench.environment import environment
from mrv2.bench.harness import Axes, VariantResult, compare, same_tokens
from mrv2.bench.roofline import CostCard, ModelCost
from mrv2.bench.workloads import Workload
from mrv2.engine.core import EngineCore
from mrv2.errors import ConfigError
from mrv2_kernels.attention.plan import decode_choice
from mrv2_models.layers import Linear

# increase when a field changes its meaning
SCHEMA = 1
KIND = "mrv2-bench"


@dataclass(frozen=True)
class WorkloadResult:
    """One workload on one engine."""

    workload: Workload
    card: CostCard
    results: list[VariantResult]
    axes: Axes
    # (setting, difference) against the first setting; empty = the same tokens everywhere
    differences: list[tuple[str, Difference]]

    def as_dict(self, limits: DeviceLimits) -> dict[str, Any]:
        """Return it as plain values."""
        workload = self.workload
        bound = self.card.tokens_per_second(limits.bandwidth)
        return {
            "name": workload.name,
            "description": workload.description,
            "scale": workload.scale,
            "num_requests": len(workload.requests),
            "num_input_tokens": workload.num_input_tokens,
            "num_output_tokens": workload.num_output_tokens,
            "temperature": workload.temperature,
            "top_k": workload.top_k,
            "top_p": workload.top_p,
            "roofline": self.card.as_dict(limits.bandwidth, limits.peak_flops),
            "same_tokens": same_tokens(self.results),
            "differences": self._differences(),
            "variants": [result.as_dict(bound) for result in self.results],
            "comparisons": [asdict(each) for each in compare(self.results, self.axes)],
        }

    def _differences(self) -> dict[str, Any] | None:
        if not self.differences:
            return None
        worst = max(self.differences, key=lambda found: (not found[1].is_tie, abs(found[1].margin or 0.0)))
        return {
            "num_requests": len(self.differences),
            "num_ties": sum(difference.is_tie for _, difference in self.differences),
            "worst": f"{worst[0]}, {worst[1].describe()}",
        }


def model_cost(core: EngineCore) -> ModelCost:
    """Return the costs of the model of a loaded engine, weights and cache as it keeps them."""
    config = core.config
    return ModelCost.of(core.model_config, core.executor.model.dtype, config.quantization, config.kv_cache_dtype)


def cost_card(core: EngineCore, workload: Workload) -> CostCard:
    """Return the cost card of `workload` under the limits of a loaded engine."""
    return CostCard.of(
        workload,
        model_cost(core),
        max_num_seqs=core.config.max_num_seqs,
        max_num_batched_tokens=core.config.max_num_batched_tokens,
    )


def make_record(core: EngineCore, limits: DeviceLimits, workloads: Sequence[WorkloadResult]) -> dict[str, Any]:
    """Return the record of a session: environment, engine, measured limits and every workload."""
    config = asdict(core.config)
    # a folder's path says where somebody keeps it
    config["model"] = core.model_config.name
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment(),
        "model": {
            "name": core.model_config.name,
            "num_parameters": core.model_config.num_parameters,
            "dtype": str(core.executor.model.dtype).removeprefix("torch."),
        },
        "device": core.device.type,
        "engine": {**config, "max_model_len": core.max_model_len, "num_kv_blocks": core.executor.num_kv_blocks},
        "kernels": kernel_choices(core),
        "limits": {
            "read_bytes_per_s": limits.read.value,
            "read_method": limits.read.method,
            "matmul_flops_per_s": limits.matmul.value,
            "matmul_method": limits.matmul.method,
        },
        "workloads": [result.as_dict(limits) for result in workloads],
    }


def kernel_choices(core: EngineCore) -> dict[str, dict[str, Any]]:
    """Return the choices that depend on the padded batch alone; empty on the host, which pads nothing."""
    if not core.executor.buckets.decode:
        return {}
    config, dtype, kept = core.model_config, core.executor.model.dtype, core.executor.groups[0].spec.dtype
    choices = {
        str(size): asdict(decode_choice(size, config.num_key_value_heads, config.head_dim, dtype, kept))
        for size in core.executor.buckets.decode
    }
    products = {
        path: {str(size): asdict(module.picks.at(size)) for size in core.executor.buckets.decode}
        for path, module in core.executor.model.layers[0].named_modules()
        if isinstance(module, Linear)
    }
    return {"decode_attention_plans": choices, "product_plans": products}


def headline(record: dict[str, Any]) -> dict[str, Any]:
    """Return what fits one printed line: per workload and variant the rate, its share of the floor, and waits."""
    gpu = record["environment"]["gpu"]
    return {
        "kind": record["kind"],
        "model": record["model"]["name"],
        "dtype": record["model"]["dtype"],
        "on": gpu["name"] if gpu and record["device"] == "cuda" else record["device"],
        "workloads": {
            each["name"]: {
                "roofline_tok_s": round(each["roofline"]["memory_tok_s"], 1),
                "same_tokens": each["same_tokens"],
                "variants": {v["label"]: _headline_of(v) for v in each["variants"]},
            }
            for each in record["workloads"]
        },
    }


def _headline_of(variant: dict[str, Any]) -> dict[str, Any]:
    figures = {
        "tok_s": round(variant["tok_s_median"], 1),
        "roofline_share": round(variant["roofline_share"], 4),
        "waits_per_step": {reason: round(count, 3) for reason, count in variant["waits_per_step"].items()},
    }
    stages = variant["profile"]
    if stages is not None:
        figures["host_ms"] = round(stages["host_ms"], 4)
        figures["device_ms"] = round(stages["device_ms"], 4)
        figures["device_idle"] = None if stages["device_idle"] is None else round(stages["device_idle"], 4)
    return figures


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(path: Path) -> dict[str, Any]:
    """Read a record; raises `ConfigError` if the file is none, or of a later schema."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a benchmark record: {error}") from error
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise ConfigError(f"{path} is not a benchmark record (kind {KIND!r})")
    if record.get("schema") != SCHEMA:
        raise ConfigError(f"{path} has schema {record.get('schema')!r}, this version reads {SCHEMA}")
    return record
