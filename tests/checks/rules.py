"""The law of the code (CONTRIBUTING.md) as functions: each takes a module and yields the places that break it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from checks.source_tree import (
    Module,
    functions,
    is_dataclass,
    is_triton_kernel,
    is_within,
    parameters,
)

MAX_LINES = 500
ARRAY = re.compile(r"(torch\.Tensor|Tensor|np\.ndarray|NDArray(\[.*\])?)( \| None)?")

Rule = Callable[[Module], Iterator[str]]


def file_is_short(module: Module) -> Iterator[str]:
    """At most 500 lines a file: split by what the reader looks for."""
    if len(module.lines) > MAX_LINES:
        yield f"{module.where}: {len(module.lines)} lines"


def module_is_documented(module: Module) -> Iterator[str]:
    """A module begins by saying what it holds."""
    if module.tree.body and not ast.get_docstring(module.tree):
        yield module.where


def public_names_are_documented(module: Module) -> Iterator[str]:
    """A public function or class says what it is for: shapes, units, errors."""
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not node.name.startswith("_") and not ast.get_docstring(node):
                yield f"{module.at(node)}: {node.name}"


def functions_are_annotated(module: Module) -> Iterator[str]:
    """Every parameter and every return value has a type."""
    for node in functions(module.tree):
        if is_triton_kernel(node):
            continue
        missing = [
            a.arg
            for index, a in enumerate(parameters(node))
            if a.annotation is None and not (index == 0 and a.arg.lstrip("_") in ("self", "cls"))
        ]
        if node.returns is None:
            missing.append("the return value")
        if missing:
            yield f"{module.at(node)}: {node.name}: {', '.join(missing)}"


def nothing_is_unimplemented(module: Module) -> Iterator[str]:
    """NotImplementedError is for abstract methods only: elsewhere raise an error that names the remedy."""
    abstract = {
        inner
        for node in functions(module.tree)
        if any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list)
        for inner in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id == "NotImplementedError" and node not in abstract:
            yield module.at(node)


def asserts_have_a_message(module: Module) -> Iterator[str]:
    """An assert names the value that broke the invariant."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert) and node.msg is None:
            yield f"{module.at(node)}: {ast.unparse(node)[:80]}"


def waits_have_a_reason(module: Module) -> Iterator[str]:
    """The host waits through mrv2.device, with a reason: then the wait is counted and named."""
    if is_within(module.name, "mrv2.device"):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "synchronize":
            text = ast.unparse(node)
            has_reason = bool(node.args) or any(keyword.arg == "reason" for keyword in node.keywords)
            if text.startswith(("torch.cuda.", "cuda.")) or not has_reason:
                yield f"{module.at(node)}: {text}"


def array_fields_state_their_shape(module: Module) -> Iterator[str]:
    """A `# [num_reqs]` line stands above each array field of a dataclass, or above a run of them."""
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.ClassDef) and is_dataclass(node)):
            continue
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and _is_array(member.annotation):
                if not _has_shape(module.lines, member.lineno):
                    yield f"{module.at(member)}: {node.name}.{ast.unparse(member.target)}"


def kernel_wrappers_state_their_shapes(module: Module) -> Iterator[str]:
    """A `# [num_reqs]` line stands above each tensor that a kernel wrapper takes, or above a run of them."""
    if not is_within(module.name, "mrv2_kernels"):
        return
    for node in functions(module.tree):
        if node.name.endswith("_triton") and not node.name.startswith("_"):
            for parameter in parameters(node):
                if _is_array(parameter.annotation) and not _has_shape(module.lines, parameter.lineno):
                    yield f"{module.at(parameter)}: {node.name}({parameter.arg})"


def twins_have_one_signature(module: Module) -> Iterator[str]:
    """`dispatch(x_triton, x_torch)` swaps one for the other: both stand in one file and take the same arguments."""
    defined = {node.name: node for node in module.tree.body if isinstance(node, ast.FunctionDef)}
    for call in ast.walk(module.tree):
        if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith("dispatch") and len(call.args) == 2):
            continue
        names = [ast.unparse(argument) for argument in call.args]
        if absent := [name for name in names if name not in defined]:
            yield f"{module.at(call)}: {', '.join(absent)} is not defined in this file"
            continue
        first, second = (_signature(defined[name]) for name in names)
        if first != second:
            yield f"{module.at(call)}: {names[0]}({first}) is not {names[1]}({second})"


RULES: list[Rule] = [
    file_is_short,
    module_is_documented,
    public_names_are_documented,
    functions_are_annotated,
    nothing_is_unimplemented,
    asserts_have_a_message,
    waits_have_a_reason,
    array_fields_state_their_shape,
    kernel_wrappers_state_their_shapes,
    twins_have_one_signature,
]


def _is_array(annotation: ast.expr | None) -> bool:
    return annotation is not None and bool(ARRAY.fullmatch(ast.unparse(annotation).strip("'\"")))


def _has_shape(lines: list[str], lineno: int) -> bool:
    """Say whether the line, or the comment above its run of array declarations, gives a shape such as ``[B, K]``."""
    if re.search(r"#.*\[.*\]", lines[lineno - 1]):
        return True
    above = lineno - 2
    while above >= 0 and re.search(r"^\s*\w+: .*(Tensor|ndarray|NDArray)", lines[above]):
        above -= 1
    while above >= 0 and lines[above].strip().startswith("#"):
        if re.search(r"\[.*\]|\bshape", lines[above]):
            return True
        above -= 1
    return False


def _signature(node: ast.FunctionDef) -> str:
    """Return a function's parameters as text, without their types."""
    bare = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(bare, ast.FunctionDef), f"{node.name} does not parse back into a function"
    for parameter in parameters(bare):
        parameter.annotation = None
    return ast.unparse(bare.args)
