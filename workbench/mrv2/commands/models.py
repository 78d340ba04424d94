"""``mrv2 models``: the models that can be named."""

from __future__ import annotations

import argparse
from typing import Any

from mrv2.commands.printing import text_table

_KINDS = {
    "fetch": "real weights and tokenizer, fetched on first use",
    "preset": "shape only: random weights, prompts as token ids",
}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "models",
        help="list the models that can be named",
        description="List the models that can be named. A Hugging Face folder of a supported family works too.",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    from mrv2_models.registry import FAMILIES, available_models

    rows = [
        (info.name, info.model_type, f"{info.num_parameters / 1e6:,.1f} M", _KINDS[info.kind])
        for info in available_models()
    ]
    print(text_table(("model", "family", "weights", "what it is"), rows, left=4))
    print(f"\nor the path of a model folder (config.json, *.safetensors, tokenizer.json) of {', '.join(FAMILIES)}")
    return 0
