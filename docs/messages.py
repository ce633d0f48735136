"""What this package says, read from its code: errors and their messages, warnings and lines, reasons with their remedies.

Nothing is imported: the syntax trees are read. A value that is put into a message is written as an ellipsis.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_memopt"
TREES = {p.relative_to(PACKAGE).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in sorted(PACKAGE.rglob("*.py"))}
SAYING = {"warnings.warn", "say", "_say", "_say_once", "logs.say", "logs.detail", "rank_zero_say", "rank_zero_warn"}
"""Functions that tell the user a line, or methods of `self`."""
NAME = "MemOpt: "
"""What is printed, and begins so, is such a line, too. Other prints are what a command was asked for."""
REMEDY = "Remedy: "
"""A line of a docstring that begins with this says what to do about an error."""

Values = dict[str, list[ast.expr]]


@dataclass(frozen=True)
class Line:
    """A line that is printed, or a warning. path: the file in the package."""

    path: str
    text: str


@dataclass(frozen=True)
class Reason:
    """Why something is not done, and what to do about it (`Reason` in the package)."""

    path: str
    what: str
    fix: str


@dataclass(frozen=True)
class Error:
    """An error class. cause, remedy: from its docstring. messages: what it is raised with, anywhere in the package."""

    name: str
    bases: tuple[str, ...]
    cause: str
    remedy: str
    messages: tuple[str, ...]


def _texts(node: ast.expr, values: Values, depth: int = 0) -> list[str]:
    """The texts that an expression may be. `values`: what is assigned to names in the function, or in the module."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else ["…"]
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values).replace("……", "…")]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [a + b for a in _texts(node.left, values, depth) for b in _texts(node.right, values, depth)]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, values, depth), *_texts(node.orelse, values, depth)]
    if isinstance(node, ast.Name) and node.id in values and depth < 3:
        return [text for value in values[node.id] for text in _texts(value, values, depth + 1)]
    return ["…"]


def _assigned(nodes: Iterable[ast.AST]) -> Values:
    values: Values = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
    return values


def _calls() -> Iterator[tuple[str, ast.Call, Values]]:
    """(file, call, values of names around it) of every call."""

    def inside(path: str, node: ast.AST, values: Values) -> Iterator[tuple[str, ast.Call, Values]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield path, child, values
            scope = {**values, **_assigned(ast.walk(child))} if isinstance(child, ast.FunctionDef) else values
            yield from inside(path, child, scope)

    for path, tree in TREES.items():
        yield from inside(path, tree, _assigned(tree.body))


def lines() -> list[Line]:
    """Every warning and every line, each once."""
    said = [
        Line(path, text)
        for path, call, values in _calls()
        if (function := ast.unparse(call.func).removeprefix("self.")) in SAYING | {"print"} and call.args
        for text in _texts(call.args[0], values)
        if function != "print" or text.startswith(NAME)
    ]
    return sorted(set(said), key=lambda line: (line.path, line.text))


def reasons() -> list[Reason]:
    """Every reason, each once."""
    given: list[Reason] = []
    for path, call, values in _calls():
        if ast.unparse(call.func) == "Reason" and len(call.args) == 2:
            what, fix = (_before(call, argument, values) for argument in call.args)
            given.append(Reason(path, what, fix))
    return sorted(set(given), key=lambda reason: (reason.path, reason.what))


def _before(call: ast.Call, argument: ast.expr, values: Values) -> str:
    """The text of an argument; of a name, the one that was assigned to it last before the call."""
    if isinstance(argument, ast.Name) and argument.id in values:
        earlier = [value for value in values[argument.id] if value.lineno <= call.lineno] or values[argument.id]
        argument = max(earlier, key=lambda value: value.lineno)
    return _texts(argument, values)[0]


def errors() -> list[Error]:
    """Every public class of errors of the package, by name."""
    raised: dict[str, set[str]] = {}
    for _, call, values in _calls():
        if call.args:
            raised.setdefault(ast.unparse(call.func), set()).update(_texts(call.args[0], values))
    classes: dict[str, Error] = {}
    for tree in TREES.values():
        for node in ast.walk(tree):
            bases = tuple(ast.unparse(base) for base in node.bases) if isinstance(node, ast.ClassDef) else ()
            if (
                isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and any(b.endswith(("Error", "Exception")) for b in bases)
            ):
                doc = ast.get_docstring(node) or ""
                told = doc.partition(REMEDY)
                messages = sorted(text for text in raised.get(node.name, ()) if text.strip("… "))
                remedy = " ".join(told[2].partition("\n\n")[0].split())
                cause = " ".join(told[0].partition("\n\n")[0].split())
                classes[node.name] = Error(node.name, bases, cause, remedy, tuple(messages))
    return [classes[name] for name in sorted(classes)]
