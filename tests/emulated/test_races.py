"""The checker of races finds each kind of race, and each wait that is missing in a copy of the host tier."""

from __future__ import annotations

import sys

import pytest

from tests.emulated import device

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
import linecache, sys, torch
from lightning_memopt.runtime.tiers import HostTier
from tests.emulated import device
edge, planted = sys.argv[1], 0
wait = torch.cuda.Stream.wait_event
def missing(stream, event):
    global planted
    caller = sys._getframe(1)
    line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
    if (caller.f_code.co_name, line) == tuple(edge.split(": ", 1)):
        planted += 1
    else:
        wait(stream, event)
torch.cuda.Stream.wait_event = missing
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
print(planted, device.races())
"""
EDGES = [
    "__init__: tier.out.wait_event(produced)  # T1",
    "wait_stored: self._current().wait_event(self.done)",
    "fetch: tier.back.wait_event(self.done)  # T3",
    "fetch: tier.back.wait_event(free)  # T3",
    "wait_fetched: self._current().wait_event(self.fetched)",
    "_reclaim: self.out.wait_event(parked.fetched)",
]


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


@pytest.mark.parametrize("edge", EDGES)
def test_a_missing_wait_of_the_host_tier_is_found(edge: str) -> None:
    planted, races = _races(TIER, edge)
    assert planted > 0
    assert races > 0
