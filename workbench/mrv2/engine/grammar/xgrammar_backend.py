"""The grammar backend on xgrammar (the extra ``structured``)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.engine.grammar.backend import GrammarBackend, GrammarMatcher
from mrv2.engine.grammar.json_schema import enforceable_schema
from mrv2.engine.grammar.regex import num_states, regex_error
from mrv2.engine.grammar.vocabulary import Vocabulary, utf8_masks, without_controls
from mrv2.engine.grammar.xgrammar_fill import FillCost, MaskFiller
from mrv2.errors import ConfigError, RequestError
from mrv2.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import xgrammar

# threads of one compilation, and of one step's masks; the host's step loop needs a core of its own
_MAX_THREADS = 8
# what xgrammar puts before its messages: "[12:00:00] /project/cpp/file.cc:12: "
_LOG_PREFIX = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ")
# bounds of repetitions up to here are unrolled in an automaton, so that its masks are certain
_MAX_UNROLLED = 128
# its compilation takes milliseconds a state
_MAX_STATES = 600
# a property of that name does no harm
_LENGTH = re.compile(r'"(min|max)Length":')


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled grammar, which tokens are legal besides, and what its masks cost."""

    grammar: xgrammar.CompiledGrammar
    # [W] int32 as masks are, None = all
    legal: np.ndarray | None
    cost: FillCost = field(default_factory=FillCost)


