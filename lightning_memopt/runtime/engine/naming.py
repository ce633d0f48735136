"""Describe changed tensors in messages: by the op that made them, and by the user's line that saved or read them."""

from __future__ import annotations

from typing import Protocol

import torch

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import ModifiedError
from lightning_memopt.graph import Graph
from lightning_memopt.runtime.engine.holding import Version

REFUSED = "one of the variables needed for gradient computation has been modified by an inplace operation"
"""The words of autograd's own error."""


class Names(Protocol):
    """The names of a step's tensors, and lines of user code. Each method returns empty text where it knows nothing."""

    def name_of(self, version: Version) -> str:
        """`module:op` of the op that made the version, or the parameter's name."""

    def line_of(self, save: int) -> str:
        """The line of user code at which a save was packed."""

    def reader_of(self, version: Version) -> tuple[str, str]:
        """(name of an op that reads the version, line that ran the op)."""

    def kept(self, where: int, t: torch.Tensor) -> tuple[str, str]:
        """(name, line) of a tensor that autograd keeps itself. `where`: the id of its version (observed steps), or the position
        of the op that saved it (planned steps).
        """


class GraphNames:
    """The names of a planned step: those of its graph, and the lines that ran when the graph was observed."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def name_of(self, version: Version) -> str:
        tensor = version.holding.tensor
        return "" if tensor is None else self._graph.tensors[tensor].name

    def line_of(self, save: int) -> str:
        return self._graph.save_lines.get(save, "")

    def reader_of(self, version: Version) -> tuple[str, str]:
        graph, tensor = self._graph, version.holding.tensor
        ops = () if tensor is None else graph.consumers.get(tensor, ())
        op = next((op for op in ops if op.recomputable), None)
        return ("", "") if op is None else (op.name, graph.lines.get(op.id, ""))

    def kept(self, where: int, t: torch.Tensor) -> tuple[str, str]:
        graph = self._graph
        nbytes = kind_of(graph.device).allocated_nbytes(t.untyped_storage().nbytes())
        near = [s for s in graph.saves if s.op == where and graph.tensors[s.tensor].nbytes == nbytes]
        if len(near) != 1:
            return "", ""
        return graph.tensors[near[0].tensor].name, graph.save_lines.get(near[0].id, "")


def modified(what: str, now: int, then: int) -> ModifiedError:
    """The error for a saved tensor that was changed in place, in the words of autograd."""
    return ModifiedError(
        f"{REFUSED}: {what} is at version {now}; expected version {then} instead. Do not change it between forward and "
        "backward, or work on a clone."
    )


def of_saved(t: torch.Tensor, size: list[int], version: Version, save: int, names: Names | None) -> str:
    """Describe a saved tensor: its type, its size, the op that made it, the line that saved it."""
    return _saved(t, size, "" if names is None else names.name_of(version), "" if names is None else names.line_of(save))


def of_kept(t: torch.Tensor, about: tuple[Names, int] | None) -> str:
    """Describe a tensor that autograd keeps itself, in the same way."""
    return _saved(t, list(t.shape), *(("", "") if about is None else about[0].kept(about[1], t)))


def _saved(t: torch.Tensor, size: list[int], name: str, line: str) -> str:
    known = [f"is {_made(name)}"] if name else []
    known += [f"was saved at {line}"] if line else []
    return f"[{t.type()} {size}]" + (f", which {' and '.join(known)}," if known else "")


def of_start(version: Version, names: Names | None) -> ModifiedError:
    """The error where a rebuild would start from a version whose value was changed, or emptied, since the forward."""
    t = version.holding.value
    assert t is not None
    name = "" if names is None else names.name_of(version)
    op, line = ("", "") if names is None else names.reader_of(version)
    text = f"[{t.type()} {list(t.shape)}] of {version.nbytes} bytes" + (f", which is {_made(name)}," if name else "")
    if op:
        text += f" read by {op}{' at ' + line if line else ''},"
    if t.untyped_storage().nbytes() < version.nbytes:
        text += f" whose storage was resized to {t.untyped_storage().nbytes()} bytes,"
    return ModifiedError(
        f"{REFUSED}: {text} is at version {t._version}; a rebuild that starts from it expected version "
        f"{version.holding.expected}. No observed step changed it before its backward was over. Work on a clone, or set "
        "profile_steps so that an observed step changes it: what is made from it is kept then. If you go on after this error, "
        "a step is observed again."
    )


def _made(name: str) -> str:
    """Put a tensor's name into words: the name of a parameter or buffer, a kind ("input"), or `module:op`."""
    module, by, op = name.partition(":")
    if not by or not op.startswith(("aten::", "prims::")):
        return f"the step's {name}" if name in ("input", "temporary") else name
    return f"made by {op} in {module or 'the model'}"
