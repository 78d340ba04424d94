"""Time of each way to draw a token, against the time it takes to read the logits once.

bf16 logits of N rows x 151,936, normal with a standard deviation of 3; `plain` has temperature 0.8, `greedy` 0,
`top-k/p` has 0.8, top-k 50 and top-p 0.9, `penalties` all three of them over a history of 512 tokens, which take an
fp32 copy of the logits.  Draws stand in one CUDA graph and go round enough buffers to leave the L2
cache, which the buffers of N = 1 nevertheless fit.  Bandwidth is the bytes of the logits over the time, whatever
a variant reads or writes beyond that.  torch's multinomial asks the device twice whether its input is valid, so it
cannot be captured: it runs eagerly, its waits included.  For greedy rows torch's arg-max takes its place, eagerly too.

Measured on an H200 (4.42 TB/s of reads) when `gumbel_blocked` took 4,096 tokens in four warps, with a guarded
exponential: 51 us at N = 256, where 23 had been predicted from 11.5 instructions an element; `gumbel_fused` 60 against
42; top-k/p 71 against 30.  The predictions had left out what a program does once: two reductions and a division (as
many instructions as half of its elements), a fence for the last arriver, and a chain of four loads (slot, temperature,
the row's best, and only then the logits) that kept most of its life free of reads.

Predicted before the next measurement, in microseconds, for kernels that fetch logits first, need no fence at larger
batches (a second launch draws) and take two warps for 4,096 tokens:

    plain             N=1   N=32   N=256   limit
    read once         0.1    2.2      18   memory
    gumbel_blocked      5      8      25   memory: 5 instructions an element (one exponential) and 120 a warp, 9 us
    gumbel_fused        8     13      50   integer units: 24.5 instructions, 15 of them shifts, logic, conversions
    top-k/p
    fused, blocked     18     20      40   2.5 instructions an element and 26 us; then three launches' chain

Measured then: gumbel_blocked 5.4, 10.1 and 30.5, which is 58 % of the read bandwidth at 256; gumbel_fused 4.7, 11.9 and
62; top-k/p 19.6, 26.2 and 54.  One launch instead of two costs 26 us at 256.  With blocks of 1,024 tokens in one warp,
ten of them a program at 256 rows, sums without a maximum, and top-k/p that looks at span maxima before it bisects
(traces/bench/h200-samplers.json, h200-sampler-tuning.json): gumbel_blocked 4.0, 9.8 and 25.2 us, 69 % of the read
bandwidth at 256; top-k/p 9.8, 13.9 and 37.7.

Then, by a script (h200-samplers-spans.json), with spans of 3 or 5 blocks a program from 32 rows on and greedy rows that
are read once and hashed never: plain at N = 1, 32, 64 and 256 gumbel_fused 4.7, 11.4, 17.7 and 47.4, gumbel_blocked
4.0, 7.5, 10.4 and 25.8, 69 % of the read bandwidth; greedy at 256 both 23.1, which is 77 %, after 42.5 and 51.1.  With
a row's mask made by many programs, top-k/p takes 2.3 (N = 1) to 1.4 (N = 256) times a plain draw of gumbel_two_pass,
11 to 2.2 times before, and 1.6 to 1.25 times one of softmax_race, 3.1 to 1.7 before.

With a warp a block and four warps a program in the first launch of gumbel_blocked, sums relative to the largest logit
(no second look where a sum overflows) and noise of blocks that the second launch makes before it waits, by a script
(h200-sampler-tuning-2.json; reads of 4.29 TB/s that day): plain at N = 1, 32 and 256 3.1, 6.5 and 24.4, which is 75 %
of the read bandwidth at 256, greedy 2.4, 5.4 and 22.2.  The kernels before took 7.1 and 25.9 at 32 and 256 on that day,
greedy 5.7 and 22.4.

With up to 64 rows drawn to the end by the launch that draws, which leaves none over (h200-sampler-tuning-3.json):
top-k/p at N = 1, 8, 16, 32 and 64 9.0, 10.7, 11.6, 12.9 and 15.5 us, 9.6, 11.3, 12.5, 13.8 and 16.5 before, so that it
takes 2.97 times a plain draw of gumbel_blocked at one row, 3.08 before.  Predicted was 8.4 at one row.

A bound takes the place of both logarithms of `gumbel_two_pass` in `gumbel_fused`; the hash is what remains, so it
cannot come near memory without other noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from mrv2.bench.bandwidth import Limit, measure_read_bandwidth
from mrv2.bench.environment import environment
from mrv2.config import legal_values
from mrv2.device import Device
from mrv2.errors import ConfigError
from mrv2.instrument import recording
from mrv2.runner.v2.variants import DrawPlan, draw
from mrv2_kernels.sampling.gumbel_blocked import gumbel_blocked_sample_torch
from mrv2_kernels.sampling.gumbel_fused import gumbel_fused_sample_torch
from mrv2_kernels.sampling.penalties import apply_penalties
from mrv2_kernels.sampling.token_counts import update_token_counts
from mrv2_kernels.sampling.truncation import Truncation
from mrv2_kernels.sampling.workspace import DrawWorkspace

VOCAB = 151_936
ROWS = (1, 32, 256)
CASES = ("plain", "greedy", "top-k/p", "penalties")
BASELINE = "torch multinomial"
KIND = "mrv2-samplers"
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 50, 0.9
_REPETITION, _FREQUENCY, _PRESENCE = 1.1, 0.3, 0.2
_HISTORY, _PROMPT = 512, 128
# several times the last-level cache, in at most this many buffers
_BUFFER_BYTES, _MAX_BUFFERS = 256 << 20, 64
_REPETITIONS = 7
_STAGE = "measure"


@dataclass(frozen=True)
class SamplerTime:
    """One variant at one batch size."""

    case: str
    variant: str
    num_rows: int
    microseconds: float
    # of reading the logits once
    gigabytes_per_second: float
    share_of_read_bandwidth: float
    # False = run eagerly, the host's gaps included
    captured: bool = True


def measure_samplers(
    device: Device, *, vocab: int = VOCAB, rows: tuple[int, ...] = ROWS, progress: Callable[[str], object] = print
) -> dict[str, Any]:
    """Time every variant and the torch baseline; return the record as plain values.  CUDA only."""
    if device.type != "cuda":
        raise ConfigError("--samplers measures kernels: it needs a CUDA device")
    limit = measure_read_bandwidth(device)
    times = []
    for num_rows in rows:
        progress(f"samplers: {num_rows} rows")
        bench = SamplerBatch(device, num_rows, vocab)
        for case in CASES:
            for variant in (*legal_values("sampler"), BASELINE):
                seconds, captured = bench.seconds(variant, case)
                rate = num_rows * vocab * 2 / seconds
                share = rate / limit.value
                times.append(SamplerTime(case, variant, num_rows, 1e6 * seconds, 1e-9 * rate, share, captured))
        del bench
        torch.cuda.empty_cache()
    return make_record(times, limit, vocab)


def make_record(times: list[SamplerTime], limit: Limit, vocab: int) -> dict[str, Any]:
    """Return the record: environment, limit, every time, and the ratios that are asked about."""
    found = {(each.case, each.variant, each.num_rows): each.microseconds for each in times}
    rows = sorted({each.num_rows for each in times})
    variants = legal_values("sampler")
    return {
        "kind": KIND,
        "environment": environment(),
        "vocab": vocab,
        "read_gigabytes_per_second": 1e-9 * limit.value,
        "read_method": limit.method,
        "times": [asdict(each) for each in times],
        "two_pass_over_fused": {
            str(n): found["plain", "gumbel_two_pass", n] / found["plain", "gumbel_fused", n] for n in rows
        },
        "truncated_over_plain": {
            variant: {str(n): found["top-k/p", variant, n] / found["plain", variant, n] for n in rows}
            for variant in variants
        },
        "fastest_share_of_read_bandwidth": {
            str(n): max(each.share_of_read_bandwidth for each in times if each.num_rows == n and each.case == "plain")
            for n in rows
        },
    }


def report(record: dict[str, Any]) -> str:
    """Return the record as a table."""
    rows = sorted({each["num_rows"] for each in record["times"]})
    lines = [
        f"{record['vocab']:,} tokens, bf16; reads at {record['read_gigabytes_per_second']:,.0f} GB/s "
        f"({record['read_method']})",
        f"{'':27}" + "".join(f"{f'N = {n}: us':>14}{'GB/s':>8}{'of read':>9}" for n in rows),
    ]
    by_key = {(each["case"], each["variant"], each["num_rows"]): each for each in record["times"]}
    for case, variant in dict.fromkeys((each["case"], each["variant"]) for each in record["times"]):
        cells = (by_key[case, variant, n] for n in rows)
        lines.append(
            f"{case:9}{variant:18}"
            + "".join(
                f"{c['microseconds']:13.1f}{' ' if c['captured'] else '*'}"
                f"{c['gigabytes_per_second']:8.0f}{c['share_of_read_bandwidth']:9.0%}"
                for c in cells
            )
        )
    lines.append("* eager, the host's gaps included")
    ratios = "  ".join(f"N = {n}: {ratio:.2f}" for n, ratio in record["two_pass_over_fused"].items())
    lines.append(f"gumbel_two_pass / gumbel_fused: {ratios}")
    for variant, by_rows in record["truncated_over_plain"].items():
        lines.append(f"top-k/p / plain, {variant}: " + "  ".join(f"N = {n}: {r:.2f}" for n, r in by_rows.items()))
    return "\n".join(lines)


def headline(record: dict[str, Any]) -> dict[str, Any]:
    """Return what fits one JSON line."""
    gpu = record["environment"]["gpu"] or {}
    return {
        "kind": KIND,
        "gpu": gpu.get("name"),
        "revision": record["environment"]["revision"],
        "read_gb_s": round(record["read_gigabytes_per_second"]),
        "us": {
            f"{each['case']} {each['variant']} {each['num_rows']}": round(each["microseconds"], 1)
            for each in record["times"]
        },
        **{
            name: record[name]
            for name in ("two_pass_over_fused", "truncated_over_plain", "fastest_share_of_read_bandwidth")
        },
    }


def _captured(device: Device, work: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of `work` as a graph, or `work` itself where an operator of it cannot be captured."""
    try:
        return device.capture(work).replay
    except RuntimeError:
        return work


