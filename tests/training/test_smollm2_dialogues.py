"""The real target: its logits, its chat template cut into scripts, and an answer that the rows write."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from models.paged_harness import PagedHarness
from mrv2.errors import ConfigError
from mrv2.tokenizer import Tokenizer
from mrv2.training.generation import DialogueWriter, Limits, write_dialogues
from mrv2.training.heads import METHODS, HeadShape, build_head
from mrv2.training.scripts import SYSTEM_LINES, ChatScripts, Plan, code_plans
from mrv2.training.target import FrozenTarget
from mrv2_models.registry import load_model
from mrv2_models.smollm2 import GGUF_SHA256, MODEL_NAME, ensure_smollm2
from training.cases import CPU

QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(ensure_smollm2())


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(MODEL_NAME, dtype="float32", device=CPU)


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + messages


def test_scripts_put_together_are_the_template(tokenizer: Tokenizer) -> None:
    scripts = ChatScripts.from_tokenizer(tokenizer)
    end = (scripts.end_ids[0],)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    for prefix, system in zip(scripts.prefixes, (None, *SYSTEM_LINES), strict=True):
        rendered = tokenizer.apply_chat_template(chat(QUESTION, ANSWER, "Why?", system=system))
        whole = (*prefix, *ids(QUESTION), *end, *scripts.to_answer, *ids(ANSWER), *end, *scripts.to_question)
        assert (*whole, *ids("Why?"), *end, *scripts.to_answer) == ids(rendered)


def test_a_template_without_end_tokens_is_refused(tokenizer: Tokenizer) -> None:
    plain = Tokenizer(
        tokenizer.backend,
        config=tokenizer.config,
        eos_token_ids=tokenizer.eos_token_ids,
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    )
    with pytest.raises(ConfigError, match="does not begin with an end token"):
        ChatScripts.from_tokenizer(plain)


@torch.no_grad()
def test_logits_are_the_serving_models(target: FrozenTarget, tokenizer: Tokenizer) -> None:
    serving = load_model(MODEL_NAME, dtype="float32", max_model_len=256)
    ids = tokenizer.encode(tokenizer.apply_chat_template(chat(QUESTION)))
    theirs = PagedHarness(serving).step({"a": ids})["a"]
    ours = F.linear(target.features(torch.tensor([ids])).final[0], target.head)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert target.sha256() == GGUF_SHA256 and target.name == MODEL_NAME


def test_an_answer_is_the_greedy_one(target: FrozenTarget, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(tokenizer.apply_chat_template(chat(QUESTION)))
    limits = Limits(length=64, window=4)
    writer = DialogueWriter(target, ChatScripts.from_tokenizer(tokenizer), 1, limits, use_graph=False)
    plans = iter([Plan(tuple(prompt), 0.0, answer_first=True)])
    (dialogue,), *_ = write_dialogues(writer, plans, deadline=time.monotonic() + 240, max_answer_tokens=10**6)
    assert tokenizer.decode(dialogue.token_ids[dialogue.is_answer].tolist()) == ANSWER
    assert dialogue.token_ids[-1] == tokenizer.eos_token_ids[0]


def test_code_prompts_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": text}) for text in ("def f(x):\n", "y = 1\n" * 400, "def g():\n")]
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    plans = code_plans(tmp_path / "p.jsonl.gz", tokenizer, max_tokens=200)
    texts = [tokenizer.decode(plan.prompt, skip_special_tokens=False) for plan in plans]
    assert len(texts) == 2 and "def f(x):" in texts[0] and texts[1].endswith("<|im_start|>assistant\n")
    (tmp_path / "bad.jsonl").write_text('{"question": "x"}')
    with pytest.raises(ConfigError, match="JSON lines of objects with a 'prompt'"):
        code_plans(tmp_path / "bad.jsonl", tokenizer, max_tokens=200)


@pytest.mark.parametrize("method, millions", [("eagle3", 5.09), ("mtp", 4.21)])
def test_heads_stay_small(target: FrozenTarget, method: str, millions: float) -> None:
    shape = HeadShape.of_target(target, method)
    head = build_head(method, shape)
    assert method in METHODS and shape.tap_layers == ((2, 15, 27) if method == "eagle3" else ())
    num_bytes = 2 * sum(p.numel() for p in head.parameters()) + 8 * 8192
    assert num_bytes < 12e6
    assert sum(p.numel() for p in head.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)
