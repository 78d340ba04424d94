"""One position, many draws: the distribution that the model gives, and the one that the sampler produced."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from mrv2.errors import ConfigError
from mrv2.lab.driver import Driver
from mrv2.lab.requests import LabRequest
from mrv2.sampling_params import SamplingParams

MAX_DRAWS = 2000
# a token is compared by itself if that many draws of it are expected; the rest is one class
MIN_EXPECTED = 5.0


@dataclass(frozen=True)
class SamplingView:
    """Tokens of one position, most likely first; the last class is everything else."""

    prompt: str
    labels: list[str]
    target: list[float]
    counts: list[int]

    @property
    def draws(self) -> int:
        return sum(self.counts)

    @property
    def chi2(self) -> tuple[float, int]:
        """Pearson's statistic and its degrees of freedom."""
        classes = [(n, p) for n, p in zip(self.counts, self.target, strict=True) if p > 0]
        statistic = sum((n - self.draws * p) ** 2 / (self.draws * p) for n, p in classes)
        return statistic, len(classes) - 1

    @property
    def p_value(self) -> float:
        """Probability of a statistic at least as large if the sampler is right (Wilson-Hilferty approximation)."""
        statistic, freedom = self.chi2
        if freedom < 1:
            return 1.0
        spread = 2 / (9 * freedom)
        z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
        return 0.5 * math.erfc(z / math.sqrt(2))

    def as_dict(self) -> dict[str, Any]:
        """Return what the panel shows."""
        statistic, freedom = self.chi2
        return {
            "prompt": self.prompt,
            "labels": self.labels,
            "target": self.target,
            "counts": self.counts,
            "draws": self.draws,
            "chi2": round(statistic, 2),
            "freedom": freedom,
            "p": self.p_value,
        }


def sample_position(driver: Driver, prompt: str, draws: int) -> SamplingView:
    """Draw the token after `prompt` at temperature 1, `draws` times with different seeds; on the driver's thread.

    Raises `ConfigError` for a number of draws outside 1..MAX_DRAWS, or an empty prompt.
    """
    if not 1 <= draws <= MAX_DRAWS:
        raise ConfigError(f"draws={draws} must be in 1..{MAX_DRAWS}")
    if not prompt.strip():
        raise ConfigError("the prompt is empty")
    from mrv2.lab.packs import encode

    info, tokenizer = driver.client.info, driver.tokenizer
    ids = encode({"text": prompt}, tokenizer, info.model_config.vocab_size, info.max_model_len - 2).token_ids
    most = info.config.max_logprobs if info.config.max_logprobs >= 0 else 50
    first = _serve(driver, prompt, ids, [SamplingParams(max_tokens=1, temperature=1.0, seed=0, logprobs=most)])
    row = first[0].top_logprobs
    sent = _serve(
        driver, prompt, ids, [SamplingParams(max_tokens=1, temperature=1.0, seed=1000 + i) for i in range(draws)]
    )
    counted = Counter(request.token_ids[0] for request in sent if request.token_ids)
    likely = sorted(((math.exp(lp), token) for token, lp in row.items()), reverse=True)
    shown = [(p, token) for p, token in likely if p * draws >= MIN_EXPECTED]
    rest = 1 - sum(p for p, _ in shown)
    labels = [repr(tokenizer.token_text(t)) if tokenizer is not None else str(t) for _, t in shown]
    counts = [counted[token] for _, token in shown]
    return SamplingView(
        prompt, [*labels, "all others"], [*(p for p, _ in shown), rest], [*counts, sum(counted.values()) - sum(counts)]
    )


def _serve(driver: Driver, prompt: str, ids: list[int], params: list[SamplingParams]) -> list[LabRequest]:
    sent: list[LabRequest] = []
    deadline = time.monotonic() + 300
    while len(sent) < len(params) or not all(request.finished for request in sent):
        while len(sent) < len(params) and sum(not request.finished for request in sent) < 32:
            sent.append(driver.submit(prompt, ids, params[len(sent)]))
        driver.round(serve_load=False)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(params)} draws took longer than 300 s")
    return sent
