"""The repository as data for the house rules: its text files, its modules and who imports whom."""

from __future__ import annotations

import ast
import gzip
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
ROOTS = {"workbench": "mrv2", "models": "mrv2_models", "kernels": "mrv2_kernels"}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported module; `name` may also be a module's attribute when the target is not ours."""

    name: str
    line: int
    type_checking: bool
    # inside a function or under try: runs later, or not at all
    optional: bool


@dataclass(frozen=True)
class Module:
    """One source file of the three packages."""

    name: str
    path: Path
    source: str
    tree: ast.Module

    @property
    def where(self) -> str:
        return str(self.path.relative_to(REPO))

    @property
    def lines(self) -> list[str]:
        return self.source.splitlines()

    def at(self, node: ast.AST) -> str:
        """Return a node's place as ``file:line``."""
        return f"{self.where}:{getattr(node, 'lineno', 1)}"


def module_from(source: str, name: str = "mrv2.sample", path: Path | None = None) -> Module:
    """Parse one module; tests of the rules themselves make theirs from a few lines."""
    path = path or REPO / (name.replace(".", "/") + ".py")
    return Module(name, path, source, ast.parse(source, filename=str(path)))


@cache
def repo_files() -> tuple[Path, ...]:
    """Return every file that git tracks or would track; skips the test outside of a git checkout."""
    if not (REPO / ".git").exists():
        pytest.skip("not a git checkout: the list of files comes from git")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        check=True,
    ).stdout
    paths = (REPO / name for name in listed.decode().split("\0") if name)
    return tuple(sorted(p for p in paths if p.is_file()))


def text_of(path: Path) -> str:
    """Return a file's bytes as text, unpacked when gzipped; binary files keep their readable parts."""
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("latin-1")


@cache
def modules() -> dict[str, Module]:
    """Return the modules of the three packages by dotted name."""
    found = {}
    for root, package in ROOTS.items():
        for path in sorted((REPO / root / package).rglob("*.py")):
            parts = path.relative_to(REPO / root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = module_from(path.read_text(encoding="utf-8"), name, path)
    return found


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _base_package(module: Module, level: int) -> str:
    parts = module.name.split(".")
    if module.path.name != "__init__.py":
        parts.pop()
    return ".".join(parts[: len(parts) - level + 1])


def imports_of(module: Module) -> list[Import]:
    """Return a module's imports; `from package import name` counts as the submodule where there is one."""
    known, found = modules(), []

    def visit(node: ast.AST, type_checking: bool, optional: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, type_checking, optional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = _base_package(module, node.level)
                base = f"{package}.{base}" if base else package
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                name = submodule if submodule in known else base
                found.append(Import(name, node.lineno, type_checking, optional))
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            for child in node.body:
                visit(child, True, optional)
            for child in node.orelse:
                visit(child, type_checking, optional)
        else:
            later = optional or isinstance(node, FunctionNode | ast.Lambda | ast.Try)
            for child in ast.iter_child_nodes(node):
                visit(child, type_checking, later)

    visit(module.tree, False, False)
    return found


@cache
def import_graph(type_checking: bool = False) -> dict[str, frozenset[str]]:
    """Return module -> the modules of ours it imports, also inside functions."""
    known = modules()
    return {
        name: frozenset(
            i.name
            for i in imports_of(module)
            if i.name in known and i.name != name and (type_checking or not i.type_checking)
        )
        for name, module in known.items()
    }


def is_within(name: str, package: str) -> bool:
    """Say whether a dotted name is the package or lies below it."""
    return name == package or name.startswith(package + ".")


def import_chain(start: str, target: str) -> list[str]:
    """Return the shortest chain of imports from a module into a package, or an empty list."""
    graph, chains, seen = import_graph(), [[start]], {start}
    for chain in chains:
        for name in sorted(graph[chain[-1]] - seen):
            if is_within(name, target):
                return [*chain, name]
            seen.add(name)
            chains.append([*chain, name])
    return []


def import_cycles(graph: dict[str, frozenset[str]]) -> list[list[str]]:
    """Return every group of modules that import each other (strongly connected components of two or more)."""
    reach = {name: _reachable(graph, name) for name in graph}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) | {name} for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(graph: dict[str, frozenset[str]], start: str) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        fresh = graph[ahead.pop()] - seen
        seen |= fresh
        ahead.extend(fresh)
    return seen


def expect_none(problems: Iterable[str], rule: str) -> None:
    """Fail with the rule and every place that breaks it."""
    listed = sorted(problems)
    if listed:
        pytest.fail(f"{rule} ({len(listed)}):\n" + "\n".join(listed), pytrace=False)


def is_triton_kernel(node: FunctionNode) -> bool:
    """Say whether a function is decorated by triton.jit (or a sibling such as triton.heuristics) or gluon.jit."""
    return any(ast.unparse(decorator).startswith(("triton.", "gluon.")) for decorator in node.decorator_list)


def functions(tree: ast.Module) -> Iterator[FunctionNode]:
    """Yield every function and method of a module, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, FunctionNode))


def parameters(node: FunctionNode) -> list[ast.arg]:
    """Return a function's parameters in order, the starred ones too."""
    args = node.args
    starred = [a for a in (args.vararg, args.kwarg) if a is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *starred]


def is_dataclass(node: ast.ClassDef) -> bool:
    """Say whether a class is decorated as a dataclass."""
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
