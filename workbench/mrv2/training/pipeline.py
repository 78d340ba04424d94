"""From a model's name to a folder with a draft head: write dialogues, train, evaluate what was saved."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from mrv2.errors import ConfigError
from mrv2.tokenizer import Tokenizer
from mrv2.training.checkpoint import RECORD, load_head, save_head, write_card, write_json
from mrv2.training.dialogues import CHAT, CODE, TRAIN, Dialogue, Dialogues, hold_out
from mrv2.training.evaluation import Evaluation
from mrv2.training.generation import DialogueWriter, Limits, write_dialogues
from mrv2.training.scripts import ChatScripts, code_plans
from mrv2.training.target import FrozenTarget
from mrv2.training.trainer import CHOICE_DRAFTS, Trainer, TrainOptions

SPLIT_NAMES = {CHAT: "chat", CODE: "code"}
# prompts of functions are longer than questions
CODE_LIMITS = Limits(length=768, max_answer=256)
CODE_SECONDS = 30.0


@dataclass(frozen=True)
class WriteOptions:
    """How the dialogues are written; every field is part of their record."""

    minutes: float
    num_rows: int
    max_answer_tokens: int
    num_chat: int = 512
    use_graph: bool = True
    seed: int = 0


def write_data(
    target: FrozenTarget, tokenizer: Tokenizer, options: WriteOptions, code_prompts: Path | None, code_limit: int | None
) -> Dialogues:
    """Let the target write dialogues for `minutes`, and answers to the code prompts after them."""
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    scripts, limits = ChatScripts.from_tokenizer(tokenizer), Limits()
    begun = time.monotonic()
    deadline = begun + 60.0 * options.minutes
    writer = DialogueWriter(target, scripts, options.num_rows, limits, use_graph=options.use_graph)
    written: list[Dialogue] = []
    with _bar("dialogues", options.max_answer_tokens, unit="tok") as bar:
        plans = scripts.plans(rng)
        for some in write_dialogues(writer, plans, deadline=deadline, max_answer_tokens=options.max_answer_tokens):
            written += some
            bar.update(sum(int(d.is_answer.sum()) for d in some))
    seconds = time.monotonic() - begun
    del writer
    kept = hold_out(written, options.num_chat, rng)
    if code_prompts is not None:
        kept += _write_code(target, tokenizer, scripts, options, code_prompts, code_limit)
    dialogues = Dialogues.pack(kept, target.config.vocab_size, {})
    dialogues.record = {
        "target": target.name,
        "target_sha256": target.sha256(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "options": asdict(options),
        "seconds": round(seconds, 1),
        "num_written": len(written),
        "num_train": len(dialogues.rows_of(TRAIN)),
        "num_train_answer_tokens": len(dialogues.answers_of(TRAIN)),
        **{f"num_{name}": len(dialogues.rows_of(split)) for split, name in SPLIT_NAMES.items()},
        "code_prompts": code_prompts.name if code_prompts else None,
        "special_ids": sorted(tokenizer.special_ids),
    }
    return dialogues


def check_data(dialogues: Dialogues, target: FrozenTarget, path: Path) -> None:
    """Raise `ConfigError` if the dialogues were written by other weights."""
    theirs, ours = dialogues.record.get("target_sha256"), target.sha256()
    if theirs != ours:
        name = dialogues.record.get("target")
        raise ConfigError(f"{path} was written by {name} with sha256 {theirs}, not by {target.name} with {ours}")


def train_head(
    target: FrozenTarget, dialogues: Dialogues, options: TrainOptions, folder: Path, *, state: Path, resume: bool
) -> dict[str, Any]:
    """Train, save to `folder` and evaluate the saved head; return the record that ``training.json`` holds.

    `state` is written at every evaluation and removed at the end; with `resume` the run goes on from it.
    """
    trainer = Trainer(target, dialogues, options)
    if resume:
        trainer.load(state)

    total = round(60.0 * options.minutes, 1)
    with _bar(f"{options.method} head", total, unit="s") as bar:

        def show() -> None:
            bar.update(max(0.0, min(total, trainer.progress.seconds) - bar.n))

        def save() -> None:
            trainer.save(state)
            _save_best(folder, trainer)
            bar.set_postfix_str(f"step {trainer.progress.step}, tau({CHOICE_DRAFTS}) {trainer.progress.best_tau:.2f}")

        trainer.run(on_step=show, on_save=save)
        save()
    record = evaluate_folder(target, dialogues, folder)
    record |= {
        "method": options.method,
        "num_parameters": sum(p.numel() for p in trainer.head.parameters()),
        "dialogues": dialogues.record,
        "training": {
            "options": asdict(options),
            "num_steps": trainer.progress.step,
            "num_epochs": round(trainer.progress.epoch + trainer.progress.batch / _batches_of(trainer), 2),
            "seconds": round(trainer.progress.seconds, 1),
            "curve": trainer.curve,
        },
        "versions": _versions(target.device),
    }
    write_json(folder / RECORD, record)
    write_card(folder, record)
    state.unlink(missing_ok=True)
    return record


def evaluate_folder(target: FrozenTarget, dialogues: Dialogues, folder: Path) -> dict[str, Any]:
    """Return acceptance of a saved head and of lookup on every held-out split, and the vocabulary's coverage."""
    method, head, draft_ids = load_head(folder)
    head, on_device = head.to(target.device), draft_ids.to(target.device)
    results, coverage = {}, {}
    for split, name in SPLIT_NAMES.items():
        rows = dialogues.rows_of(split)
        if len(rows):
            evaluation = Evaluation(dialogues, rows)
            coverage[name] = round(evaluation.coverage(draft_ids.numpy()), 4)
            results[name] = {
                method: evaluation.of_head(head, target, on_device).as_record(),
                "n-gram": evaluation.of_ngram().as_record(),
            }
    return {"results": results, "coverage": coverage}


