"""Who may import whom: one direction between the libraries, no cycles, nothing undeclared."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from checks.source_tree import (
    REPO,
    ROOTS,
    expect_none,
    import_chain,
    import_cycles,
    import_graph,
    imports_of,
    is_within,
    modules,
)

# (importer, must not reach, why)
FORBIDDEN = [
    ("mrv2_kernels", "mrv2_models", "kernels know nothing of models"),
    ("mrv2_kernels", "mrv2", "kernels know nothing of the workbench"),
    ("mrv2_models", "mrv2", "models know nothing of the workbench"),
    ("mrv2.trace", "mrv2.engine", "a trace is read without an engine"),
    ("mrv2.trace", "mrv2.runner", "a trace is read without an engine"),
    ("mrv2.viz", "mrv2.engine", "a figure is drawn from a trace alone"),
    ("mrv2.viz", "mrv2.runner", "a figure is drawn from a trace alone"),
    ("mrv2.runner", "mrv2.lab", "a runner does not know who watches it"),
    ("mrv2.runner", "mrv2.engine.request", "a runner sees ids and arrays, never a request"),
]
# import name -> distribution, where the two differ
DISTRIBUTIONS = {"IPython": "jupyterlab"}


@pytest.mark.parametrize("importer, target, why", FORBIDDEN, ids=lambda value: str(value).replace(" ", "-"))
def test_direction(importer: str, target: str, why: str) -> None:
    direct = [
        f"{name} -> {other}"
        for name, others in import_graph(type_checking=True).items()
        if is_within(name, importer)
        for other in sorted(others)
        if is_within(other, target)
    ]
    chains = [
        " -> ".join(chain)
        for name in modules()
        if is_within(name, importer) and len(chain := import_chain(name, target)) > 2
    ]
    expect_none(direct + chains, why)


def test_an_engine_starts_without_what_only_some_need() -> None:
    """Each of these takes longer to import than the engine itself."""
    slow = ("transformers", "xgrammar", "pandas", "plotly", "matplotlib", "IPython", "torch._dynamo", "torch._inductor")
    code = f"import sys, mrv2.llm, mrv2.engine.core; print([name for name in {slow} if name in sys.modules])"
    paths = os.pathsep.join(str(REPO / root) for root in ROOTS)
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]", "imported by mrv2.llm or the engine core"


def test_no_module_imports_its_importer() -> None:
    cycles = (", ".join(group) for group in import_cycles(import_graph()))
    expect_none(cycles, "modules import each other: move what they share below both")


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert import_cycles({name: frozenset(others) for name, others in graph.items()}) == [["b", "c"]]


def test_packages_have_an_init() -> None:
    bare = {
        str(module.path.parent.relative_to(REPO))
        for module in modules().values()
        if not (module.path.parent / "__init__.py").exists()
    }
    expect_none(bare, "a folder with modules but no __init__.py is left out of the distribution")


def _declared() -> tuple[set[str], set[str]]:
    """Return the names of the required and of the optional dependencies, those for development left out."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {Requirement(text).name.lower() for text in requirements}

    extras = project["optional-dependencies"]
    optional = [text for extra in ("nvtx", "trace", "structured", "notebook") for text in extras[extra]]
    return names(project["dependencies"]), names(optional)


def test_imported_packages_are_declared() -> None:
    required, optional = _declared()
    problems = []
    for module in modules().values():
        needs_notebook = is_within(module.name, "mrv2.lab") or is_within(module.name, "mrv2.viz")
        for i in imports_of(module):
            top = i.name.split(".")[0]
            distribution = DISTRIBUTIONS.get(top, top).lower()
            if top in ROOTS.values() or top in sys.stdlib_module_names or distribution in required or i.type_checking:
                continue
            if distribution not in optional:
                problems.append(f"{module.where}:{i.line}: {top} is in no dependency list of pyproject.toml")
            elif not (i.optional or needs_notebook):
                problems.append(f"{module.where}:{i.line}: {top} is an extra: import it inside a function or a try")
    expect_none(problems, "the three packages import only what pyproject.toml declares")
