"""``mrv2 generate``: complete prompts from the command line, a file or standard input."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.commands.arguments import (
    add_engine_flags,
    add_knob_flags,
    add_model_flag,
    add_sampling_flags,
    given_options,
    sampling_options,
)
from mrv2.commands.loading import note_loading
from mrv2.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from mrv2.llm import LLM
    from mrv2.outputs import RequestOutput

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MAX_TOKENS = 64


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "generate",
        help="complete prompts",
        description="Complete every prompt and print the texts in the order of the prompts. "
        "Prompts come from the command line, from --file, or else from standard input (all of it one prompt).",
        epilog="example: mrv2 generate 'The three primary colours are' --max-tokens 20 --temperature 0",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; several make one batch")
    add_model_flag(parser, DEFAULT_MODEL)
    parser.add_argument("--file", metavar="FILE", help="one prompt a line; - = standard input")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message for the chat template")
    parser.add_argument(
        "--token-ids", action="store_true", help="prompts and answers are token ids (models without a tokenizer)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    add_sampling_flags(parser, max_tokens=DEFAULT_MAX_TOKENS)
    add_engine_flags(parser)
    add_knob_flags(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Load the model, complete the prompts, print the answers; 1 if a request ended in an error."""
    if args.chat and args.token_ids:
        raise ConfigError("--chat writes text around each prompt; it cannot be combined with --token-ids")
    texts = read_prompts(args)
    prompts = [parse_token_ids(text) for text in texts] if args.token_ids else texts
    options = given_options(args)

    from mrv2.llm import LLM

    note_loading(args.model)
    with LLM(args.model, **options) as llm:
        params = sampling_params(llm, args)
        show_progress = sys.stderr.isatty() and len(prompts) > 1
        if args.chat:
            conversations = [[{"role": "user", "content": text}] for text in texts]
            outputs = llm.chat(conversations, params, show_progress)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=show_progress)
    for text, output in zip(texts, outputs, strict=True):
        _print_output(text, output, args)
    return int(any(each.finish_reason == "error" for output in outputs for each in output.outputs))


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts; raises `ConfigError` when there are none or two sources name some."""
    if args.prompts and args.file:
        raise ConfigError("give prompts as arguments or with --file, not both")
    if args.file:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
        prompts = [line for line in text.splitlines() if line.strip()]
    elif args.prompts:
        prompts = args.prompts
    else:
        if sys.stdin.isatty():
            raise ConfigError("no prompt: give one as an argument, with --file, or on standard input")
        text = sys.stdin.read().rstrip("\n")
        prompts = [text] if text.strip() else []
    if not prompts:
        raise ConfigError("no prompt: the source is empty")
    return prompts


def parse_token_ids(text: str) -> list[int]:
    """Read token ids separated by commas or spaces."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(f"{text!r} must be token ids separated by commas or spaces, as in '1,5,42'") from error


def sampling_params(llm: LLM, args: argparse.Namespace) -> Any:
    """Return the model's default parameters changed by the flags; a bad flag is a `ConfigError`."""
    try:
        return llm.get_default_sampling_params().replace(**sampling_options(args))
    except RequestError as error:
        raise ConfigError(str(error)) from error


def _print_output(text: str, output: RequestOutput, args: argparse.Namespace) -> None:
    answer = output.outputs[0]
    if args.json:
        fields = {
            "prompt": text,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        print(json.dumps(fields, ensure_ascii=False))
        return
    if len(args.prompts) > 1 or args.file:
        print(f"--- {text}")
    print(answer.text if answer.text or not answer.token_ids else " ".join(map(str, answer.token_ids)))
