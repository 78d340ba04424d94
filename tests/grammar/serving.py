"""Engines on the toy tokenizer, constrained requests, and checks of what they yield."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import tokenizers

from grammar.toy import EOS, toy_tokenizer_json, write_toy_tokenizer
from mrv2.device import Device
from mrv2.engine.core import EngineCore
from mrv2.sampling_params import SamplingParams
from mrv2.structured_outputs import StructuredOutputsParams
from mrv2.tokenizer import Tokenizer
from serving import Collector, make_core, random_prompt

TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_str(toy_tokenizer_json()), eos_token_ids=(EOS,))
# bounded, so that a model with random weights comes to an end
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST_GRAMMAR = 'root ::= "(" item ("," item){0,2} ")"\nitem ::= [a-f]{1,3} | "<" [0-9] ">"'
REGEX = r"(\d{3}-\d{2}|[a-k]{2,5}!)"
CHOICES = ("yes", "no", 'say "no"\n', "maybe é")


@dataclass(frozen=True)
class Constraint:
    """A constraint, and whether a text is what it asks for."""

    params: StructuredOutputsParams
    accepts: Callable[[str], bool]


def _is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


CONSTRAINTS = (
    Constraint(StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), _is_person),
    Constraint(StructuredOutputsParams(regex=REGEX), lambda text: re.fullmatch(REGEX, text) is not None),
    Constraint(StructuredOutputsParams(choice=list(CHOICES)), lambda text: text in CHOICES),
    Constraint(
        StructuredOutputsParams(grammar=LIST_GRAMMAR),
        lambda text: re.fullmatch(r"\(([a-f]{1,3}|<\d>)(,([a-f]{1,3}|<\d>)){0,2}\)", text) is not None,
    ),
)


def toy_core(folder: Path, ready: Device | None = None, **options: Any) -> EngineCore:
    """Return a small engine that knows the toy tokenizer, written into `folder`."""
    return make_core(ready, tokenizer=str(write_toy_tokenizer(folder)), **options)


def submit(collector: Collector, req_id: str, prompt: list[int], params: SamplingParams, **fields: Any) -> None:
    """Submit with the toy tokenizer's end token."""
    collector.submit(req_id, prompt, params, eos_token_ids=(EOS,), **fields)


def text_of(token_ids: list[int]) -> str:
    """Return the text of an output, its end token left out."""
    return TOKENIZER.decode(token_ids)


def mixed_params(index: int, *, max_tokens: int = 60) -> tuple[SamplingParams, Constraint | None]:
    """Return parameters for request `index`: odd ones follow a grammar, even ones are free."""
    rng = np.random.default_rng(index)
    constraint = CONSTRAINTS[index // 2 % len(CONSTRAINTS)] if index % 2 else None
    choices: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.9, "min_p": 0.02}, {"frequency_penalty": 0.7}]
    shaping = choices[int(rng.integers(4))]
    params = SamplingParams(
        temperature=0.0 if rng.random() < 0.2 else 1.0,
        seed=index,
        max_tokens=max_tokens if constraint else int(rng.integers(4, 25)),
        ignore_eos=constraint is None,
        structured_outputs=None if constraint is None else constraint.params,
        **shaping,
    )
    return params, constraint


def mixed_prompt(index: int) -> list[int]:
    return random_prompt(index, 3 + (11 * index) % 40)
