"""Requests that wait for their grammar to be compiled."""

from __future__ import annotations

from pathlib import Path

from mrv2.engine.grammar.compiler import GrammarCompiler, wait_for_any
from mrv2.engine.grammar.vocabulary import Vocabulary
from mrv2.engine.grammar.xgrammar_backend import XGrammarBackend
from mrv2.engine.request import Request
from mrv2.errors import ConfigError, RequestError
from mrv2.structured_outputs import StructuredOutputsParams

# how long an idle engine waits for a grammar before it looks for aborts and new requests
_WAIT_SECONDS = 0.05


class GrammarQueue:
    """From `SamplingParams.structured_outputs` to `Request.grammar`."""

    def __init__(self, tokenizer_folder: str | Path | None, vocab_size: int, *, load_now: bool = False) -> None:
        """The vocabulary is read, and the library imported, for the first request, or now."""
        self.compiler = GrammarCompiler(lambda: XGrammarBackend(Vocabulary.from_folder(tokenizer_folder, vocab_size)))
        self._waiting: list[Request] = []
        if load_now:
            try:
                _ = self.compiler.backend
            except RequestError as error:
                raise ConfigError(f"grammar_backend='xgrammar': {error}") from error

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Have the grammar of a request compiled; raises `RequestError`, with the place, if it is refused."""
        params, name = request.message.params, f"request {request.req_id}"
        constraint = params.structured_outputs
        assert isinstance(constraint, StructuredOutputsParams), f"structured_outputs={constraint!r} was not normalised"
        end_token_ids = request.message.eos_token_ids or tuple(params.stop_token_ids or ())
        if not end_token_ids:
            raise RequestError(
                f"{name}: structured_outputs needs a token that ends the text, and the model names none: "
                "give stop_token_ids"
            )
        try:
            request.grammar_ticket = self.compiler.submit(constraint, end_token_ids)
        except (ConfigError, RequestError) as error:
            raise RequestError(f"{name}: {error}") from error
        self._waiting.append(request)

    def take_compiled(self) -> list[tuple[Request, str]]:
        """Give every request whose grammar is there its matcher; return those that failed, and why."""
        failed = []
        for request in list(self._waiting):
            ticket = request.grammar_ticket
            assert ticket is not None, f"request {request.req_id} waits for no grammar"
            if not (request.finished or ticket.done):
                continue
            self._waiting.remove(request)
            if request.finished:
                continue
            request.grammar_ticket = None
            try:
                request.grammar = ticket.matcher()
            except Exception as error:  # whatever the library raises concerns this request alone
                failed.append((request, f"the grammar cannot be compiled: {error}"))
        return failed

    def wait(self) -> None:
        """Sleep until a grammar is compiled, for a short while at most."""
        wait_for_any([request.grammar_ticket for request in self._waiting if request.grammar_ticket], _WAIT_SECONDS)

    def close(self) -> None:
        """Stop compiling."""
        self.compiler.close()
