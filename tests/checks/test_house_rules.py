"""The three packages keep the law of the code, and each rule is shown to bite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checks import rules
from checks.source_tree import REPO, expect_none, module_from, modules, repo_files, text_of

MARKERS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.~$}>-])/(?:root|work|Users|home/[a-z_][\w-]*)/")
REGISTRY_HOST = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.|deb\.debian\.org|crates\.io")
THIS_FILE = Path(__file__).resolve()
SOURCE_SUFFIXES = {".py", ".toml", ".sh", ".yml", ".yaml", ".js", ".css", ".ipynb", ""}


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: rules.Rule) -> None:
    expect_none((found for module in modules().values() for found in rule(module)), rule.__doc__ or rule.__name__)


BREAKS = {
    "file_is_short": "x = 1\n" * (rules.MAX_LINES + 1),
    "module_is_documented": "x = 1",
    "public_names_are_documented": "def f() -> None: ...",
    "functions_are_annotated": "def f(x) -> None: ...",
    "nothing_is_unimplemented": "def f() -> None:\n    raise NotImplementedError",
    "asserts_have_a_message": "assert 1 + 1 == 2",
    "waits_have_a_reason": "event.synchronize()",
    "array_fields_state_their_shape": "@dataclass\nclass Batch:\n    positions: torch.Tensor",
    "kernel_wrappers_state_their_shapes": "def f_triton(x: torch.Tensor) -> None: ...",
    "twins_have_one_signature": "def a(x: int) -> int: ...\ndef b(y: int) -> int: ...\nop = dispatch(a, b)",
}
KEEPS = {
    "file_is_short": "x = 1\n" * rules.MAX_LINES,
    "module_is_documented": '"""Numbers."""\nx = 1',
    "public_names_are_documented": 'def f() -> None:\n    """Do nothing."""',
    "functions_are_annotated": "class A:\n    def f(self, *x: int) -> None: ...\n@triton.jit\ndef k(x_ptr): ...",
    "nothing_is_unimplemented": "@abstractmethod\ndef f() -> None:\n    raise NotImplementedError",
    "asserts_have_a_message": "assert n > 0, f'n={n} must be positive'",
    "waits_have_a_reason": "event.synchronize('output of the step')\nevent.synchronize(reason='drain')",
    "array_fields_state_their_shape": "@dataclass\nclass Batch:\n    # [num_reqs] int32\n    positions: torch.Tensor",
    "kernel_wrappers_state_their_shapes": "def f_triton(\n    # [T]\n    x: torch.Tensor,\n) -> None: ...",
    "twins_have_one_signature": "def a(x: int) -> int: ...\ndef b(x: int) -> int: ...\nop = dispatch(a, b)",
}


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_rule_bites_where_it_should(rule: rules.Rule) -> None:
    name = rule.__name__
    assert list(rule(module_from(BREAKS[name], "mrv2_kernels.sample"))), f"{name} lets its counter-example pass"
    assert not list(rule(module_from(KEEPS[name], "mrv2_kernels.sample"))), f"{name} refuses its example"


def test_no_unfinished_marker() -> None:
    found = (
        f"{path.relative_to(REPO)}:{number}: {line.strip()[:80]}"
        for path in repo_files()
        if path.suffix in SOURCE_SUFFIXES and path != THIS_FILE
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if MARKERS.search(line)
    )
    expect_none(found, "finish it, or make it a clear error to the user")


def test_no_path_of_one_machine_and_no_registry_host() -> None:
    found = (
        f"{path.relative_to(REPO)}: {what} {match[0]!r}"
        for path in repo_files()
        for pattern, what in ((MACHINE_PATH, "machine path"), (REGISTRY_HOST, "registry host"))
        for match in pattern.finditer(text_of(path))
    )
    expect_none(found, "a file names neither one machine's folders nor a package registry's host")
