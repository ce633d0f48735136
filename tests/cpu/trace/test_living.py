"""Which storages are alive: of tensors of every kind, whatever state they are in."""

import torch
from torch import Tensor

from lightning_memopt.trace.living import living

CPU = torch.device("cpu")


def is_alive(t: Tensor) -> bool:
    return t.untyped_storage()._cdata in {storage._cdata for storage in living(CPU)}


def test_gradients_that_a_tensor_retains() -> None:
    """Nothing in Python has asked for the gradients yet: they are C++'s alone."""
    x = torch.ones(1237, requires_grad=True)
    y = x * 2
    y.retain_grad()
    y.sum().backward()
    assert sum(storage.nbytes() == x.nbytes for storage in living(CPU)) == len([x, y, "x.grad", "y.grad"])


def forbidden_write() -> Tensor:
    """A view that torch raises of whenever autograd is asked of it."""
    view, other = (torch.ones(4, 4, requires_grad=True) * 2).split(2)
    with torch.no_grad():
        other.mul_(2)
    return view


def test_a_view_that_was_written_where_torch_forbids_it() -> None:
    view = forbidden_write()
    assert is_alive(view)
