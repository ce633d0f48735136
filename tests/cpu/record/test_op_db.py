"""Exactness over torch's own table of operators: every sample, plain and with everything droppable dropped.

`python -m tests.cpu.record.test_op_db` prints the table of docs/not_rebuilt.md.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_memopt.record import rule_of
from tests.cpu.lib.sweeps import Count, assert_none_differs, met, run, sweep, total, verdict

from torch.testing._internal.common_methods_invocations import op_db  # isort: skip  # after the stub for expecttest

SAMPLES = {torch.float32: 3, torch.complex64: 2}
"""How many samples of an operator are run; of what networks are made of, more."""
SAMPLES_OF_FUNCTIONAL = 8
# Cells that no kernel writes: two plain runs agree only where the allocator hands out the same bytes twice.
UNINITIALISED = {
    "empty": "returns memory as it is",
    "empty_like": "returns memory as it is",
    "empty_permuted": "returns memory as it is",
    "empty_strided": "returns memory as it is",
    "new_empty": "returns memory as it is",
    "new_empty_strided": "returns memory as it is",
    "linalg.lstsq": "returns cells that LAPACK does not write",
}


def calls(op: Any, sample: Any) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    inputs = (sample.input, sample.args, sample.kwargs)
    process = sample.output_process_fn_grad

    def out_of_place(x: Any, args: Any, kwargs: Any) -> Any:
        return process(op(x, *args, **kwargs))

    yield "", out_of_place, inputs
    inplace = op.get_inplace()
    if inplace is not None and isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input:

        def in_place(x: Any, args: Any, kwargs: Any) -> Any:
            inplace(x, *args, **kwargs)
            return x

        yield "_", in_place, inputs


def _chunk(op: Any) -> str:
    head, dot, tail = op.name.rpartition(".")
    if head == "nn.functional":
        return f"nn.functional.{'a-h' if tail[0] <= 'h' else 'i-m' if tail[0] <= 'm' else 'n-z'}"
    return head if dot else op.name[0].lower().strip("_") or "_"


CHUNKS = sorted({_chunk(op) for op in op_db})


@functools.cache
def swept(chunk: str) -> Count:
    """Verdicts over the ops of one chunk."""
    return sweep((op for op in op_db if _chunk(op) == chunk), sweep_op)


def sweep_op(op: Any, count: Count, device: str = "cpu", wanted: dict[torch.dtype, int] | None = None) -> None:
    """Verdicts over the samples of an operator; `wanted`: how many of each type, `SAMPLES` where it is None."""
    name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
    if op.name in UNINITIALISED:
        count.skipped[name] = UNINITIALISED[op.name]
        return
    if not op.supports_autograd:
        count.skipped[name] = "no autograd"
        return
    best = Count()
    for dtype, samples in (wanted or SAMPLES).items():
        if dtype not in op.supported_dtypes(device) or dtype not in op.supported_backward_dtypes(device):
            continue
        if wanted is None and op.name.startswith("nn.functional."):
            samples = SAMPLES_OF_FUNCTIONAL
        torch.manual_seed(3)
        for i, sample in enumerate(op.sample_inputs_func(op, device, dtype, True)):  # without torch's stack traces
            if i == samples:
                break
            for suffix, call, inputs in calls(op, sample):
                label = f"{name}{suffix} [{str(dtype)[6:]} #{i}]"
                verdict(lambda drop, c=call, x=inputs: run(c, x, drop=drop, where=name), label, best)  # type: ignore[misc]
    if best.different:
        count.different |= best.different
    elif best.dropped:
        count.dropped.append(name)
    elif best.nothing:
        count.nothing.append(name)
    else:
        count.skipped[name] = next(iter(best.skipped.values()), "none of the types")


@pytest.mark.parametrize("chunk", CHUNKS)
def test_p1_no_operator_differs(chunk: str) -> None:
    assert_none_differs(swept(chunk))


def test_enough_was_dropped() -> None:
    found = total(swept(chunk) for chunk in CHUNKS)
    print(
        f"equal with something dropped {len(found.dropped)}, nothing droppable {len(found.nothing)}, "
        f"not comparable {len(found.skipped)} of {len(op_db)}"
    )
    assert len(found.dropped) + len(found.nothing) + len(found.skipped) + len(found.different) >= len(op_db) - 5
    assert len(found.dropped) >= 300
    unstable = sorted(name for name, why in found.skipped.items() if why.startswith(("broken", "not the same")))
    assert len(unstable) <= 10, unstable


def opaque_table() -> str:
    """The operators met in the sweeps that are never rebuilt, as the table of docs/not_rebuilt.md."""
    for chunk in CHUNKS:
        swept(chunk)
    why: dict[str, set[str]] = collections.defaultdict(set)
    for func in met:
        rule = rule_of(func)
        if rule.handling == "opaque":
            why[rule.why].add(func._schema.name.partition("::")[2])
    rows = [f"| {reason} | {', '.join(f'`{name}`' for name in sorted(names))} |" for reason, names in sorted(why.items())]
    return "\n".join(["| Why | Operators |", "|---|---|", *rows])


if __name__ == "__main__":
    from tests.cpu.record import test_module_db

    for group in test_module_db.GROUPS:
        test_module_db.swept(group)
    print(opaque_table())
