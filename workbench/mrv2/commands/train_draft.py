"""``mrv2 train-draft``: train a draft head for a model on dialogues that the model writes itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mrv2.commands.loading import note_loading
from mrv2.commands.printing import note, number, text_table
from mrv2.errors import ConfigError

_DEFAULT_MODEL = "smollm2-135m-instruct"
# rows that write at once, where not given
_ROWS = {"cuda": 2048, "cpu": 32}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "train-draft",
        help="train a draft head for speculative decoding",
        description="Train a one-layer draft head (EAGLE-3 or MTP) for a Llama model. The model writes the "
        "dialogues itself; they are kept in a file that the next run can use again.",
    )
    parser.add_argument("--method", required=True, choices=("eagle3", "mtp"), help="shape of the head")
    parser.add_argument("--model", default=_DEFAULT_MODEL, help=f"the target (default: {_DEFAULT_MODEL})")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets a folder MODEL-METHOD")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto = CUDA where there is one"
    )
    parser.add_argument(
        "--dtype", default="auto", help="of the target: auto (bfloat16 on CUDA, else float32), float32, bfloat16"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seeds dialogues, head and order of the data")
    data = parser.add_argument_group("dialogues")
    data.add_argument(
        "--data", type=Path, metavar="FILE", help="used if it exists, else written (default: OUT/dialogues.npz)"
    )
    data.add_argument("--generate-minutes", type=float, default=2.0, metavar="M", help="time to write (default: 2)")
    data.add_argument(
        "--answer-tokens", type=int, default=12_000_000, metavar="N", help="enough of them (default: 12000000)"
    )
    data.add_argument("--rows", type=int, metavar="N", help="dialogues written at once (default: 2048; on the CPU 32)")
    data.add_argument("--held-out", type=int, default=512, metavar="N", help="dialogues to evaluate on (default: 512)")
    data.add_argument(
        "--code-prompts", type=Path, metavar="FILE", help="JSON lines with a 'prompt' (.gz too), e.g. HumanEval"
    )
    data.add_argument("--code-limit", type=int, metavar="N", help="use the first N code prompts")
    data.add_argument("--no-graph", action="store_true", help="write dialogues without CUDA graphs")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--minutes", type=float, default=4.0, metavar="M", help="time to train; sets the schedule (default: 4)"
    )
    training.add_argument("--max-steps", type=int, metavar="N", help="end after N steps if the time is not up before")
    training.add_argument("--batch", type=int, default=64, metavar="N", help="dialogues a step (default: 64)")
    training.add_argument(
        "--unroll", type=int, default=5, metavar="S", help="draft steps to train through (default: 5)"
    )
    training.add_argument(
        "--draft-vocab", type=int, default=8192, metavar="N", help="tokens that can be drafted (default: 8192)"
    )
    training.add_argument(
        "--learning-rate", type=float, default=1e-3, metavar="X", help="the highest one (default: 0.001)"
    )
    training.add_argument("--warmup", type=int, default=100, metavar="N", help="steps up to it (default: 100)")
    training.add_argument(
        "--save-every", type=float, default=60.0, metavar="S", help="seconds between saves (default: 60)"
    )
    training.add_argument(
        "--state", type=Path, metavar="FILE", help="where a run can go on (default: OUT/MODEL-METHOD.state)"
    )
    training.add_argument("--resume", action="store_true", help="go on from the state file")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write or read the dialogues, train, evaluate, report."""
    import torch

    from mrv2.training.dialogues import Dialogues
    from mrv2.training.pipeline import WriteOptions, check_data, train_head, write_data
    from mrv2.training.target import FrozenTarget
    from mrv2.training.trainer import TrainOptions

    for name in ("rows", "answer_tokens", "batch", "unroll", "draft_vocab", "max_steps", "minutes", "generate_minutes"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be positive")
    kind = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device; legal here are auto and cpu")
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if kind == "cuda" else "float32"
    data = args.data or args.out / "dialogues.npz"
    note_loading(args.model)
    target = FrozenTarget(args.model, dtype=dtype, device=torch.device(kind))
    folder = args.out / f"{target.name}-{args.method}"
    state = args.state or args.out / f"{folder.name}.state"
    if args.resume and not state.is_file():
        raise ConfigError(f"--resume: there is no state file {state}")
    if data.is_file():
        dialogues = Dialogues.load(data)
        check_data(dialogues, target, data)
        note(f"using the dialogues of {data}")
    else:
        from mrv2.tokenizer import Tokenizer

        if target.folder is None:
            raise ConfigError(f"{args.model} has no tokenizer to write dialogues with; give --data FILE")
        options = WriteOptions(
            minutes=args.generate_minutes,
            num_rows=args.rows or _ROWS[kind],
            max_answer_tokens=args.answer_tokens,
            num_chat=args.held_out,
            use_graph=not args.no_graph,
            seed=args.seed,
        )
        tokenizer = Tokenizer.from_folder(target.folder)
        dialogues = write_data(target, tokenizer, options, args.code_prompts, args.code_limit)
        dialogues.save(data)
        record = dialogues.record
        note(
            f"{record['num_train']:,} dialogues to train on with {record['num_train_answer_tokens']:,} answer tokens, "
            f"{record['num_chat']} and {record['num_code']} to evaluate on, in {record['seconds']:.0f} s"
        )
    record = train_head(
        target,
        dialogues,
        TrainOptions(
            method=args.method,
            minutes=args.minutes,
            max_steps=args.max_steps,
            batch_dialogues=args.batch,
            draft_vocab_size=args.draft_vocab,
            unroll=args.unroll,
            learning_rate=args.learning_rate,
            warmup_steps=args.warmup,
            save_every=args.save_every,
            seed=args.seed,
        ),
        folder,
        state=state,
        resume=args.resume,
    )
    _report(record, folder)
    return 0


def _report(record: dict[str, Any], folder: Path) -> None:
    rows = [
        (
            split,
            drafter,
            *(number(a) for a in values["alpha"][:5]),
            *(number(values["tau"][k - 1]) for k in (1, 3, 5, 7)),
        )
        for split, figures in record["results"].items()
        for drafter, values in figures.items()
    ]
    header = ("answers", "drafter", *(f"alpha {s}" for s in range(1, 6)), *(f"tau({k})" for k in (1, 3, 5, 7)))
    print(text_table(header, rows, left=2))
    training = record["training"]
    steps = f"{training['num_steps']:,} steps ({training['num_epochs']} epochs) in {training['seconds']:.0f} s"
    note(f"{steps}; saved in {folder}")
