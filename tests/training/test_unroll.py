"""The law of training-time test: all chains at once are what drafting does one token at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mrv2.training.heads import METHODS, DraftHead
from mrv2.training.target import FrozenTarget, TargetFeatures
from mrv2.training.unroll import unroll
from training.cases import random_head, tiny_target

LENGTH, STEPS = 13, 4


class Cache:
    """A drafter's cache: slot p holds the key and value of position p; a query sees all slots up to its own."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.position = 0

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One query at `position`, which fills its slot first."""
        self.slots[self.position] = (k, v)
        seen = [self.slots[p] for p in range(self.position + 1)]
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*seen, strict=True))
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        weights = torch.softmax(q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        return weights @ values


def one_step(head: DraftHead, target: FrozenTarget, token: int, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
    cos, sin = target.cos_sin[cache.position][None].chunk(2, dim=-1)
    embedding = F.embedding(torch.tensor([[token]]), target.embedding)
    return head.step(embedding, hidden, cos, sin, cache)


@torch.no_grad()
def drafted(head: DraftHead, target: FrozenTarget, ids: list[int], features: TargetFeatures, base: int) -> torch.Tensor:
    """Draft `STEPS` tokens after `base` step by step: true features up to it, then the head's own outputs."""
    cache, hidden, outputs = Cache(), head.fuse(features), []
    out = hidden[:, :1]
    for p in range(base + 1):
        cache.position = p
        out = one_step(head, target, ids[p + 1], hidden[:, p : p + 1], cache)
    outputs.append(out)
    for s in range(1, STEPS):
        cache.position = base + s
        out = one_step(head, target, ids[base + 1 + s], out, cache)
        outputs.append(out)
    return head.norm(torch.cat(outputs, dim=1))[0]


@pytest.mark.parametrize("method", METHODS)
def test_unrolled_attention_is_drafting_with_a_cache(method: str) -> None:
    target = tiny_target()
    head = random_head(target, method)
    ids = torch.randint(3, 512, (2, LENGTH + STEPS), generator=torch.Generator().manual_seed(1))
    features = target.features(ids[:, :LENGTH], head.shape.tap_layers)
    with torch.no_grad():
        outputs = torch.stack(list(unroll(head, target, ids, features, STEPS)), dim=2)
    # [B, T, S, H]
    for row in range(2):
        own = TargetFeatures(features.taps[row : row + 1], features.final[row : row + 1])
        for base in range(LENGTH):
            expected = drafted(head, target, ids[row].tolist(), own, base)
            torch.testing.assert_close(outputs[row, base], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_of_the_future_reaches_a_draft(method: str) -> None:
    """Row p of step s reads tokens up to p + 1 + s and features up to p, and does read them."""
    target = tiny_target()
    head = random_head(target, method)
    ids = torch.randint(3, 512, (1, LENGTH + STEPS), generator=torch.Generator().manual_seed(2))
    features = target.features(ids[:, :LENGTH], head.shape.tap_layers)
    base, step = 5, 2

    def output(ids: torch.Tensor, changed_features: int | None = None) -> torch.Tensor:
        taps, final = features.taps.clone(), features.final.clone()
        if changed_features is not None:
            taps[:, changed_features:] += 1.0 + taps[:, changed_features:].roll(1, -1)
            final[:, changed_features:] += 1.0 + final[:, changed_features:].roll(1, -1)
        with torch.no_grad():
            return list(unroll(head, target, ids, TargetFeatures(taps, final), STEPS))[step][0, base]

    def with_token(index: int) -> torch.Tensor:
        changed = ids.clone()
        changed[0, index] = 3 + (changed[0, index] + 100) % 500
        return changed

    plain = output(ids)
    torch.testing.assert_close(output(with_token(base + 2 + step)), plain, rtol=0, atol=0)
    torch.testing.assert_close(output(ids, base + 1), plain, rtol=0, atol=0)
    for changed in (output(with_token(base + 1 + step)), output(with_token(2)), output(ids, base)):
        assert (changed - plain).abs().max() > 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_learns(method: str) -> None:
    target = tiny_target()
    head = random_head(target, method)
    ids = torch.randint(3, 512, (2, LENGTH + STEPS), generator=torch.Generator().manual_seed(3))
    features = target.features(ids[:, :LENGTH], head.shape.tap_layers)
    sum(out.square().sum() * (1 + s) for s, out in enumerate(unroll(head, target, ids, features, STEPS))).backward()  # pyright: ignore
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
