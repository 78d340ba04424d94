"""The command line: help, exit codes, errors on one line, and what the light commands print."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mrv2 import cli
from mrv2.cli import FAILURE, OK, USAGE, main, one_line
from mrv2.commands import doctor
from mrv2.commands.arguments import flag, given_options, parse_knob, parse_knob_values
from mrv2.commands.printing import number, percent, text_table
from mrv2.config import Knobs, legal_values
from mrv2.errors import ConfigError, EngineDeadError

COMMANDS = ("generate", "chat", "compare", "bench", "train-draft", "models", "doctor")
TINY = ["--model", "tiny-llama", "--device", "host", "--max-model-len", "64", "--num-gpu-blocks", "40"]
TINY += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64"]


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code: object
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    assert isinstance(code, int)
    out, err = capsys.readouterr()
    return code, out, err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--help"], capsys)
    assert code == OK
    for command in COMMANDS:
        assert re.search(rf"^    {command}\s", out, re.MULTILINE), command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([command, "--help"], capsys)
    assert code == OK
    assert f"usage: mrv2 {command}" in out


def test_knob_flags_explain_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(["generate", "--help"], capsys)
    text = " ".join(out.split())
    for spec in fields(Knobs):
        assert flag(spec.name) in text
        assert " ".join(spec.metadata["help"].split()) in text
        assert " ".join(spec.metadata["look_for"].split()) in text
    assert "--no-async-scheduling" in text


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["generate", "x", "--runner", "v3"],
        ["generate", "x", "--max-tokens", "many"],
        ["generate", "--file", "x", "y"],
        ["generate", "--chat", "--token-ids", "1"],
        ["generate", *TINY, "--token-ids", "one"],
        ["generate", *TINY, "--token-ids", "1", "--top-p", "3"],
        ["generate", *TINY, "--token-ids", "1", "--runner", "v1", "--queue-depth", "4"],
        ["bench", "--workload", "z"],
        ["bench", "--repetitions", "0"],
        ["bench", "--device", "host", "--modes", "both"],
        ["bench", "--device", "host", "--vary", "nothing=1"],
        ["bench", "--device", "host", "--vary", "runner=v1"],
        ["compare", "--requests", "0"],
    ],
    ids=lambda argv: " ".join(argv)[-30:] or "nothing",
)
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(argv, capsys)
    assert code == USAGE
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("mrv2")


def test_an_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["generate", "--model", "no-such-model", "x"], capsys)
    assert (code, out) == (FAILURE, "")
    assert "no model 'no-such-model'" in err.splitlines()[-1]
    assert "Traceback" not in err
    for argv in (["--debug", "generate"], ["generate", "--debug"]):
        code, _, err = run([*argv, "--model", "no-such-model", "x"], capsys)
        assert code == FAILURE
        assert "Traceback" in err


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["generate", "--file", str(tmp_path / "none.txt")], capsys)
    assert code == FAILURE
    assert len(err.splitlines()) == 1 and "none.txt" in err


def test_an_empty_source_of_prompts_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    code, _, err = run(["generate"], capsys)
    assert code == USAGE and "no prompt" in err


def test_errors_of_programming_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> int:
        raise ValueError("not for the user")

    monkeypatch.setattr("mrv2.commands.models.run", broken)
    monkeypatch.setattr(cli, "COMMANDS", cli.COMMANDS)
    with pytest.raises(ValueError, match="not for the user"):
        main(["models"])


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("mrv2.commands.models.run", interrupted)
    assert run(["models"], capsys) == (130, "", "mrv2: interrupted\n")


def test_one_line_keeps_the_cause_of_a_dead_engine() -> None:
    trace = "Traceback (most recent call last):\n  File x\nDeviceError: stage 'forward' failed"
    text = one_line(EngineDeadError(f"the engine has stopped: {trace}"))
    assert text == "the engine has stopped: DeviceError: stage 'forward' failed; --debug shows the traceback"
    assert one_line(ConfigError("two\n  lines")) == "two lines"


def test_knob_texts() -> None:
    assert parse_knob("runner=v1") == ("runner", "v1")
    assert parse_knob("async-scheduling=off") == ("async_scheduling", False)
    assert parse_knob("async_scheduling=true") == ("async_scheduling", True)
    assert parse_knob_values("queue_depth=1,2, 3") == ("queue_depth", [1, 2, 3])
    for spec in fields(Knobs):
        for value in legal_values(spec.name):
            text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
            assert parse_knob(f"{spec.name}={text}") == (spec.name, value)
    for bad in ("runner", "runner=", "runner=v9", "speed=2", "runner=v1,v2", "queue_depth=True"):
        with pytest.raises(ConfigError):
            parse_knob(bad)


def test_only_given_flags_become_options() -> None:
    args = cli.build_parser().parse_args(
        ["generate", "x", "--no-async-scheduling", "--seed", "0", "--queue-depth", "1"]
    )
    assert given_options(args) == {"async_scheduling": False, "seed": 0, "queue_depth": 1}


def test_models_lists_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["models"], capsys)
    assert code == OK
    for name in ("smollm2-135m-instruct", "qwen3-0.6b", "tiny-llama"):
        assert name in out


def test_doctor_reports_and_never_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["doctor"], capsys)
    assert code == OK
    for what in ("python", "torch", "triton", "gpu", "nvtx", "bench records"):
        assert what in out

    def broken() -> list[doctor.Finding]:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(doctor, "CHECKS", (broken,))
    code, out, _ = run(["doctor"], capsys)
    assert code == OK
    assert "missing" in out and "driver too old" in out


def test_doctor_knows_which_gpus_have_records(tmp_path: Path) -> None:
    record = {"environment": {"gpu": {"name": "GPU X"}}, "workloads": [{"name": "a"}, {"name": "c"}]}
    (tmp_path / "x.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "other.json").write_text('{"environment": {"gpu": null}}', encoding="utf-8")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    assert doctor._measured_gpus(tmp_path) == {"GPU X": {"a", "c"}}
    assert doctor._measured_gpus(tmp_path / "none") == {}


def test_help_needs_no_torch() -> None:
    """In a process of its own: `mrv2 --help` answers at once, and works where torch cannot be imported."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = sys.modules['nvtx'] = None\n"
        "from mrv2.cli import main\n"
        "main(['compare', '--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == OK, done.stderr
    assert "usage: mrv2 compare" in done.stdout


def test_tables() -> None:
    table = text_table(("name", "tok/s"), [("v1", "1.0"), ("v2 async", "12.0")])
    assert table.splitlines() == ["name      tok/s", "--------  -----", "v1          1.0", "v2 async   12.0"]
    assert (number(None), number(1234.5, 1), percent(None), percent(0.125, 1)) == ("-", "1,234.5", "-", "12.5 %")
