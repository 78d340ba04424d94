"""Chat templates: a sandboxed Jinja environment with the names that published templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mrv2.errors import RequestError

Message = Mapping[str, Any]


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is transparent."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """Render a conversation to prompt text.

    ``continue_final_message`` leaves the last message open: everything after its content is cut.
    Raises `RequestError` for a malformed message or one that the template refuses.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError("continue_final_message=True needs add_generation_prompt=False: the last turn stays open")
    plain = [_plain_message(message, index) for index, message in enumerate(messages)]
    if not plain:
        raise RequestError("a conversation needs at least one message")
    try:
        text = _compile(template).render(
            **{"messages": plain, "add_generation_prompt": add_generation_prompt, **variables}
        )
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template cannot render this conversation: {error}") from error
    if not continue_final_message:
        return text
    final = plain[-1].get("content")
    final = final.strip() if isinstance(final, str) else ""
    if not final or final not in text:
        raise RequestError(f"continue_final_message=True: the rendered prompt does not hold the last message {final!r}")
    return text[: text.rindex(final) + len(final)]


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    """Check a message and join text parts, the one content form that every text template takes."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}]={message!r} must be a dict with a 'role' and a 'content'")
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    f"messages[{index}] has a content part {part!r}; only {{'type': 'text', 'text': ...}} is supported"
                )
        plain["content"] = "\n".join(part["text"] for part in content)
    elif not isinstance(content, str) and not (content is None and plain.get("tool_calls")):
        raise RequestError(f"messages[{index}] needs a 'content' of type str or list of text parts, not {content!r}")
    return plain


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _refuse,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }
    environment.globals.update(helpers)
    return environment.from_string(template)


def _to_json(value: Any, **kwargs: Any) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters, which a model never saw in training."""
    return json.dumps(value, **{"ensure_ascii": False, **kwargs})


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
