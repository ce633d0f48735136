"""The checker of races finds each kind of race, and each wait that is missing in a copy of the host tier."""

from __future__ import annotations

import sys

import pytest

from tests.emulated import device
from tests.emulated.missing import WAITS

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")

BEGIN = """
import torch
from tests.emulated import device
x, y, other = torch.zeros(1000, device="cuda"), torch.ones(1000, device="cuda"), torch.cuda.Stream()
h = torch.zeros(1000, pin_memory=True)
def ordered():
    other.wait_stream(torch.cuda.current_stream())
def back():
    torch.cuda.current_stream().wait_stream(other)
torch.cuda.synchronize()
"""
KINDS = {
    "read after write": "x.add_(1); ORDERED\nwith torch.cuda.stream(other): z = x + y",
    "write after write": "x.add_(1); ORDERED\nwith torch.cuda.stream(other): x.zero_()",
    "write after read": "z = x + y; ORDERED\nwith torch.cuda.stream(other): x.zero_()",
    "copy out after write": "x.add_(1); ORDERED\nwith torch.cuda.stream(other): h.copy_(x, non_blocking=True)",
    "write after copy in": "x.copy_(h, non_blocking=True); ORDERED\nwith torch.cuda.stream(other): x.zero_()",
    "two copies into pinned memory": """
h.copy_(x, non_blocking=True)
ORDERED
with torch.cuda.stream(other): h.copy_(y, non_blocking=True)
""",
    "memory that is used again": """
with torch.cuda.stream(other): z = torch.zeros(1000, device="cuda")
BACK
w = z + y  # another stream reads it, and the allocator was not told
ORDERED
with torch.cuda.stream(other):
    del z
    z = torch.ones(1000, device="cuda")
""",
}  # fmt: skip

TIER = """
import sys, torch
from lightning_memopt.runtime.tiers import HostTier
from tests.emulated import device
from tests.emulated.missing import missing
edge = missing(sys.argv[1])
planted = edge.__enter__()
tier = HostTier(1 << 16, torch.device("cuda", 0))
source = torch.zeros(4096, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
for round in range(3):
    source.fill_(round)
    one = tier.store(source, "a tensor")
    out = torch.full((4096,), 3, dtype=torch.uint8, device="cuda")
    read = out.clone()
    one.fetch(out)
    one.wait_stored()
    source.fill_(9)
    one.wait_fetched()
    found = out.clone()
    one.fetch(out)
    one.release()
    another = tier.store(torch.full((1 << 16,), 5, dtype=torch.uint8, device="cuda"), "in its place")
    another.release()
    torch.cuda.synchronize()
print(len(planted), device.races())
"""
STEP = """
import torch
from lightning_memopt.session import times
from tests.cpu.lib.times import Linked
from tests.emulated import device
from tests.emulated.missing import WAITS, missing
from tests.emulated.training import train
times.current = Linked(1e9)
for wait in ("none", *WAITS):
    before = device.races()
    with missing(wait) as planted:
        train("dropout, tied weights", "min", times=2, steps=5, offload="host", recompute=False, verify=False)
    torch.cuda.synchronize()
    print(len(planted), device.races() - before)
"""

FAILS = """
import torch
from lightning_memopt.errors import OffloadError
from lightning_memopt.runtime.tiers import DiskTier
from tests.emulated import device
nbytes = 24 << 20  # three pieces
tier = DiskTier(nbytes, None, torch.device("cuda", 0))
one = tier.store(torch.ones(nbytes, dtype=torch.uint8, device="cuda"), "a tensor")
one.wait_stored()
read = tier.file.read
def fails(into, offset):
    if offset:
        raise OSError(5, "no such block")
    read(into, offset)
tier.file.read = fails
out = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
at = out.data_ptr()
one.fetch(out)
try:
    one.wait_fetched()
except OffloadError:
    del out
again = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(int(again.data_ptr() == at), int(again.max().item() == 0), device.races())
"""


def _races(code: str, *arguments: str) -> list[int]:
    done = device.run([sys.executable, "-c", code, *arguments], EMULATED_RACES="1")
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_race_is_found_and_an_order_is_none(kind: str) -> None:
    code = BEGIN + KINDS[kind] + "\ntorch.cuda.synchronize()\nprint(device.races())"
    assert _races(code.replace("ORDERED", "ordered()").replace("BACK", "back()")) == [0]
    assert _races(code.replace("ORDERED", "").replace("BACK", "back()"))[0] > 0


def test_the_host_tier_is_ordered() -> None:
    assert _races(TIER, "nothing: at all") == [0, 0]


@pytest.mark.parametrize("edge", WAITS)
def test_a_missing_wait_of_the_host_tier_is_found(edge: str) -> None:
    planted, races = _races(TIER, edge)
    assert planted > 0
    assert races > 0


def test_a_missing_wait_is_found_in_a_planned_step() -> None:
    """But for two, which the others imply there: a fetch comes behind a fence, a new step behind the end of the last one."""
    numbers = _races(STEP)
    found = dict(zip(("none", *WAITS), zip(numbers[::2], numbers[1::2], strict=True), strict=True))
    assert found.pop("none") == (0, 0)
    assert all(planted > 0 for planted, _ in found.values())
    assert {wait for wait, (_, races) in found.items() if not races} == {WAITS[2], WAITS[5]}


def test_a_copy_back_from_a_disk_that_failed_writes_no_more() -> None:
    """Its target is free again: others have that memory."""
    assert _races(FAILS) == [1, 1, 0]
