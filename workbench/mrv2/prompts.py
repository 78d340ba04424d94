"""The forms in which prompts may be given, brought into one."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from mrv2.errors import RequestError, nearest
from mrv2.sampling_params import SamplingParams
from mrv2.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(slots=True)
class ParsedPrompt:
    """A prompt in the one form that the engine takes."""

    # None when only ids were given
    text: str | None
    token_ids: list[int]


def parse_prompts(prompts: PromptType | Sequence[PromptType], tokenizer: Tokenizer | None) -> list[ParsedPrompt]:
    """Accept one prompt or a sequence of them: text, token ids, or a dict with either.

    Raises `RequestError` for any other form, and for text when there is no tokenizer.
    """
    if not isinstance(prompts, (list, tuple)) or (prompts and all(_is_id(item) for item in prompts)):
        return [parse_prompt(prompts, tokenizer)]
    return [parse_prompt(item, tokenizer) for item in prompts]


def parse_prompt(prompt: Any, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True) -> ParsedPrompt:
    """Bring one prompt into the one form."""
    text, ids = prompt if isinstance(prompt, str) else None, None
    if isinstance(prompt, Mapping):
        legal = ("prompt", "prompt_token_ids")
        for key in prompt:
            if key not in legal:
                raise RequestError(f"prompt key {key!r} is not supported{nearest(str(key), legal)}; legal: {legal}")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif not isinstance(prompt, str):
        ids = prompt
    if ids is not None:
        return ParsedPrompt(text, _token_ids(ids))
    if not isinstance(text, str):
        raise RequestError(
            f"a prompt must be a str, a list of token ids or a dict with either, not {reprlib.repr(prompt)}"
        )
    if tokenizer is None:
        raise RequestError(
            "this engine has no tokenizer (a preset has none; skip_tokenizer_init leaves it out): "
            "give prompts as token ids, for example {'prompt_token_ids': [1, 2, 3]}"
        )
    return ParsedPrompt(text, tokenizer.encode(text, add_special_tokens=add_special_tokens))


def match_params(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    """Return one `SamplingParams` for each prompt."""
    found = [params] * num_prompts if isinstance(params, SamplingParams) else list(params)
    for each in found:
        if not isinstance(each, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, not {type(each).__name__}")
    if len(found) != num_prompts:
        raise RequestError(f"{len(found)} sampling_params for {num_prompts} prompts; give one, or one each")
    return found


def match_priorities(priority: Sequence[int] | None, num_prompts: int) -> list[int]:
    """Return one priority for each prompt, 0 by default."""
    found = [0] * num_prompts if priority is None else list(priority)
    if len(found) != num_prompts or not all(_is_id(each) for each in found):
        raise RequestError(f"priority={priority!r} must be a list of one integer for each of {num_prompts} prompts")
    return found


def _token_ids(ids: Any) -> list[int]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence) or not all(_is_id(each) for each in ids):
        raise RequestError(f"prompt token ids must be a list of integers, not {reprlib.repr(ids)}")
    return [int(each) for each in ids]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
