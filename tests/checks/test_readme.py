"""README.md names what there is: every knob, and only commands that exist."""

from __future__ import annotations

import argparse
import re
from dataclasses import Field, fields

import pytest

from checks.source_tree import REPO
from mrv2.cli import build_parser
from mrv2.config import Knobs, legal_values

README = (REPO / "README.md").read_text(encoding="utf-8")
# command lines of the fenced blocks, without their comments
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^(?:mrv2|make) .*$", README, re.MULTILINE)]


@pytest.mark.parametrize("spec", fields(Knobs), ids=lambda spec: spec.name)
def test_every_knob_has_a_row_with_its_values(spec: Field) -> None:
    row = re.search(rf"^\| `{spec.name}` \|(.*?)\|", README, re.MULTILINE)
    assert row, f"README.md has no row for the knob {spec.name}"
    for value in legal_values(spec.name):
        shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        assert shown in re.findall(r"\w+", row[1]), f"README.md: the row of {spec.name} lacks the value {shown!r}"


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("mrv2 ") and "COMMAND" not in c])
def test_command_lines_parse(command: str) -> None:
    words = re.findall(r'"[^"]*"|\S+', command)[1:]
    parsed = build_parser().parse_args([word.strip('"') for word in words])
    assert isinstance(parsed, argparse.Namespace)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    target = command.split()[1]
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the Makefile has no target {target}"
