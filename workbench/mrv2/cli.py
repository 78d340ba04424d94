"""``mrv2``: the command line.

Exit codes: 0 success; 1 failure, also when runs that should agree generate different tokens; 2 usage, also
an option that this model or machine cannot honour; 130 interrupted.  Errors are one line on stderr; with
``--debug`` their traceback follows.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from mrv2.commands import bench, chat, compare, doctor, generate, lab, models, record, trace, train_draft
from mrv2.errors import ConfigError, MRV2Error
from mrv2_models.errors import ModelFileError, ShardError, UnsupportedModelError

OK, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130
# each adds its own parser; what is heavy is imported when it runs
COMMANDS = (generate, chat, compare, bench, record, trace, train_draft, lab, models, doctor)
_TRACEBACK = "Traceback (most recent call last):"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = argparse.ArgumentParser(
        prog="mrv2",
        description="An LLM inference engine whose every step can be seen, switched and measured.",
        epilog="`mrv2 COMMAND --help` explains a command; `mrv2 compare` is the demo.",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        added = command.add_parser(subparsers)
        # SUPPRESS: the flag may stand before or after the command
        added.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    args = build_parser().parse_args(argv)
    # for a command that starts itself anew
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return args.run(args)
    except (MRV2Error, ModelFileError, UnsupportedModelError, ShardError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):
            # the reader of our output is gone; keep the interpreter from flushing into it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILURE
        if not _speaks_to_the_user(error):
            raise
        if args.debug:
            traceback.print_exc()
        print(f"mrv2: {one_line(error)}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else FAILURE
    except KeyboardInterrupt:
        print("mrv2: interrupted", file=sys.stderr)
        return INTERRUPTED


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; of a traceback inside it, the last line."""
    text = str(error) or type(error).__name__
    before, found, trace = text.partition(_TRACEBACK)
    if found:
        text = f"{before.strip()} {trace.strip().splitlines()[-1]}; --debug shows the traceback"
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _speaks_to_the_user(error: BaseException) -> bool:
    """Ours, the system's about a file, or a device out of memory: the message is enough."""
    ours = (MRV2Error, ModelFileError, UnsupportedModelError, ShardError, OSError)
    return isinstance(error, ours) or type(error).__name__ == "OutOfMemoryError"


if __name__ == "__main__":
    sys.exit(main())
