"""Run a step plainly and under replay with everything droppable dropped, and compare bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from lightning_memopt.runtime import ObservingEngine
from lightning_memopt.session.forward.recording import Recording


@contextlib.contextmanager
def dropping() -> Iterator[ObservingEngine]:
    """Record the forward in this block and drop every saved tensor that has a recipe; run backward after the block."""
    engine = ObservingEngine(pressure=lambda: 1 << 62)
    with Recording(engine, engine.make_recorder(), own_mode=True):
        yield engine


@contextlib.contextmanager
def recorded(drop: bool) -> Iterator[None]:
    """A forward under `dropping`, which must drop something; or a plain one."""
    if not drop:
        yield
        return
    with dropping() as engine:
        yield
    assert engine.evictions > 0, "nothing was dropped: the test tests nothing"


def draws() -> torch.Tensor:
    """The next numbers of the CPU's generator, and of the CUDA device's where one is in use."""
    found = torch.rand(4)
    return torch.cat([found, torch.rand(4, device="cuda").cpu()]) if torch.cuda.is_initialized() else found


@dataclass
class Outcome:
    """What a step left: loss, gradients (None where there is none), buffers, the next draw of the generator."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    draw: torch.Tensor
    dropped: int = 0


def outcome(
    model: nn.Module,
    step: Callable[[nn.Module], torch.Tensor],
    *,
    drop: bool,
    seed: int = 0,
    inputs: dict[str, torch.Tensor] | None = None,
) -> Outcome:
    """One forward and backward of `step(model) -> scalar loss`. `inputs` are extra leaves whose gradients count."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    dropped = 0
    if drop:
        with dropping() as engine:
            loss = step(model)
        dropped = engine.evictions
    else:
        loss = step(model)
    loss.backward()
    leaves = dict(model.named_parameters()) | (inputs or {})
    return Outcome(
        loss.detach().clone(),
        {n: None if p.grad is None else p.grad.clone() for n, p in leaves.items()},
        {n: b.clone() for n, b in model.named_buffers()},
        draws(),
        dropped,
    )


def same_bits(a: Any, b: Any) -> bool:
    """Equality of bits: NaN equals itself, 0.0 is not -0.0."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = lambda t: t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)  # noqa: E731
    return a.numel() == 0 or torch.equal(flat(a), flat(b))


def assert_same_tree(one: Any, other: Any) -> None:
    """Two nests of containers with the same leaves, tensors to the bit."""
    (a, shape), (b, other_shape) = tree_flatten_with_path(one), tree_flatten_with_path(other)
    assert str(shape) == str(other_shape)
    for (path, x), (_, y) in zip(a, b, strict=True):
        same = same_bits(x, y) if isinstance(x, torch.Tensor) else callable(x) or x == y
        assert same, path


def assert_exact(plain: Outcome, rebuilt: Outcome) -> None:
    assert same_bits(plain.loss, rebuilt.loss), "loss"
    assert plain.grads.keys() == rebuilt.grads.keys()
    for name, grad in plain.grads.items():
        assert same_bits(grad, rebuilt.grads[name]), f"gradient of {name}"
    for name, buffer in plain.buffers.items():
        assert same_bits(buffer, rebuilt.buffers[name]), f"buffer {name}"
    assert same_bits(plain.draw, rebuilt.draw), "state of the generator"
