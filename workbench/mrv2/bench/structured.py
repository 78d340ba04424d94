"""What structured outputs cost: throughput with half and with all requests under a grammar, against none.

A closed loop holds the batch constant: a request that ends is replaced by one of its kind until a fixed number of
tokens is out.  Free requests run to their length; constrained ones end when their grammar does.  All draw at
temperature 1 from seeds of their own, so each setting is reproducible.

Measured on an H200 (SmolLM2-135M, 64 slots): 51,425 tok/s at 0 %, 2,517 at 50 % with 23.7 ms of masks a step, 53.9 ms
at 100 %: the regular expression was compiled to rules, which leave thousands of tokens uncertain, so that a fill took
a millisecond.  Since then it is one automaton.  All of a step's masks then took 8 us a row on two cores of another
host (0.5 ms for 64 rows; a fill 4 us, 1,190 before): predicted 0.3 ms at 50 % and 0.5 at 100 %, under the forward;
measured 0.33 and 0.55 ms (19,912 and 15,762 tok/s of 51,887), of which 0.16 and 0.49 ms with an idle device: the
forward of so small a model is over before the masks are (traces/bench/h200-structured.json).

With ``--grammar-drafts --num-spec-tokens 4 --max-num-spec-tokens 4`` a JSON object of the form below takes some ten of
its thirty tokens from drafts that its grammar forces: predicted a quarter fewer steps for it, none for the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Any

from mrv2.bench.environment import environment
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.instrument import Span, recording, stages
from mrv2.instrument.intervals import intersect, merge, subtract, total
from mrv2.instrument.recorder import device_busy
from mrv2.sampling_params import SamplingParams
from mrv2.structured_outputs import StructuredOutputsParams
from mrv2.tokenizer import Tokenizer

KIND = "mrv2-structured"
FREE = "free"
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_REGEX = r"[a-z]{3,12}( [a-z]{3,12}){3,7}\."
_GRAMMAR = 'root ::= term (" + " term){2,6}\nterm ::= [1-9] [0-9]{0,3} | "(" [1-9] " * " [1-9] ")"\n'


@dataclass(frozen=True)
class Form:
    """One form of output: the constraint, the question, and whether a text has the form."""

    constraint: StructuredOutputsParams
    question: str
    check: Callable[[str], bool]


def _is_person(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and set(value) == {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 24
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 120
        and 2 <= len(value["tags"]) <= 4
        and set(value["tags"]) <= {"red", "green", "blue"}
    )


FORMS = {
    "json": Form(
        StructuredOutputsParams(json=json.dumps(_SCHEMA), disable_any_whitespace=True),
        "Describe a person as JSON with name, age and tags.",
        _is_person,
    ),
    "regex": Form(
        StructuredOutputsParams(regex=_REGEX),
        "Write a short sentence about rain.",
        lambda text: re.fullmatch(_REGEX, text) is not None,
    ),
    "grammar": Form(
        StructuredOutputsParams(grammar=_GRAMMAR),
        "Write a sum of numbers.",
        lambda text: (
            re.fullmatch(r"T( \+ T){2,6}".replace("T", r"([1-9]\d{0,3}|\([1-9] \* [1-9]\))"), text) is not None
        ),
    ),
}


@dataclass
class Outcome:
    """One setting: `share` of the slots is constrained."""

    share: float
    grammar_overlap: str
    tokens_per_second: float
    # between two tokens of a free request, its mean; median over the requests, None = no request was free
    free_tpot_ms: float | None
    step_ms: float
    num_finished: int
    # constrained texts that ended by themselves, and those among them that have the form asked for
    num_ended: int
    num_valid: int
    waits: dict[str, int]
    # of a step: computing masks, and the part of it during which the device was idle
    mask_ms: float | None = None
    exposed_mask_ms: float | None = None


@dataclass
class _Loop:
    """A closed loop of requests of fixed kinds."""

    core: EngineCore
    tokenizer: Tokenizer
    kinds: Sequence[str]
    output_len: int
    num_started: int = 0
    # request id -> (kind, tokens, arrival times of tokens in ns)
    live: dict[str, tuple[str, list[int], list[int]]] = field(default_factory=dict)
    done: list[tuple[str, list[int], list[int], str]] = field(default_factory=list)

    def start(self, kind: str) -> None:
        index, self.num_started = self.num_started, self.num_started + 1
        form = FORMS.get(kind)
        question = form.question if form is not None else "Tell me about the sea."
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": f"({index}) {question}"}])
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        eos = (*self.tokenizer.eos_token_ids, *self.core.model_config.eos_token_ids)
        params = SamplingParams(
            temperature=1.0,
            seed=index,
            max_tokens=self.output_len,
            ignore_eos=form is None,
            detokenize=False,
            structured_outputs=form.constraint if form is not None else None,
        )
        req_id = f"r{index}"
        self.core.add_request(
            EngineRequest(req_id=req_id, prompt_token_ids=ids, params=params, eos_token_ids=tuple(dict.fromkeys(eos)))
        )
        self.live[req_id] = (kind, [], [])

    def run(self, num_tokens: int) -> tuple[float, int]:
        """Serve until `num_tokens` are out; return seconds and steps.  Requests still running are aborted."""
        for kind in self.kinds:
            self.start(kind)
        first, start, out = self.core.scheduler.step, perf_counter_ns(), 0
        while out < num_tokens:
            outputs = self.core.step()
            now = perf_counter_ns()
            for output in outputs:
                kind, tokens, times = self.live[output.req_id]
                tokens += output.new_token_ids
                times += [now] * len(output.new_token_ids)
                out += len(output.new_token_ids)
                if output.finish_reason is not None:
                    del self.live[output.req_id]
                    self.done.append((kind, tokens, times, output.finish_reason))
                    self.start(kind)
        seconds = 1e-9 * (perf_counter_ns() - start)
        self.core.abort(list(self.live))
        while self.core.has_unfinished:
            self.core.step()
        return seconds, self.core.scheduler.step - first


def kinds_of(num_slots: int, share: float) -> list[str]:
    """Return the kind of each slot: `share` of them constrained, the forms in turn."""
    num_constrained = round(num_slots * share)
    forms = [name for _, name in zip(range(num_constrained), _cycle(tuple(FORMS)))]
    return [FREE] * (num_slots - num_constrained) + forms


def _cycle(names: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from names


def measure_structured(
    core: EngineCore,
    tokenizer: Tokenizer,
    *,
    num_slots: int,
    num_tokens: int,
    output_len: int = 96,
    progress: Callable[[str], object] = print,
) -> list[Outcome]:
    """Serve none, half and all slots constrained, and half with masks made before the launch.

    Each setting runs three times: to compile and warm up, for the clock, and recorded.
    """
    outcomes = []
    settings = [(0.0, "deferred"), (0.5, "deferred"), (0.5, "blocking"), (1.0, "deferred")]
    for share, overlap in settings:
        progress(f"structured outputs: {share:.0%} of {num_slots} slots, {overlap}")
        core.set_knobs(**core.knobs.with_changes(grammar_overlap=overlap).as_dict())
        kinds = kinds_of(num_slots, share)
        _Loop(core, tokenizer, kinds, output_len).run(max(num_slots * 2, num_tokens // 8))
        before = dict(core.device.waits)
        loop = _Loop(core, tokenizer, kinds, output_len)
        seconds, num_steps = loop.run(num_tokens)
        waits = {reason: n - before.get(reason, 0) for reason, n in core.device.waits.items()}
        outcome = _outcome(loop, share, overlap, seconds, num_steps, {k: n for k, n in waits.items() if n})
        with recording(core.device) as recorder:
            _, num_steps = _Loop(core, tokenizer, kinds, output_len).run(max(num_slots * 2, num_tokens // 4))
            core.device.synchronize("end of recording")
            spans = recorder.spans()
        if share:
            outcome.mask_ms, outcome.exposed_mask_ms = (1e-6 * ns / num_steps for ns in mask_times(spans))
        outcomes.append(outcome)
    return outcomes


def mask_times(spans: Sequence[Span]) -> tuple[int, int]:
    """Return the time inside `fill_grammar_mask`, waits left out, and its part with the device idle, in ns."""
    fills = merge((s.start_ns, s.end_ns) for s in spans if s.kind == "host" and s.name == stages.FILL_GRAMMAR_MASK)
    waits = merge((s.start_ns, s.end_ns) for s in spans if s.kind == "wait")
    fills = subtract(fills, waits)
    return total(fills), total(fills) - total(intersect(fills, device_busy(list(spans))))


def _outcome(loop: _Loop, share: float, overlap: str, seconds: float, num_steps: int, waits: dict[str, int]) -> Outcome:
    served = [(kind, times) for kind, _, times, _ in loop.done] + [
        (kind, times) for kind, _, times in loop.live.values()
    ]
    tpots = [1e-6 * (t[-1] - t[0]) / (len(t) - 1) for kind, t in served if kind == FREE and len(t) > 1]
    ended = [(kind, tokens) for kind, tokens, _, reason in loop.done if kind != FREE and reason == "stop"]
    num_tokens = sum(len(tokens) for _, tokens, _, _ in loop.done) + sum(len(v[1]) for v in loop.live.values())
    return Outcome(
        share=share,
        grammar_overlap=overlap,
        tokens_per_second=num_tokens / seconds,
        free_tpot_ms=median(tpots) if tpots else None,
        step_ms=1e3 * seconds / num_steps,
        num_finished=len(loop.done),
        num_ended=len(ended),
        num_valid=sum(FORMS[kind].check(loop.tokenizer.decode(tokens).strip()) for kind, tokens in ended),
        waits=waits,
    )


def make_record(core: EngineCore, outcomes: Sequence[Outcome], num_slots: int) -> dict[str, Any]:
    """Return the record as plain values."""
    free = outcomes[0]
    return {
        "kind": KIND,
        "environment": environment(),
        "model": core.model_config.name,
        "num_slots": num_slots,
        "knobs": {k: v for k, v in core.knobs.as_dict().items() if k != "grammar_overlap"},
        "outcomes": [asdict(each) for each in outcomes],
        "throughput_against_free": [each.tokens_per_second / free.tokens_per_second for each in outcomes],
    }


def report(record: dict[str, Any]) -> str:
    """Return the record as a table."""
    lines = [
        f"{record['num_slots']} requests at a time, {record['model']}",
        f"{'constrained':>12}{'masks':>10}{'tok/s':>10}{'of free':>9}{'step ms':>9}{'free TPOT':>11}"
        f"{'mask ms':>9}{'exposed':>9}{'valid':>11}",
    ]
    for each, ratio in zip(record["outcomes"], record["throughput_against_free"], strict=True):
        optional = [each["free_tpot_ms"], each["mask_ms"], each["exposed_mask_ms"]]
        tpot, mask, exposed = ("-" if value is None else f"{value:.3f}" for value in optional)
        valid = f"{each['num_valid']}/{each['num_ended']}" if each["share"] else "-"
        lines.append(
            f"{each['share']:>12.0%}{each['grammar_overlap']:>10}{each['tokens_per_second']:>10,.0f}{ratio:>9.0%}"
            f"{each['step_ms']:>9.2f}{tpot:>11}{mask:>9}{exposed:>9}{valid:>11}"
        )
    waits = sorted({reason for each in record["outcomes"] for reason in each["waits"]})
    lines.append(f"waits of the host: {', '.join(waits)}; mask ms and exposed (device idle meanwhile) are per step")
    return "\n".join(lines)
