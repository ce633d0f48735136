"""Methods to save memory in a training step, each as a context around steps.

Input: a subject. A method opens on it and gives an `Applied`: a context for a step with the method, and one for a step without,
so that both kinds of steps alternate on one model. A method that cannot be applied raises UnsupportedError with the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_memopt.bench.streamed import StreamedOffload
from lightning_memopt.bench.subject import Subject
from lightning_memopt.device.places import on_host
from lightning_memopt.errors import UnsupportedError

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Applied:
    """A method that is open on a subject.

    Args:
        with_it: a context for steps with the method.
        without: a context for steps without it.
        facts: returns what the method reports for its row; called after its steps.
        extra_flops: FLOPs that it runs in addition to those of a step; None: they are counted.
        note: what a reader of the row must know.
    """

    with_it: Context = contextlib.nullcontext
    without: Context = contextlib.nullcontext
    facts: Callable[[], dict[str, Any]] = dict
    extra_flops: Callable[[], float] | None = None
    note: str = ""


Opening = Callable[[Subject], contextlib.AbstractContextManager[Applied]]


@contextlib.contextmanager
def checkpointed(blocks: Iterable[nn.Module], **options: Any) -> Iterator[None]:
    """Every block under `torch.utils.checkpoint.checkpoint(use_reentrant=False, **options)`."""
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.callback(_put_back, block, vars(block).get("forward"))
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
        yield


def _put_back(block: nn.Module, forward: Any) -> None:
    if forward is None:
        del block.forward
    else:
        block.forward = forward


def blocks_of(subject: Subject) -> list[nn.Module]:
    """The blocks of the subject. Raises UnsupportedError if there are none."""
    if blocks := subject.blocks():
        return blocks
    raise UnsupportedError(
        "the model has no list with several blocks of the same class, so there is nothing to wrap. Give Training(blocks=...)"
    )


@contextlib.contextmanager
def eagerly(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, run the modules eagerly, although they are compiled in place."""
    code: list[tuple[Any, Any]] = [(module, vars(module).get("_compiled_call_impl")) for module in modules]
    for module, _ in code:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, compiled in code:
            module._compiled_call_impl = compiled


@contextlib.contextmanager
def per_block(subject: Subject) -> Iterator[Applied]:
    blocks = blocks_of(subject)
    yield Applied(lambda: checkpointed(blocks), note=f"{len(blocks)} blocks")


_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _keeps_heavy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def selective(subject: Subject) -> Iterator[Applied]:
    """Selective activation checkpointing: in every block, results of matrix products, convolutions and attention are kept."""
    blocks = blocks_of(subject)
    contexts = partial(create_selective_checkpoint_contexts, _keeps_heavy)
    yield Applied(lambda: checkpointed(blocks, context_fn=contexts), note="matrix products, convolutions, attention kept")


@contextlib.contextmanager
def by_transformers(subject: Subject) -> Iterator[Applied]:
    """`model.gradient_checkpointing_enable()` of transformers."""
    model: Any = subject.model
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise UnsupportedError(
            "the model is not one of transformers: it has no gradient_checkpointing_enable(). Give one that has."
        )

    @contextlib.contextmanager
    def enabled() -> Iterator[None]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()

    try:
        with enabled():
            pass
    except ValueError as error:  # "... does not support gradient checkpointing."
        raise UnsupportedError(str(error)) from None
    yield Applied(enabled)


def needs_a_host(subject: Subject) -> None:
    """Raise UnsupportedError if the memory that is measured is the host's."""
    if on_host(subject.device):
        raise UnsupportedError(
            "it copies from a CUDA device to the host, but here the host is measured. Run with --device cuda."
        )


@contextlib.contextmanager
def save_on_cpu(subject: Subject) -> Iterator[Applied]:
    on_gpu = not on_host(subject.device)
    note = "" if on_gpu else "the host's memory is the memory that is measured here"
    yield Applied(lambda: torch.autograd.graph.save_on_cpu(pin_memory=on_gpu), note=note)


@contextlib.contextmanager
def streamed_offload(subject: Subject) -> Iterator[Applied]:
    """Offload as torchtune does it, reimplemented in a few lines."""
    needs_a_host(subject)
    yield Applied(lambda: StreamedOffload(subject.device), note="our few lines after torchtune's OffloadActivations")
