"""Training one head on a clock: the learning rate follows the share of the time that is used up.

However fast the machine, the run ends annealed.  The state (weights, optimiser, place in the data, time
used) can be saved at any step, and a run that continues from it takes the same steps.

Legend: B dialogues of a batch, T positions, H hidden size, V draft vocabulary, S unrolled steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mrv2.errors import ConfigError, MRV2Error
from mrv2.training.dialogues import CHAT, TRAIN, Dialogues, draft_vocabulary
from mrv2.training.evaluation import Evaluation, autocast
from mrv2.training.heads import HeadShape, build_head
from mrv2.training.loss import soft_cross_entropy
from mrv2.training.target import FrozenTarget, upload
from mrv2.training.unroll import unroll

# dialogues that are sorted by length together, in batches
POOL_BATCHES = 32
# held-out dialogues that choose the best weights of the run
QUICK_DIALOGUES = 128
# drafts a step for which the best weights are chosen
CHOICE_DRAFTS = 3


@dataclass(frozen=True)
class TrainOptions:
    """What a run can be told; every field is part of its record."""

    method: str
    # the clock of the schedule
    minutes: float
    # an upper bound beside the clock
    max_steps: int | None = None
    batch_dialogues: int = 64
    draft_vocab_size: int = 8192
    unroll: int = 5
    # weight of each further step's loss
    step_decay: float = 0.8
    learning_rate: float = 1e-3
    final_share: float = 0.05
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    # seconds between evaluations, each of which saves the state
    save_every: float = 60.0
    seed: int = 0


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    # of training, evaluations included
    seconds: float = 0.0
    epoch: int = 0
    # batches of this epoch already taken
    batch: int = 0
    best_tau: float = 0.0


class Trainer:
    """A head, its optimiser and its place in the data."""

    def __init__(self, target: FrozenTarget, dialogues: Dialogues, options: TrainOptions) -> None:
        self.target, self.dialogues, self.options = target, dialogues, options
        self.rows, chat = dialogues.rows_of(TRAIN), dialogues.rows_of(CHAT)
        if not len(self.rows) or not len(chat):
            raise ConfigError(
                f"{len(self.rows)} dialogues to train on and {len(chat)} held out: give generation more time"
            )
        if options.unroll < 1 or options.batch_dialogues < 1 or options.minutes <= 0:
            raise ConfigError(
                f"unroll={options.unroll}, batch_dialogues={options.batch_dialogues} and minutes={options.minutes} "
                "must all be positive"
            )
        torch.manual_seed(options.seed)
        self.head = build_head(options.method, HeadShape.of_target(target, options.method)).to(target.device)
        self.head.start_from(target)
        vocab_size = target.config.vocab_size
        always = sorted({*target.config.eos_token_ids, *dialogues.record.get("special_ids", [])})
        size = min(options.draft_vocab_size, vocab_size)
        self.draft_ids = torch.from_numpy(draft_vocabulary(dialogues.answers_of(TRAIN), vocab_size, size, always))
        self._draft_ids = self.draft_ids.to(target.device)
        # [V, H]
        self.output_rows = target.head[self._draft_ids]
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=options.weight_decay,
            fused=target.device.type == "cuda",
        )
        self.quick = Evaluation(dialogues, chat[:QUICK_DIALOGUES])
        self.progress, self.curve = Progress(), list[dict[str, Any]]()
        self.best = self._weights()

    @property
    def share(self) -> float:
        """How much of the run is over, 0 to 1."""
        steps = self.progress.step / self.options.max_steps if self.options.max_steps else 0.0
        return min(1.0, max(steps, self.progress.seconds / (60.0 * self.options.minutes)))

    def learning_rate(self) -> float:
        """Warm up by steps, then fall by a cosine of the time used to `final_share`."""
        o = self.options
        cosine = 0.5 * (1.0 + math.cos(math.pi * self.share))
        warm = min(1.0, (self.progress.step + 1) / o.warmup_steps) if o.warmup_steps else 1.0
        return o.learning_rate * warm * (o.final_share + (1.0 - o.final_share) * cosine)

    def run(self, *, on_step: Callable[[], None], on_save: Callable[[], None]) -> None:
        """Train until the time or the steps are used up; leave the best weights in the head.

        `on_step` is called after every step, `on_save` after every evaluation.  Raises `MRV2Error` if
        the loss is no longer finite.
        """
        begun, before = time.monotonic(), self.progress.seconds
        saved, losses = begun, list[torch.Tensor]()
        while self.share < 1.0:
            losses.append(self.step(self._next_rows()))
            now = time.monotonic()
            self.progress.seconds = before + now - begun
            on_step()
            if now - saved >= self.options.save_every:
                self.note(losses)
                on_save()
                losses, saved = [], time.monotonic()
        self.note(losses)
        self.head.load_state_dict(self.best)

    # rows [B]
    def step(self, rows: np.ndarray) -> torch.Tensor:
        """Learn from some dialogues; return the mean loss and agreement of each unrolled step, ``[2, S]``."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss, parts = self.loss(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.options.clip)
        self.optimizer.step()
        self.progress.step += 1
        return parts

    # rows [B] -> scalar, [2, S]
    def loss(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted loss of a batch, and each step's mean loss and agreement with the target."""
        target, num_steps = self.target, self.options.unroll
        ids_np, answers, _ = self.dialogues.padded(rows)
        ids = upload(ids_np, target.device).long()
        learnt = learnt_rows(answers, num_steps)
        indices = upload(np.concatenate(learnt), target.device).split([len(index) for index in learnt])
        features = target.features(ids, self.head.shape.tap_layers)
        with torch.no_grad():
            teacher = F.linear(features.final.flatten(0, 1), self.output_rows)
        total, parts = torch.zeros((), device=target.device), []
        with autocast(target):
            hiddens = unroll(self.head, target, F.pad(ids, (0, num_steps)), features, num_steps)
            for s, (hidden, index) in enumerate(zip(hiddens, indices, strict=True)):
                chosen = hidden.flatten(0, 1)[index]
                # the target's hidden state at p + 1 + s is what predicts the token at p + 2 + s
                loss, agreed = soft_cross_entropy(chosen, self.output_rows, teacher, index + 1 + s)
                total = total + self.options.step_decay**s * loss
                parts.append(torch.stack([loss.detach(), agreed / max(len(index), 1)]))
        return total, torch.stack(parts, dim=1)

    # losses: [2, S] each
    def note(self, losses: list[torch.Tensor]) -> None:
        """Evaluate, keep the weights if they are the best so far, add a point to the curve."""
        begun = time.monotonic()
        figures = self.quick.of_head(self.head.eval(), self.target, self._draft_ids)
        self.head.train()
        tau = figures.tau[CHOICE_DRAFTS - 1]
        mean = torch.stack(losses).mean(0).tolist() if losses else None
        if mean is not None and not all(map(math.isfinite, mean[0])):
            raise MRV2Error(f"the loss is {mean[0]} after {self.progress.step} steps; lower the learning rate")
        if tau >= self.progress.best_tau:
            self.progress.best_tau, self.best = tau, self._weights()
        self.progress.seconds += time.monotonic() - begun
        self.curve.append(
            {
                "step": self.progress.step,
                "seconds": round(self.progress.seconds, 1),
                "learning_rate": self.learning_rate(),
                "loss": mean and [round(x, 4) for x in mean[0]],
                "agreement": mean and [round(x, 4) for x in mean[1]],
                f"tau({CHOICE_DRAFTS})": round(tau, 4),
            }
        )

    def save(self, path: Path) -> None:
        """Write everything that a run needs to go on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".part")
        state = {
            "options": asdict(self.options),
            "progress": asdict(self.progress),
            "curve": self.curve,
            "head": self.head.state_dict(),
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "draft_ids": self.draft_ids,
        }
        torch.save(state, scratch)
        scratch.replace(path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote; clock and steps of this run's options apply.

        Raises `ConfigError` if the file belongs to another method, size or data.
        """
        try:
            state = torch.load(path, map_location=self.target.device, weights_only=True)
            same = ("method", "draft_vocab_size", "unroll", "batch_dialogues", "seed")
            differing = [name for name in same if state["options"][name] != getattr(self.options, name)]
        except (OSError, KeyError, RuntimeError, EOFError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} does not hold the state of a training run: {error}") from error
        if differing or not torch.equal(state["draft_ids"].cpu(), self.draft_ids):
            what = ", ".join(differing) or "data"
            raise ConfigError(f"{path} belongs to a run with another {what}; give the same, or start without it")
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress, self.curve, self.best = Progress(**state["progress"]), state["curve"], state["best"]

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.head.state_dict().items()}

    def _next_rows(self) -> np.ndarray:
        """Return the next batch of dialogues; each epoch has its own order, which depends on the seed only."""
        if not hasattr(self, "_order") or self._order[0] != self.progress.epoch:
            self._order = (self.progress.epoch, self._batches(self.progress.epoch))
        batches = self._order[1]
        rows = batches[self.progress.batch]
        self.progress.batch += 1
        if self.progress.batch == len(batches):
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        return rows

    def _batches(self, epoch: int) -> list[np.ndarray]:
        """Shuffle, sort by length within pools so that batches pad little, and shuffle the batches."""
        rng, size = np.random.default_rng([self.options.seed, epoch]), self.options.batch_dialogues
        rows = rng.permutation(self.rows)
        lengths = np.diff(self.dialogues.offsets)
        batches = []
        for start in range(0, len(rows), POOL_BATCHES * size):
            pool = rows[start : start + POOL_BATCHES * size]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        return [batches[i] for i in rng.permutation(len(batches))]


# is_answer [B, T] -> for each step the flat rows b * T + p that learn, [n] int64
def learnt_rows(is_answer: np.ndarray, num_steps: int) -> list[np.ndarray]:
    """Return the rows where the newest token p + 1 and the predicted one p + 2 + s are of an answer."""
    length = is_answer.shape[1]
    padded = np.pad(is_answer, ((0, 0), (0, num_steps + 2)))
    known = padded[:, 1 : 1 + length]
    return [np.flatnonzero(known & padded[:, 2 + s : 2 + s + length]) for s in range(num_steps)]