class SamplerBatch:
    """Logits, parameters and outputs of one batch size."""

    def __init__(self, device: Device, num_rows: int, vocab: int, *, num_buffers: int | None = None) -> None:
        self.device = device
        size = 2 * num_rows * vocab
        count = num_buffers or min(_MAX_BUFFERS, max(4, -(-_BUFFER_BYTES // size)))
        # [N, V] bf16 each
        self.buffers = [device.empty((num_rows, vocab), torch.bfloat16) for _ in range(count)]
        # [N]
        self.rows = device.zeros((num_rows,), torch.int32)
        self.positions = device.zeros((num_rows,), torch.int32)
        self.sampled = device.zeros((num_rows,), torch.int64)
        # [R]
        self.temperature = device.full((num_rows,), _TEMPERATURE)
        self.no_temperature = device.zeros((num_rows,))
        self.seeds = device.zeros((num_rows,), torch.int64)
        self.truncation = Truncation(
            device.zeros((num_rows,)),
            device.full((num_rows,), _TOP_K, torch.int32),
            device.full((num_rows,), _TOP_P),
            all_rows=True,
        )
        self.workspace = DrawWorkspace(device.zeros((num_rows,), torch.int64), device.zeros((num_rows,), torch.int32))
        # [R, L]; counts of the history, as the penalties keep them
        self.history = device.zeros((num_rows, _HISTORY), torch.int32)
        self.counts = device.zeros((num_rows, _HISTORY), torch.int16)
        self.counted_len = device.zeros((num_rows,), torch.int32)
        self.total_len = device.full((num_rows,), _HISTORY, torch.int32)
        self.penalties = device.zeros((num_rows, 3))
        # [N, V]: the table that one keeps without an engine
        self.output_counts = device.zeros((num_rows, vocab), torch.int32)
        # torch's default generator would stay bound to a capture that failed
        self.generator = torch.Generator(self.rows.device).manual_seed(1)
        device.main.run(_STAGE, self._fill)

    def _fill(self) -> None:
        generator = torch.Generator(self.rows.device).manual_seed(0)
        for logits in self.buffers:
            logits.normal_(std=3.0, generator=generator)
        torch.arange(len(self.rows), out=self.rows)
        self.positions.copy_(self.rows)
        self.seeds.copy_(self.rows)
        vocab = self.output_counts.shape[1]
        self.history.copy_(torch.randint(vocab, self.history.shape, generator=generator, device=self.rows.device))
        self.penalties.copy_(torch.tensor([_REPETITION, _FREQUENCY, _PRESENCE]))
        self._count(has_new=True)
        outputs = self.history[:, _PROMPT:].long()
        self.output_counts.scatter_add_(1, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def seconds(self, variant: str, case: str) -> tuple[float, bool]:
        """Return the median time of one draw among those of a graph, and whether they could be captured."""

        def work() -> None:
            for logits in self.buffers:
                if variant == BASELINE:
                    self._draw_in_torch(logits, case)
                else:
                    self.draw(variant, logits, case)

        # compiles, and grows the allocator's pools
        self.device.main.run(_STAGE, work)
        self.device.synchronize("samplers: warm-up")
        run = work if variant == BASELINE else _captured(self.device, work)
        self.device.main.run(_STAGE, run)
        self.device.synchronize("samplers: warm-up")
        with recording(self.device) as recorder:
            for _ in range(_REPETITIONS):
                self.device.main.run(_STAGE, run)
            self.device.synchronize("samplers")
            times = [span.end_ns - span.start_ns for span in recorder.spans() if span.kind == "device"]
        return median(times) * 1e-9 / len(self.buffers), run is not work

    def _count(self, *, has_new: bool) -> None:
        prompt_len = torch.full_like(self.total_len, _PROMPT)
        update_token_counts(
            self.counts,
            self.counted_len,
            self.history,
            prompt_len,
            self.total_len,
            self.penalties,
            self.rows,
            has_new=has_new,
        )

    def draw(self, variant: str, logits: torch.Tensor, case: str, *, is_reference: bool = False) -> None:
        """Draw a token a row into `sampled`; by the torch twin of a fused or blocked variant if `is_reference`."""
        is_truncated, has_penalties = case == "top-k/p", case == "penalties"
        if has_penalties:
            logits = logits.float()
            self._count(has_new=False)
            no_drafts = torch.zeros_like(self.rows)
            apply_penalties(
                logits,
                self.rows,
                self.penalties,
                self.history,
                self.counts,
                self.total_len,
                no_drafts,
                self.rows,
                self.rows,
            )
        truncation = self.truncation if is_truncated else None
        is_greedy = case == "greedy"
        temperature = self.no_temperature if is_greedy else self.temperature
        where = (logits, self.sampled, self.rows, self.positions, temperature, self.seeds)
        if is_reference:
            op = {"gumbel_fused": gumbel_fused_sample_torch, "gumbel_blocked": gumbel_blocked_sample_torch}[variant]
            op(*where, workspace=self.workspace, truncation=truncation)
            return
        draw(
            DrawPlan(
                variant,
                has_greedy=is_greedy,
                is_scaled=not is_greedy,
                is_truncated=is_truncated,
                all_truncated=is_truncated,
            ),
            *where,
            truncation=truncation,
            workspace=self.workspace,
            may_change=has_penalties,
        )

    def _draw_in_torch(self, logits: torch.Tensor, case: str) -> None:
        """What one writes without an engine; the draws follow torch's own generator."""
        if case == "greedy":
            self.sampled.copy_(logits.argmax(dim=-1))
            return
        if case != "top-k/p":
            x = logits.float()
            if case == "penalties":
                x = torch.where(self.output_counts > 0, torch.where(x > 0, x / _REPETITION, x * _REPETITION), x)
                x = x - _FREQUENCY * self.output_counts - _PRESENCE * (self.output_counts > 0)
            probs = (x / _TEMPERATURE).softmax(dim=-1)
            self.sampled.copy_(torch.multinomial(probs, 1, generator=self.generator).squeeze(1))
            return
        best, ids = logits.topk(_TOP_K, dim=-1)
        probs = (best.float() / _TEMPERATURE).softmax(dim=-1)
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= _TOP_P, 0.0)
        self.sampled.copy_(ids.gather(1, torch.multinomial(probs, 1, generator=self.generator)).squeeze(1))
