"""``mrv2 chat``: a conversation in the terminal; knobs can be switched between two answers."""

from __future__ import annotations

import argparse
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mrv2.commands.arguments import (
    add_engine_flags,
    add_knob_flags,
    add_model_flag,
    add_sampling_flags,
    given_options,
    knob_lines,
    parse_knob,
)
from mrv2.commands.generate import DEFAULT_MODEL, sampling_params
from mrv2.commands.loading import note_loading
from mrv2.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from mrv2.llm import LLM

DEFAULT_MAX_TOKENS = 256
HELP = """\
/reset              forget the conversation
/set knob=value     switch a knob of the running engine, as in /set runner=v1
/knobs              list the knobs, their values and what they do
/quit               leave (also: end of input)
Ctrl-C stops an answer."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model; its answers appear as they are generated.",
        epilog="while chatting:\n" + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flag(parser, DEFAULT_MODEL)
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_sampling_flags(parser, max_tokens=DEFAULT_MAX_TOKENS)
    add_engine_flags(parser)
    add_knob_flags(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Load the model and talk until the input ends."""
    options = given_options(args)

    from mrv2.llm import LLM

    note_loading(args.model)
    with LLM(args.model, **options) as llm:
        llm.get_tokenizer()
        session = ChatSession(llm, sampling_params(llm, args), system=args.system)
        print(f"{args.model}, {_mode(llm)}; /help lists the commands")
        _read_loop(session)
    return 0


def _read_loop(session: ChatSession) -> None:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if line and not session.handle(line):
            return


class ChatSession:
    """A conversation and the commands that act on it."""

    def __init__(self, llm: LLM, params: Any, *, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._system)

    def handle(self, line: str) -> bool:
        """Act on one line of input; return False when it asks to leave."""
        if not line.startswith("/"):
            self._answer(line)
            return True
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return False
        if command == "/reset":
            self.messages = list(self._system)
            print("the conversation is empty")
        elif command == "/set":
            self._set(rest)
        elif command == "/knobs":
            print("\n".join(knob_lines(self._llm.set())))
        elif command == "/help":
            print(HELP)
        else:
            print(f"unknown command {command}\n{HELP}")
        return True

    def _set(self, text: str) -> None:
        try:
            name, value = parse_knob(text)
            self._llm.set(**{name: value})
        except ConfigError as error:
            print(error)
        else:
            print(f"now {_mode(self._llm)}")

    def _answer(self, question: str) -> None:
        """Stream one answer; the conversation keeps it, or forgets the question if there is none."""
        self.messages.append({"role": "user", "content": question})
        tokenizer = self._llm.get_tokenizer()
        start, text, num_tokens = perf_counter(), "", 0
        try:
            prompt = tokenizer.apply_chat_template(self.messages)
            # the template has written the special tokens
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            with self._llm.stream({"prompt_token_ids": ids}, self._params) as stream:
                for output in stream:
                    for piece in output.outputs:
                        print(piece.text, end="", flush=True)
                        text += piece.text
                        num_tokens += len(piece.token_ids)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except RequestError as error:
            self.messages.pop()
            print(f"{error}; /reset forgets the conversation")
            return
        seconds = max(perf_counter() - start, 1e-9)
        print(f"\n[{num_tokens} tokens, {num_tokens / seconds:.1f} tok/s, {_mode(self._llm)}]")
        self.messages.append({"role": "assistant", "content": text})


def _mode(llm: LLM) -> str:
    knobs = llm.set()
    return f"runner {knobs.runner}, {'async' if knobs.async_scheduling else 'sync'}"
