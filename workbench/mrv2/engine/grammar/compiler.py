"""Grammars are checked at admission, compiled in a thread, and kept by content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from mrv2.engine.grammar.backend import GrammarBackend, GrammarMatcher
from mrv2.structured_outputs import StructuredOutputsParams

# compiled grammars kept, those in use not counted twice; one takes from kilobytes to tens of megabytes
MAX_KEPT = 128


@dataclass(slots=True)
class GrammarTicket:
    """A request's claim to a grammar that may still be compiling."""

    backend: GrammarBackend
    compiled: Future[Any]
    end_token_ids: tuple[int, ...]

    @property
    def done(self) -> bool:
        """True once `matcher` returns, or raises, at once."""
        return self.compiled.done()

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the start; raises what the compilation raised."""
        return self.backend.matcher(self.compiled.result(), self.end_token_ids)


class GrammarCompiler:
    """One compiling thread; the library parallelises each compilation itself."""

    def __init__(self, make_backend: Callable[[], GrammarBackend]) -> None:
        """`make_backend` is called when the first grammar comes."""
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._thread: ThreadPoolExecutor | None = None
        # least recently asked for first
        self._kept: OrderedDict[StructuredOutputsParams, Future[Any]] = OrderedDict()
        self.num_compiled = 0

    @property
    def backend(self) -> GrammarBackend:
        """The grammar library; raises `ConfigError` or `RequestError` if there is none for this engine."""
        if self._backend is None:
            self._backend = self._make_backend()
        return self._backend

    def submit(self, params: StructuredOutputsParams, end_token_ids: tuple[int, ...]) -> GrammarTicket:
        """Check `params`, raising `RequestError` with the place, and see to it that they get compiled."""
        found = self._kept.get(params)
        if found is None:
            self.backend.check(params)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
            found = self._kept[params] = self._thread.submit(self.backend.compile, params)
            self.num_compiled += 1
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(params)
        return GrammarTicket(self.backend, found, end_token_ids)

    def close(self) -> None:
        """Finish the compilation at work; those queued are dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None


def wait_for_any(tickets: list[GrammarTicket], timeout: float) -> None:
    """Return when one of the grammars is compiled, after `timeout` seconds at the latest."""
    wait([ticket.compiled for ticket in tickets], timeout, return_when="FIRST_COMPLETED")
