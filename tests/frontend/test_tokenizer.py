"""The tokenizer of a model folder, and its chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrv2 import ConfigError, RequestError
from mrv2.chat_template import render_chat
from mrv2.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]


def render(template: str, messages: list = USER, **options: object) -> str:
    fixed = {"add_generation_prompt": False, "continue_final_message": False, "variables": {}}
    return render_chat(template, messages, **{**fixed, **options})  # type: ignore[arg-type]


def test_the_folder_is_read(tokenizer: Tokenizer) -> None:
    end, pad = tokenizer.backend.token_to_id("<|end|>"), tokenizer.backend.token_to_id("<|pad|>")
    assert tokenizer.eos_token_ids == (end, pad), "the tokenizer's own end token comes first"
    assert tokenizer.generation_defaults == {"temperature": 0.6, "top_k": 20}
    assert {end, pad} < tokenizer.special_ids
    assert tokenizer.token_text(end) == "<|end|>"


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="skip_tokenizer_init=True"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_a_damaged_config_is_named(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)


def test_template_sources(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    assert Tokenizer.from_folder(tmp_path).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).chat_template == "J"


def test_chat(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    expected = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nhi<|end|>\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == expected
    assert tokenizer.apply_chat_template(messages) == expected + "<|start|>assistant\n"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<" in tokenizer.apply_chat_template(parts)


def test_a_final_message_can_stay_open(tokenizer: Tokenizer) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|start|>assistant\nWell,")
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        tokenizer.apply_chat_template(messages, continue_final_message=True)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "at least one"),
        (["hi"], r"messages\[0\]"),
        ([{"role": "user"}], "needs a 'content'"),
        ([*USER, {"role": "system", "content": "late"}], "system must come first"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "only .*'text'"),
    ],
)
def test_bad_conversations_are_refused(tokenizer: Tokenizer, messages: list, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer.apply_chat_template(messages)


def test_template_helpers() -> None:
    """What published templates use: JSON without HTML escapes, dates, loop controls, generation blocks, variables."""
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"
    assert render("  {% if true %}\n  a\n  {% endif %}\n") == "  a\n"


def test_a_template_cannot_reach_outside() -> None:
    with pytest.raises(RequestError, match="cannot render"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match="cannot render"):
        render("{% if %}")
