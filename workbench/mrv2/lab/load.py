"""The load: who sends which prompts when, as plain logic with the clock handed in."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from mrv2.errors import ConfigError, nearest
from mrv2.lab.packs import Pack, load_pack
from mrv2.sampling_params import SamplingParams

LoadMode = Literal["closed", "poisson", "replay", "off"]
MAX_USERS = 1024
# a Poisson load stops adding requests while so many are unfinished, and says so
MAX_OPEN = 256
MODE_HELP = {
    "closed": "N users, each sends its next prompt when the last one is answered",
    "poisson": "requests arrive at random, on average `rate` a second",
    "replay": "every prompt of the pack once, N at a time, then quiet",
    "off": "no requests but those sent by hand",
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the load generator does; a bad value raises `ConfigError`."""

    mode: LoadMode = "closed"
    pack: str = "chat"
    users: int = 4
    # requests a second (mode "poisson")
    rate: float = 1.0
    max_tokens: int = 64
    temperature: float = 0.8
    top_p: float = 0.95
    # request i gets seed + i, so a load is the same requests each time; None = unseeded
    seed: int | None = 0
    # None = no log-probabilities
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.mode not in get_args(LoadMode):
            legal = get_args(LoadMode)
            raise ConfigError(f"load mode={self.mode!r}{nearest(str(self.mode), legal)}; legal: {', '.join(legal)}")
        load_pack(self.pack)
        if not 1 <= self.users <= MAX_USERS:
            raise ConfigError(f"load users={self.users} must be in 1..{MAX_USERS}")
        if not 0 < self.rate <= 10_000:
            raise ConfigError(f"load rate={self.rate} must be in (0, 10000] requests a second")
        # SamplingParams checks the rest
        self.params(0)

    def with_changes(self, **changes: Any) -> Load:
        """Return a copy with `changes`; an unknown name raises `ConfigError`."""
        names = list(asdict(self))
        for name in changes:
            if name not in names:
                raise ConfigError(f"unknown load setting {name!r}{nearest(name, names)}; there are {', '.join(names)}")
        return replace(self, **changes)

    def params(self, index: int, json_schema: dict[str, Any] | None = None) -> SamplingParams:
        """Return how request `index` is sampled."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=None if self.seed is None else self.seed + index,
            logprobs=self.logprobs,
            ignore_eos=self.ignore_eos,
            structured_outputs=None if json_schema is None else {"json": json_schema},
        )


@dataclass(frozen=True)
class Due:
    """A request that is to be sent now."""

    index: int
    item: dict[str, Any]
    user: int


class LoadGenerator:
    """Says which requests are due; deterministic for a load and a clock."""

    def __init__(self, load: Load, *, first_index: int = 0) -> None:
        self.load = load
        self.pack: Pack = load_pack(load.pack)
        self.next_index = first_index
        self._first_index = first_index
        self._random = random.Random(load.seed)
        self._next_arrival: float | None = None

    @property
    def exhausted(self) -> bool:
        """True if no further request will ever be due."""
        replayed = self.load.mode == "replay" and self.next_index - self._first_index >= len(self.pack.items)
        return self.load.mode == "off" or replayed

    def due(self, now: float, num_open: int) -> list[Due]:
        """Return what is to be sent at `now` (seconds) while `num_open` requests of this load are unfinished."""
        mode, load = self.load.mode, self.load
        if mode == "poisson":
            return self._arrivals(now, num_open)
        count = 0 if mode == "off" else max(0, load.users - num_open)
        if mode == "replay":
            count = min(count, len(self.pack.items) - (self.next_index - self._first_index))
        return [self._take() for _ in range(count)]

    def _arrivals(self, now: float, num_open: int) -> list[Due]:
        if self._next_arrival is None:
            self._next_arrival = now + self._random.expovariate(self.load.rate)
        found: list[Due] = []
        while self._next_arrival <= now:
            self._next_arrival += self._random.expovariate(self.load.rate)
            if num_open + len(found) < MAX_OPEN:
                found.append(self._take())
        return found

    def _take(self) -> Due:
        index, self.next_index = self.next_index, self.next_index + 1
        return Due(index, self.pack.items[index % len(self.pack.items)], index % self.load.users)