class XGrammarMatcher(GrammarMatcher):
    """`xgrammar.GrammarMatcher` behind the engine's verbs; the text stays valid UTF-8."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, compiled: Compiled, backend: XGrammarBackend) -> None:
        self._matcher, self._compiled, self._backend = matcher, compiled, backend
        self._accepted: list[int] = []

    def accept(self, token: int) -> bool:
        if self._matcher.is_terminated() or not self._matcher.accept_token(token):
            return False
        self._accepted.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._accepted[-num_tokens:]

    def fill(self, bits: np.ndarray, row: int) -> None:
        self.fill_many([self], bits, [row])

    @classmethod
    def fill_many(cls, matchers: Sequence[XGrammarMatcher], bits: np.ndarray, rows: Sequence[int]) -> None:
        costs = [matcher._compiled.cost for matcher in matchers]
        matchers[0]._backend.filler.fill([matcher._matcher for matcher in matchers], costs, bits, rows)
        for matcher, row in zip(matchers, rows, strict=True):
            if (legal := matcher._compiled.legal) is not None:
                bits[row] &= legal
            if matcher._accepted and (legal := matcher._backend.legal_behind.get(matcher._accepted[-1])) is not None:
                bits[row] &= legal

    @property
    def terminated(self) -> bool:
        return self._matcher.is_terminated()


class XGrammarBackend(GrammarBackend):
    """JSON schema, regular expressions, EBNF, choices and structural tags."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Import xgrammar and hand it the vocabulary; raises `ConfigError` if it is not installed."""
        try:
            import xgrammar
        except ImportError as error:
            raise ConfigError(
                f"structured_outputs needs xgrammar, which cannot be imported ({error}); "
                "install it with: pip install 'mrv2-workbench[structured]'"
            ) from error
        self._library = xgrammar
        # token -> the tokens that keep the text valid UTF-8 behind it, [W] int32, where not all do
        self.legal_behind = utf8_masks(vocabulary.tokens)
        # with lines between the parts of a JSON text, and without
        self._without_controls = {lines: without_controls(vocabulary.tokens, b"\r\n" * lines) for lines in (0, 1)}
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=list(vocabulary.end_token_ids),
        )
        threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        # the engine keeps compiled grammars itself
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=threads, cache_enabled=False)
        self.filler = MaskFiller(xgrammar, threads)

    def check(self, params: StructuredOutputsParams) -> None:
        grammar = self._library.Grammar
        if params.kind == "json":
            schema = self._schema_text(params)
            self._parse(
                params, lambda: grammar.from_json_schema(schema, any_whitespace=not params.disable_any_whitespace)
            )
        elif params.kind == "regex":
            error = self._pattern_error(params.text)
            if error is not None:
                raise RequestError(f"structured_outputs.regex is refused: {error}")
        elif params.kind in ("grammar", "choice"):
            self._parse(params, lambda: grammar.from_ebnf(self._ebnf(params)))
        elif params.kind == "structural_tag":
            tag = self._tag_text(params)
            self._parse(params, lambda: grammar.from_structural_tag(tag))

    def compile(self, params: StructuredOutputsParams) -> Compiled:
        compiler, legal = self._compiler, None
        if params.kind == "json":
            any_whitespace, schema = not params.disable_any_whitespace, self._schema_text(params)
            compiled = compiler.compile_json_schema(schema, any_whitespace=any_whitespace)
            # strings have none by the rules of JSON, which the library forgets where lengths are bounded
            legal = self._without_controls[any_whitespace] if _LENGTH.search(schema) else None
        elif params.kind == "json_object":
            compiled = compiler.compile_json_schema(
                '{"type": "object", "additionalProperties": true}', strict_mode=False
            )
        elif params.kind == "regex":
            compiled = self._compile_regex(params.text)
        elif params.kind == "structural_tag":
            compiled = compiler.compile_structural_tag(self._tag_text(params))
        else:
            compiled = compiler.compile_grammar(self._ebnf(params))
        return Compiled(compiled, legal)

    def _compile_regex(self, pattern: str) -> xgrammar.CompiledGrammar:
        """Compile to one automaton, whose masks are certain of every token; very large ones to rules, which are not."""
        size, largest = num_states(pattern)
        if size <= _MAX_STATES and largest <= _MAX_UNROLLED:
            try:
                return self._compiler.compile_grammar(f"root ::= Regex({json.dumps(pattern, ensure_ascii=False)})")
            except RuntimeError:
                # patterns that only the way by rules reads, as a lone "]"
                pass
        return self._compiler.compile_regex(pattern)

    def matcher(self, compiled: Compiled, end_token_ids: Sequence[int]) -> XGrammarMatcher:
        matcher = self._library.GrammarMatcher(compiled.grammar, override_stop_tokens=list(end_token_ids))
        return XGrammarMatcher(matcher, compiled, self)

    @staticmethod
    def _ebnf(params: StructuredOutputsParams) -> str:
        if params.kind == "grammar":
            return params.text
        # the quoted strings of JSON are those of EBNF
        return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice or ())

    @staticmethod
    def _parse(params: StructuredOutputsParams, parse: Callable[[], Any]) -> None:
        try:
            parse()
        except RuntimeError as error:
            raise RequestError(f"structured_outputs.{params.kind} is refused: {_reason(error)}") from error

    def _pattern_error(self, pattern: str) -> str | None:
        error = regex_error(pattern)
        if error is None:
            try:
                self._library.Grammar.from_regex(pattern)
            except RuntimeError as failure:
                error = _reason(failure)
        return error

    def _schema_text(self, params: StructuredOutputsParams) -> str:
        return json.dumps(enforceable_schema(json.loads(params.text), pattern_error=self._pattern_error))

    def _tag_text(self, params: StructuredOutputsParams) -> str:
        return json.dumps(self._enforceable_tag(json.loads(params.text), "#"))

    def _enforceable_tag(self, node: Any, place: str) -> Any:
        """Return a structural tag with every JSON schema inside it made enforceable."""
        if isinstance(node, list):
            return [self._enforceable_tag(value, f"{place}/{index}") for index, value in enumerate(node)]
        if not isinstance(node, dict):
            return node
        is_schema = node.get("type") == "json_schema"
        return {
            key: enforceable_schema(value, f"{place}/{key}", self._pattern_error, lengths_as_patterns=True)
            if is_schema and key == "json_schema"
            else self._enforceable_tag(value, f"{place}/{key}")
            for key, value in node.items()
        }


def _reason(error: RuntimeError) -> str:
    """Return the library's message without its log prefix."""
    return _LOG_PREFIX.sub("", str(error).strip().splitlines()[-1])
