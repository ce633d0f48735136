"""Whether the step that `memopt fit` records on the CPU, for a card, is the step that runs on a card: op by op.

Usage: python -m tests.emulated.recorded [MODEL ...]

The step that runs is observed on the emulated device in bytes mode, with the operators of torch's CUDA build. Compared are each
op with its inputs, results, FLOPs and module, each tensor with its bytes, birth and end, each saved tensor, and the peak.
Not compared are the workspaces of kernels, the temporaries of the update, which a recorded step has as a workspace, and what
else is in the process (cuBLAS's workspace).
"""

from __future__ import annotations

from functools import partial

from benchmarks.lib.graphs import computed, different, peak_nbytes
from lightning_memopt.fitting.recording import record
from lightning_memopt.graph import OUTSIDE, UNRECORDED
from tests.emulated.fitted import CARD_NBYTES, benchmark, leave_masks_out, on_card, training
from tests.emulated.real_size import each_alone
from tests.emulated.reserved import BENCHMARKS

LEFT_OUT = (OUTSIDE, UNRECORDED, "in update")
HEADER = "| model | ops | peak, bytes | peak on the device | first difference |\n|---|---|---|---|---|"


def compare(name: str) -> tuple[int, int, int, str]:
    """Number of ops, peak of the recorded step, peak of the one that ran, and the first difference; "" if there is none."""
    leave_masks_out()
    build = partial(benchmark, name)
    ours = record(partial(training, build, "foreach"), cuda=True).graph
    theirs = computed(partial(on_card, build, "foreach"))
    said = different(ours, theirs, LEFT_OUT)
    return len(theirs.ops), peak_nbytes(ours), peak_nbytes(theirs), said


def measure(name: str) -> None:
    """Print the row of one model."""
    ops, recorded, ran, said = compare(name)
    print(f"| {name} | {ops} | {recorded} | {ran} | {said or 'none'} |", flush=True)


def main() -> None:
    each_alone(__doc__, __spec__.name, dict.fromkeys(BENCHMARKS, CARD_NBYTES), measure, HEADER)


if __name__ == "__main__":
    main()
