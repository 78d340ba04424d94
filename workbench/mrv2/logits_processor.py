"""Logits processors: the public way to change logits with code of your own.

    class Shout(LogitsProcessor):
        argument = "shout"
        ...

    llm = LLM(model, logits_processors=[Shout])                    # or "package.module:Shout"
    llm.generate(prompt, SamplingParams(extra_args={"shout": 2.0}))

A package that is installed may also name its classes as entry points of the group
``mrv2.logits_processors``: they are loaded with every engine.  A request uses a processor if its
`extra_args` hold the processor's `argument`.  They run behind bad words and before the thinking budget,
in the order in which they were given.

Legend: N logits rows of a step, B requests of a step, R rows of request state, V vocabulary, L tokens a row can hold,
T tokens of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

import numpy as np
import torch

from mrv2.errors import ConfigError, RequestError, nearest
from mrv2.runner.protocol import RowSampling
from mrv2.sampling_params import SamplingParams

ENTRY_POINT_GROUP = "mrv2.logits_processors"


@dataclass(slots=True)
class LogitsContext:
    """What a processor may know of the logits rows; device tensors, gathered by `slots`, never expanded per row."""

    # [N] int32, logits row -> row of request state
    slots: torch.Tensor
    # [N] int32, position of the input token that produced the row; what is sampled stands one behind it
    positions: torch.Tensor
    # [N] bool, the row's request uses this processor; other rows are put back afterwards
    used: torch.Tensor
    # [R, L] int32, the tokens of every request
    token_ids: torch.Tensor
    # [R] int32, tokens of the prompt, and tokens that are committed, prompt and outputs
    prompt_len: torch.Tensor
    total_len: torch.Tensor
    # [N] int32, drafts before the row in its request
    local_positions: torch.Tensor
    # [N] int32, index of the row's input token in `input_ids`
    logits_indices: torch.Tensor
    # [>= T] int32
    input_ids: torch.Tensor

    def last_tokens(self) -> torch.Tensor:
        """Return the token before what each row samples. [N] int64"""
        return self.input_ids[self.logits_indices.long()].long()

    def output_counts(self, vocab_size: int) -> torch.Tensor:
        """Return how often each token stands among the outputs before each row, drafts included. [N, V] int32"""
        slots, device = self.slots.long(), self.slots.device
        place = torch.arange(self.token_ids.shape[1], device=device)
        is_output = (place >= self.prompt_len[slots].unsqueeze(1)) & (place < self.total_len[slots].unsqueeze(1))
        tokens = torch.where(is_output, self.token_ids[slots], 0).long()
        counts = torch.zeros(len(slots), vocab_size, dtype=torch.int32, device=device)
        counts.scatter_add_(1, tokens, is_output.int())
        last = self.logits_indices.unsqueeze(1)
        place = torch.arange(self.input_ids.shape[0], device=device)
        is_draft = (place > last - self.local_positions.unsqueeze(1)) & (place <= last)
        drafts = torch.where(is_draft, self.input_ids, 0).long()
        return counts.scatter_add_(1, drafts, is_draft.int())

    def row(self, index: int) -> LogitsContext:
        """Return the context of one logits row."""
        one = slice(index, index + 1)
        return LogitsContext(
            self.slots[one],
            self.positions[one],
            self.used[one],
            self.token_ids,
            self.prompt_len,
            self.total_len,
            self.local_positions[one],
            self.logits_indices[one],
            self.input_ids,
        )


class RowTable:
    """Numbers of a processor, one row a request, on the device; written with the step's one upload."""

    def __init__(self, name: str, width: int, dtype: torch.dtype) -> None:
        self.name = name
        self.width = width
        self.dtype = dtype
        self._arena: Any = None

    @property
    def tensor(self) -> torch.Tensor:
        """The table on the device. [R, width]"""
        assert self._arena is not None, f"table {self.name} is read before the engine is loaded"
        return self._arena[self.name]

    def stage(self, row: int, values: Sequence[int | float]) -> None:
        """Write `values`, at most `width`, to the head of a row before this step's logits; for `add_request`."""
        if len(values) > self.width:
            raise RequestError(f"{self.name}: {len(values)} values for a row of {self.width}")
        kind = np.int32 if self.dtype == torch.int32 else np.float32
        self._arena.stage(self.name, row, np.array(values, dtype=kind).view(np.int32))

    def bind(self, arena: Any) -> None:
        """Take the memory that the runner has made for the table."""
        self._arena = arena


