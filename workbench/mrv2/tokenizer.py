"""Text in and out of token ids: `tokenizers` for the vocabulary, Jinja for the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from mrv2.chat_template import Message, render_chat
from mrv2.errors import ConfigError, RequestError

# how the byte-level vocabularies write the bytes that are not printable: GPT-2's table, byte -> character
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


class Tokenizer:
    """The tokenizer of a Hugging Face model folder, without `transformers`.

    Attributes:
        eos_token_ids: ids that end a sequence, the tokenizer's own first.
        special_ids: ids whose text ``skip_special_tokens`` drops.
        generation_defaults: sampling parameters that ``generation_config.json`` names.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: dict[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        generation_defaults: dict[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.config = config or {}
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self.generation_defaults = generation_defaults or {}
        self.special_ids = frozenset(i for i, tok in backend.get_added_tokens_decoder().items() if tok.special)
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, where present, the tokenizer, generation and model configs beside it.

        Raises `ConfigError` when there is no ``tokenizer.json`` or a file is not valid.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{folder} holds no tokenizer.json; pass tokenizer=<folder that does>, "
                "or skip_tokenizer_init=True and prompts as token ids"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises bare Exception
            raise ConfigError(f"{file} cannot be read as a tokenizer: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        eos = [backend.token_to_id(text) for text in [_token_text(config.get("eos_token"))] if text]
        for source in (generation, _read_json(folder / "config.json")):
            ids = source.get("eos_token_id")
            if ids is not None:
                eos += ids if isinstance(ids, list) else [ids]
                break
        return cls(
            backend,
            config=config,
            eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
            chat_template=_find_template(folder, config),
            generation_defaults=_generation_defaults(generation),
        )

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows; the model's embedding may be padded beyond."""
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with the special tokens that the model's own rule adds."""
        if not isinstance(text, str):
            raise RequestError(f"a prompt text must be a str, not {type(text).__name__}")
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt is not valid Unicode text: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; bytes that are no valid UTF-8 become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, special tokens included."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.backend.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; only for byte-level vocabularies."""
        value = self._bytes.get(token_id)
        if value is None:
            value = self._bytes[token_id] = _to_bytes(self.backend.id_to_token(token_id) or "")
        return value

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation; further keywords become template variables.

        Raises `RequestError` when there is no template, a message is malformed or the template refuses it.
        """
        template = chat_template or self.chat_template
        if not template:
            raise RequestError("the model's folder holds no chat template; pass chat_template=<Jinja text>")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: _token_text(self.config.get(name)) or "" for name in names}
        return render_chat(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**tokens, "tools": list(tools) if tools else None, **variables},
        )


def _to_bytes(token: str) -> bytes:
    """Undo GPT-2's byte alphabet; a token with any other character (an added one) is plain text."""
    values = [_BYTE_OF_CHAR.get(char, -1) for char in token]
    return token.encode("utf-8", "replace") if -1 in values else bytes(values)


def _token_text(token: Any) -> str | None:
    """A token of ``tokenizer_config.json`` is a string, or an object with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """``chat_template.jinja`` wins over the config; of several named templates the default one counts."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _generation_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("max_new_tokens") is not None:
        found["max_tokens"] = generation["max_new_tokens"]
    return found
