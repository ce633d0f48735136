"""The line of `memopt explain`: what another order could save at most, and if early updates are most of it."""

from __future__ import annotations

from collections.abc import Sequence

from test_ordering_steps import step

from lightning_memopt.graph import Graph
from lightning_memopt.report.helps import another_order

MIB = 1 << 20


def layers(together: bool) -> Graph:
    """Four layers; their updates come last, one op each or one op for all."""
    lines: list[tuple[str, str, Sequence[int], Sequence[int]]] = []
    for i in range(4):  # parameters 0 .. 3, activations 4 .. 7, gradients 8 .. 11
        lines.append(("forward", "mm", [i, 3 + i] if i else [0], [4 + i]))
    for i in range(3, -1, -1):
        lines.append(("backward", "mm", [4 + i, *([9 + i] if i < 3 else [])], [8 + i]))
    if together:
        lines.append(("update", "_foreach_add_", [0, 1, 2, 3, 8, 9, 10, 11], []))
    else:
        lines += [("update", "add_", [i, 8 + i], []) for i in range(4)]
    sizes = dict.fromkeys(range(4), 10 * MIB) | dict.fromkeys(range(4, 8), MIB) | dict.fromkeys(range(8, 12), 10 * MIB)
    return step(*lines, nbytes=sizes)


def test_early_updates_are_named_where_they_are_most_of_it() -> None:
    said = another_order(layers(together=False))
    most, early = said.split(", ")
    assert most == "Another order of ops could save at most 22.2% (18.00 MiB)"
    assert early == "18.00 MiB of it by updates in backward (`optimizer_in_backward`)."


def test_one_op_that_updates_all_parameters_needs_all_gradients_in_every_order() -> None:
    """Single updates do not: at most two gradients are alive, that of a layer and that of the next one."""
    said = another_order(layers(together=True))
    order, updates = said.split("; ")
    assert order == "No other order of ops needs less memory"
    assert updates == "updates of single parameters in backward (`optimizer_in_backward`) at most 22.2% (18.00 MiB)."


def test_an_order_that_cannot_be_better_is_said_to_be_so() -> None:
    sizes = dict.fromkeys(range(4), MIB)
    lines: list[tuple[str, str, Sequence[int], Sequence[int]]] = [("forward", "exp", [i], [i + 1]) for i in range(3)]
    assert another_order(step(*lines, nbytes=sizes)) == "No other order of ops needs less memory."
    assert another_order(Graph((), (), (), ())) == "No other order of ops is possible."


def test_what_eager_code_does_not_have_is_only_said() -> None:
    lines: list[tuple[str, str, Sequence[int], Sequence[int]]] = [
        ("forward", "exp", [0], [1]), ("forward", "exp", [0], [2]), ("forward", "sum", [1], [3]), ("forward", "sum", [2], [4]),
        ("forward", "add", [3, 4], [5]),
    ]  # fmt: skip
    sizes = dict.fromkeys((0, 3, 4, 5), MIB) | dict.fromkeys((1, 2), 10 * MIB)
    said = another_order(step(*lines, nbytes=sizes))
    assert said == "Another order of ops could save at most 40.9% (9.00 MiB); eager code runs in its own order."
