"""A scripted engine core and small tokenizers; importable by name, because a child process needs them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from mrv2.config import EngineConfig, Knobs
from mrv2.engine.messages import CaptureTime, EngineOutput, EngineRequest, EngineSnapshot, TokenLogprob
from mrv2.engine.step_outputs import EngineOutputs
from mrv2.errors import RequestError
from mrv2.instrument import Recorder
from mrv2_models.config import PRESET_DIR, ModelConfig

# prompts that begin with one of these make the core misbehave
CRASH_TOKEN, EXIT_TOKEN, INTERRUPT_TOKEN = 500, 501, 502

CORPUS = [
    "The quick brown fox jumps over the lazy dog. One, two, three!  Numbers 123 and  spaces.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "你好,世界。今天天气很好。日本語の文章もあります。",
    "emoji 🎉🚀👩‍👩‍👧 and accents éèêë ñ",
] * 4

CHAT_TEMPLATE = (
    "{% for message in messages %}\n"
    "    {% if message.role == 'system' and not loop.first %}\n"
    "        {{ raise_exception('system must come first') }}\n"
    "    {% endif %}\n"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


class FakeDevice:
    """A device with nothing to record."""

    def start_recording(self, recorder: Recorder) -> None: ...

    def stop_recording(self) -> None: ...

    def synchronize(self, reason: str) -> None: ...


@dataclass
class _Running:
    request: EngineRequest
    num_done: int = 0


@dataclass
class FakeCore:
    """Echoes: output token k of a request is token k of its prompt, again from the start after the last."""

    config: EngineConfig
    tokens_per_step: int = 1
    device: Any = field(default_factory=FakeDevice)
    max_model_len: int = 1 << 20
    num_steps: int = 0
    aborted: list[str] = field(default_factory=list)
    admitted: list[EngineRequest] = field(default_factory=list)
    is_shut_down: bool = False

    def __post_init__(self) -> None:
        self.model_config = ModelConfig.from_preset("tiny-llama")
        self.max_model_len = self.config.max_model_len or self.max_model_len
        self.knobs = self.config.knobs
        self.running: dict[str, _Running] = {}
        self.ready = EngineOutputs()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.ready)

    def add_request(self, message: EngineRequest) -> None:
        if len(message.prompt_token_ids) >= self.max_model_len:
            raise RequestError(f"request {message.req_id}: too long")
        self.admitted.append(message)
        self.running[message.req_id] = _Running(message)

    def abort(self, req_ids: list[str]) -> None:
        for req_id in req_ids:
            if self.running.pop(req_id, None):
                self.aborted.append(req_id)
                self.ready.append(EngineOutput(req_id=req_id, new_token_ids=[], finish_reason="abort"))

    def step(self) -> EngineOutputs:
        self.num_steps += 1
        outputs, self.ready = self.ready, EngineOutputs()
        for running in list(self.running.values()):
            outputs.append(self._advance(running))
        return outputs

    def _advance(self, running: _Running) -> EngineOutput:
        request = running.request
        first = request.prompt_token_ids[0]
        if first == CRASH_TOKEN:
            raise ValueError("scripted crash")
        if first == EXIT_TOKEN:
            os._exit(7)
        if first == INTERRUPT_TOKEN:
            os.kill(os.getpid(), 2)
        output = EngineOutput(req_id=request.req_id, new_token_ids=[], num_cached_tokens=3)
        params, ends = request.params, set(request.params.stop_token_ids or ())
        if not params.ignore_eos:
            ends |= set(request.eos_token_ids)
        for _ in range(self.tokens_per_step):
            token = request.prompt_token_ids[running.num_done % len(request.prompt_token_ids)]
            running.num_done += 1
            output.new_token_ids.append(token)
            if token in ends:
                output.finish_reason, output.stop_reason = "stop", token
            elif params.max_tokens is not None and running.num_done >= params.max_tokens:
                output.finish_reason = "length"
            if output.finish_reason is not None:
                del self.running[request.req_id]
                break
        if params.logprobs is not None:
            output.logprobs = [
                TokenLogprob([t, *range(params.logprobs)], [-0.5, *(-1.0 - i for i in range(params.logprobs))], 9)
                for t in output.new_token_ids
            ]
        return output

    def set_knobs(self, *, capture: CaptureTime = "now", **changes: Any) -> Knobs:
        self.knobs = self.knobs.with_changes(**changes)
        return self.knobs

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            step=self.num_steps,
            num_running=len(self.running),
            num_waiting=0,
            steps_in_flight=len(self.ready),
            kv_blocks_total=0,
            kv_blocks_used=0,
            kv_blocks_cached=0,
            num_preemptions=0,
            waits={},
            knobs=self.knobs.as_dict(),
        )

    def shutdown(self) -> None:
        self.is_shut_down = True


def fake_core(config: EngineConfig) -> FakeCore:
    return FakeCore(config)


def fake_core_of_three(config: EngineConfig) -> FakeCore:
    """Three tokens a step, as with speculation."""
    return FakeCore(config, tokens_per_step=3)


def broken_core(config: EngineConfig) -> FakeCore:
    raise RuntimeError("scripted failure while loading")


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE vocabulary of 400 tokens and a few added ones, 3 of them special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("<tüb>", normalized=False)])
    return tokenizer


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """A vocabulary in the SentencePiece manner: word-start marks, single bytes for what has no token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581\u2581"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz.,!", "\u2581the", "\u2581fox", "\u2581a", "ing"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_model_folder(folder: Path) -> Path:
    """Write a model folder of the tiny-llama shape with a tokenizer, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(PRESET_DIR / "tiny-llama.json", folder / "config.json")
    backend = byte_level_tokenizer()
    backend.save(str(folder / "tokenizer.json"))
    end, pad = backend.token_to_id("<|end|>"), backend.token_to_id("<|pad|>")
    files: dict[str, Any] = {
        "tokenizer_config.json": {"eos_token": {"content": "<|end|>"}, "chat_template": CHAT_TEMPLATE},
        "generation_config.json": {"eos_token_id": [pad, end], "temperature": 0.6, "top_k": 20, "do_sample": True},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def ids_of_bytes(backend: tokenizers.Tokenizer, data: bytes) -> Iterator[int]:
    """Spell `data` with the single-byte tokens of a byte-fallback vocabulary."""
    for byte in data:
        token_id = backend.token_to_id(f"<0x{byte:02X}>")
        assert token_id is not None, f"byte {byte} has no token"
        yield token_id
