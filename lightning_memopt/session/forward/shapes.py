"""The signature of a batch, known before its forward runs: which forward it is for, and the shapes of its tensors."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from lightning_memopt.session.forward.leaves import leaves_of

Signature = tuple[Any, ...]
NEXT = ()
"""Stands between the groups of two calls in the signature of a forward; no group of tensors is empty."""
_Shapes = list[tuple[int, ...]]

_SAMPLES = 4
"""Minimum length of a list of alike tensors that counts as samples, in any order. Shorter ones are arguments."""


class Entry(NamedTuple):
    """What began a forward that no call of the model began.

    module: the name of the module that was called first.
    turn: the number of the optimizer that updated last. Adversaries, and actor and critic, take turns: their forwards may begin
        with the same module and go on otherwise.
    """

    module: str
    turn: int


def signature_of(part: int | Entry, trained: tuple[bool, ...], batch: Any) -> Signature:
    """The number of the forward in its step, or what began it, and which parameters are trained: unfrozen layers save more and
    need another plan. Then, for each tensor or list of samples in the batch, the shape, dtype and device of every tensor in it,
    and whether its gradient is asked for (by a penalty on gradients, in some steps).
    """
    groups: list[tuple[Any, ...]] = []
    for leaf in leaves_of(batch, is_leaf=_is_samples):
        if isinstance(leaf, torch.Tensor):
            groups.append((_kind(leaf),))
        elif type(leaf) is list and leaf:
            groups.append(tuple(map(_kind, leaf)))
    return part, trained, *groups


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    return _shape(t), t.dtype, t.device.type, t.requires_grad and t.is_leaf  # not what an earlier call made (solvers)


def _shape(t: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor. For a nested one, that of its concatenated values: its own has a symbol for lengths, or none."""
    if not t.is_nested:
        return tuple(t.shape)
    with torch.no_grad():
        return tuple(t.values().shape)


def _is_samples(node: Any) -> bool:
    """Whether a part of a batch is a list of samples: tensors of one dtype, one device and the same number of dimensions."""
    if type(node) is not list or len(node) < _SAMPLES or not all(isinstance(t, torch.Tensor) for t in node):
        return False
    return len({(t.dtype, t.device, len(_shape(t))) for t in node}) == 1


def followed_by(calls: Signature, call: Signature) -> Signature:
    """The signature of these calls and one more."""
    return (*calls, NEXT, *call[2:])


def goes_on_as(calls: Signature, more: Signature) -> bool:
    """Whether the calls of `more` are these, and maybe others after them."""
    return more[: len(calls)] == calls and more[len(calls) :][:1] in ((), (NEXT,))


def alike(first: Signature, second: Signature) -> bool:
    """Whether two signatures differ in nothing but sizes. Of two turns, forwards of the same sizes are not alike."""
    if _without_turn(first) != _without_turn(second) or len(first) != len(second):
        return False
    if first[0] != second[0] and first[2:] == second[2:]:
        return False
    return all(
        len(a) == len(b) and all(x[1:] == y[1:] and len(x[0]) == len(y[0]) for x, y in zip(a, b, strict=True))
        for a, b in zip(first[2:], second[2:], strict=True)
    )


def _without_turn(signature: Signature) -> Signature:
    part, trained = signature[:2]
    return (part.module if isinstance(part, Entry) else part), trained


def serves(lender: Signature, signature: Signature) -> bool:
    """Whether the plan of `lender` may serve `signature`: they differ only in sizes, and `signature` is nowhere larger."""
    return times_larger(lender, signature) <= 1.0


def times_larger(lender: Signature, signature: Signature) -> float:
    """How many times as large as `lender` the other signature is: the largest ratio over all elements together and over each
    tensor or list of samples. Infinity where they differ in more than sizes.
    """
    if not alike(lender, signature):
        return math.inf
    groups = zip(lender[2:], signature[2:], strict=True)
    ratios = (_times([shape for shape, *_ in a], [shape for shape, *_ in b]) for a, b in groups if a)
    return max(_ratio(elements(lender), elements(signature)), *ratios)


def _times(lent: _Shapes, shapes: _Shapes) -> float:
    """The largest ratio of `shapes` to `lent`.

    For one tensor, all dimensions but the first count: there may be more samples if they are shorter, because the bytes and
    seconds of a sample grow at least in proportion to its length.

    For a list of samples, the largest size of each dimension counts (samples are padded to it), and for each k the elements of
    the k largest samples. Where none of these is larger, no sum over the samples is larger, of any number that grows at least
    in proportion to the size of a sample (weak majorization: Marshall and Olkin, Inequalities, 4.B.2).
    """
    if len(shapes) == 1:
        return max(map(_ratio, lent[0][1:], shapes[0][1:]), default=0.0)
    sides = (_ratio(max(n), max(m)) for n, m in zip(zip(*lent, strict=True), zip(*shapes, strict=True), strict=True))
    most, wanted = (accumulate(sorted(map(math.prod, side), reverse=True)) for side in (lent, shapes))
    return max(*sides, *map(_ratio, most, wanted))


def _ratio(lent: int, wanted: int) -> float:
    if lent:
        return wanted / lent
    return math.inf if wanted else 0.0


def elements(signature: Signature) -> int:
    """Elements of all tensors of the batch."""
    return sum(math.prod(shape) for group in signature[2:] for shape, *_ in group)