def _write_code(
    target: FrozenTarget,
    tokenizer: Tokenizer,
    scripts: ChatScripts,
    options: WriteOptions,
    path: Path,
    limit: int | None,
) -> list[Dialogue]:
    """Return greedy answers to the prompts of a file; those not done in time are left out."""
    plans = code_plans(path, tokenizer, max_tokens=CODE_LIMITS.length - CODE_LIMITS.max_answer, limit=limit)
    rows = max(1, min(len(plans), options.num_rows))
    writer = DialogueWriter(target, scripts, rows, CODE_LIMITS, use_graph=options.use_graph)
    deadline = time.monotonic() + CODE_SECONDS
    written: list[Dialogue] = []
    with _bar("code answers", len(plans), unit="answer") as bar:
        for some in write_dialogues(writer, iter(plans), split=CODE, deadline=deadline, max_answer_tokens=sys.maxsize):
            written += some
            bar.update(len(some))
    return written


def _save_best(folder: Path, trainer: Trainer) -> None:
    """Save the best weights so far, and leave the run's own as they are."""
    current = {name: tensor.clone() for name, tensor in trainer.head.state_dict().items()}
    trainer.head.load_state_dict(trainer.best)
    save_head(folder, trainer.options.method, trainer.head, trainer.draft_ids, trainer.target)
    trainer.head.load_state_dict(current)


def _batches_of(trainer: Trainer) -> int:
    return -(-len(trainer.rows) // trainer.options.batch_dialogues)


@contextmanager
def _bar(what: str, total: float, unit: str) -> Iterator[tqdm]:
    """A progress bar on stderr; into a file or a pipe it writes a line now and then."""
    interval = 0.2 if sys.stderr.isatty() else 15.0
    shape = "{desc}: {percentage:3.0f}%|{bar}| {n:,.0f}/{total:,.0f} {unit} [{elapsed}{postfix}]"
    with tqdm(total=total, desc=what, unit=unit, mininterval=interval, bar_format=shape, dynamic_ncols=True) as bar:
        yield bar


def _versions(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"torch": torch.__version__, "device": name}
