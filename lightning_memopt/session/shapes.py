"""What is known of a batch before its forward runs: which forward it is for, and the shapes of its tensors."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch

from lightning_memopt.torch_private import tree_leaves

Signature = tuple[Any, ...]
_Shapes = list[tuple[int, ...]]

_SAMPLES = 4
"""A list of so many alike tensors holds samples, whose order says nothing; a shorter one (inputs, targets) holds arguments."""


def signature_of(part: int, trained: tuple[bool, ...], batch: Any) -> Signature:
    """Which forward of a step, which parameters are trained; then of each tensor of the batch, or of each list of samples, the
    shape, dtype and device of every tensor in it.
    """
    leaves = tree_leaves(batch, is_leaf=_is_samples)
    groups = ([leaf] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves if not isinstance(leaf, str | bytes))
    tensors = ([t for t in group if isinstance(t, torch.Tensor)] if type(group) is list else [] for group in groups)
    return (part, trained, *(tuple((_shape(t), t.dtype, t.device.type) for t in group) for group in tensors if group))


def _shape(t: torch.Tensor) -> tuple[int, ...]:
    """Of a nested tensor, that of its values one after the other: its own has a symbol for the lengths, or there is none."""
    if not t.is_nested:
        return tuple(t.shape)
    with torch.no_grad():
        return tuple(t.values().shape)


def _is_samples(node: Any) -> bool:
    """Whether a part of a batch is a list of samples: tensors of one dtype and as many dimensions."""
    if type(node) is not list or len(node) < _SAMPLES or not all(isinstance(t, torch.Tensor) for t in node):
        return False
    return len({(t.dtype, t.device, len(_shape(t))) for t in node}) == 1


def alike(one: Signature, other: Signature) -> bool:
    """Whether two signatures differ in nothing but sizes."""
    if one[:2] != other[:2] or len(one) != len(other):
        return False
    return all(
        len(a) == len(b) and all(x[1:] == y[1:] and len(x[0]) == len(y[0]) for x, y in zip(a, b, strict=True))
        for a, b in zip(one[2:], other[2:], strict=True)
    )


def serves(lender: Signature, signature: Signature) -> bool:
    """Whether the plan of the first may serve the second: alike but for sizes, and nothing of it is larger."""
    return times_larger(lender, signature) <= 1.0


def times_larger(lender: Signature, signature: Signature) -> float:
    """How many times as large as the first the second is, in whatever it is largest: elements in all, or in a tensor or list of
    samples; infinity where they differ in more than sizes.
    """
    if not alike(lender, signature):
        return math.inf
    groups = zip(lender[2:], signature[2:], strict=True)
    each = (_times([shape for shape, _, _ in a], [shape for shape, _, _ in b]) for a, b in groups)
    return max(_ratio(elements(lender), elements(signature)), *each)


def _times(lent: _Shapes, shapes: _Shapes) -> float:
    """Of one tensor: the dimensions behind the first count. Samples may be more if they are shorter: what they take grows with
    their length at least in proportion.

    Of a list of samples: the largest of each dimension (what is padded), and for any k, the elements of the k largest. Where
    none of them is larger, the sum over the samples of anything that grows with the size of a sample at least in proportion
    is no larger either (weak majorization: Marshall and Olkin, Inequalities, 4.B.2).
    """
    if len(shapes) == 1:
        return max(map(_ratio, lent[0][1:], shapes[0][1:]), default=0.0)
    sides = (_ratio(max(n), max(m)) for n, m in zip(zip(*lent, strict=True), zip(*shapes, strict=True), strict=True))
    most, wanted = (accumulate(sorted(map(math.prod, found), reverse=True)) for found in (lent, shapes))
    return max(*sides, *map(_ratio, most, wanted))


def _ratio(lent: int, wanted: int) -> float:
    return wanted / lent if lent else math.inf if wanted else 0.0


def elements(signature: Signature) -> int:
    """Elements of all tensors of the batch."""
    return sum(math.prod(shape) for group in signature[2:] for shape, _, _ in group)