@dataclass(slots=True)
class ProcessorSetup:
    """What a processor is built from."""

    torch_device: torch.device
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    tables: list[RowTable] = field(default_factory=list)

    def table(self, name: str, width: int, dtype: torch.dtype = torch.int32) -> RowTable:
        """Declare a table [R, width] of int32 or float32; only while the processor is being built."""
        if dtype not in (torch.int32, torch.float32):
            raise ConfigError(f"table {name!r} of dtype {dtype}: legal are torch.int32 and torch.float32")
        table = RowTable(f"processor {len(self.tables)} {name}", width, dtype)
        self.tables.append(table)
        return table


class LogitsProcessor(ABC):
    """One change of the logits; a subclass is built once an engine.

    An exception ends the request that it concerns with finish reason "error" and the text; its neighbours
    go on.  To find out which request it is, `apply` is called again for single rows after it has raised.
    """

    # key of `SamplingParams.extra_args` that turns it on for a request
    argument: ClassVar[str]

    def __init__(self, setup: ProcessorSetup) -> None:
        self.setup = setup

    @abstractmethod
    def validate(self, params: SamplingParams) -> None:
        """Refuse ``params.extra_args[self.argument]`` with a `ValueError` that names the legal range."""

    @abstractmethod
    def add_request(self, row: int, params: RowSampling) -> None:
        """A request that uses the processor takes a row of request state; stage what `apply` needs of it.

        Called again, with the outputs so far as part of the history, when a preempted request comes back.
        """

    def apply_staged_writes(self) -> None:
        """Bring other state of the processor up to date, before each `apply`; device code.  Tables need none."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        """Change `logits` [N, V], float32 or float64, in place; device code.

        It may run after `add_request` was called for later steps: read device tensors, nothing that
        `add_request` changes on the host.  It must not wait for the device.  A row's result must depend on
        that row alone.
        """


def processor_classes(given: Sequence[Any]) -> list[type[LogitsProcessor]]:
    """Return the classes of entry points and of `given` (classes, or texts ``module:Class``), each once.

    Raises `ConfigError` for what is no processor, and for two with one argument.
    """
    found: dict[str, type[LogitsProcessor]] = {}
    named = [(f"entry point {point.name}", point.load()) for point in entry_points(group=ENTRY_POINT_GROUP)]
    for source, cls in [*named, *((f"logits_processors entry {entry!r}", _load(entry)) for entry in given)]:
        if not (isinstance(cls, type) and issubclass(cls, LogitsProcessor)):
            raise ConfigError(f"{source} is no subclass of mrv2.logits_processor.LogitsProcessor")
        argument = getattr(cls, "argument", None)
        if not isinstance(argument, str) or not argument:
            raise ConfigError(f"{source}: {cls.__name__}.argument must name a key of extra_args, not {argument!r}")
        if found.setdefault(argument, cls) is not cls:
            raise ConfigError(
                f"{source}: {cls.__name__} and {found[argument].__name__} both have the argument {argument!r}"
            )
    return list(found.values())


def check_arguments(processors: Sequence[LogitsProcessor], req_id: str, params: SamplingParams) -> None:
    """Let every processor that the request uses validate it; raises `RequestError`, also for unknown arguments."""
    by_name = {processor.argument: processor for processor in processors}
    for name in params.extra_args or {}:
        if name not in by_name:
            legal = ", ".join(by_name) or "none: no logits processor is loaded"
            raise RequestError(
                f"request {req_id}: unknown extra_args {name!r}{nearest(name, by_name)}; known are {legal}"
            )
        try:
            by_name[name].validate(params)
        except Exception as error:  # whatever a plug-in raises concerns this request only
            raise RequestError(f"request {req_id}: extra_args[{name!r}]: {error}") from error


def _load(entry: Any) -> Any:
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"logits processor {entry!r} cannot be loaded ({error}); write 'package.module:Class'"
        ) from error
