"""The chat's conversation and commands, with a stand-in for the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mrv2.commands.chat import ChatSession
from mrv2.config import Knobs
from mrv2.errors import RequestError


class FakeTokenizer:
    """One token a character."""

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens, "the template has written them"
        return list(text.encode())


class FakeStream:
    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces
        self.closed = False

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.closed = True

    def __iter__(self) -> Iterator[Any]:
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield SimpleNamespace(outputs=[SimpleNamespace(text=piece, token_ids=[1])])


class FakeLLM:
    """Answers with the given pieces, one answer after the other."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []
        self.streams: list[FakeStream] = []
        self.knobs = Knobs()

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def set(self, **changes: Any) -> Knobs:
        self.knobs = self.knobs.with_changes(**changes)
        return self.knobs

    def stream(self, prompt: dict[str, list[int]], params: object) -> FakeStream:
        self.prompts.append(bytes(prompt["prompt_token_ids"]).decode())
        self.streams.append(FakeStream(self.answers.pop(0)))
        return self.streams[-1]


def session(llm: FakeLLM, **options: Any) -> ChatSession:
    return ChatSession(llm, None, **options)  # type: ignore[arg-type]  # what the session calls is there


def test_the_conversation_grows_and_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(["Hel", "lo"], ["Fine"], ["Again"])
    chat = session(llm, system="Be kind.")
    assert chat.handle("Hi") and chat.handle("How are you?")
    assert llm.prompts[1] == "<system>Be kind.<user>Hi<assistant>Hello<user>How are you?"
    out = capsys.readouterr().out
    assert "Hello\n[2 tokens, " in out and "runner v2, async]" in out
    assert chat.handle("/reset")
    assert chat.messages == [{"role": "system", "content": "Be kind."}]
    assert chat.handle("Hi")
    assert llm.prompts[2] == "<system>Be kind.<user>Hi"


def test_knobs_are_switched_between_answers(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    chat = session(llm)
    assert chat.handle("/set runner=v1") and chat.handle("/set async_scheduling=off")
    assert (llm.knobs.runner, llm.knobs.async_scheduling) == ("v1", False)
    assert "now runner v1, sync" in capsys.readouterr().out
    for bad in ("/set", "/set speed=9", "/set runner=v7"):
        assert chat.handle(bad)
    assert llm.knobs.runner == "v1"
    out = capsys.readouterr().out
    assert "unknown knob 'speed'" in out and "legal values are v2, v1" in out
    assert chat.handle("/knobs")
    assert "runner=v1  (v2, v1)" in capsys.readouterr().out


def test_leaving_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    chat = session(FakeLLM())
    assert chat.handle("/help") and chat.handle("/nonsense")
    out = capsys.readouterr().out
    assert out.count("/set knob=value") == 2 and "unknown command /nonsense" in out
    assert not chat.handle("/quit")


def test_a_refused_question_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    chat = session(FakeLLM([RequestError("the prompt has 900 tokens")]))
    assert chat.handle("a very long question")
    assert chat.messages == []
    assert "the prompt has 900 tokens" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(["Once", " upon", KeyboardInterrupt()])
    chat = session(llm)
    assert chat.handle("Tell me a story")
    assert llm.streams[0].closed, "the request would run on"
    assert chat.messages[-1] == {"role": "assistant", "content": "Once upon"}
    assert "[stopped]" in capsys.readouterr().out
