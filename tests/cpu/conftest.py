"""Plans of these tests are chosen by times that are known beforehand, so none depends on how busy the machine is. They are
those of a made-up machine (tests/cpu/lib/machines.py); a test that needs a certain plan injects times of its own.

What tests real times is marked `real_times`, a test or a whole module. A module whose budgets leave no room for what the
process holds from other tests is marked `profiled`. What starts groups of processes, or trains larger models, is marked `long`:
`make test` leaves it out, `make test-all` runs everything. What cannot hold where backward has a thread of its own is marked
`calling_thread(reason)`: `--device-thread` skips it.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from lightning_memopt.native import counter
from lightning_memopt.native.counting import install as install_counter
from lightning_memopt.runtime import install_native
from lightning_memopt.session import times
from tests.cpu.lib.device_thread import backward_in_its_own_thread
from tests.cpu.lib.loops import without_counter
from tests.cpu.lib.said import Said, listening
from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.times import OfMachine, given

os.environ["MEMOPT_CACHE"] = "0"  # no test begins with the plans of another one
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
torch.set_num_threads(1)  # more only wait for each other on tensors this small
for kind in (torch.cuda, torch.xpu, torch.mtia):
    if not kind.is_available():  # torch.manual_seed formats the stack, to seed this kind later: milliseconds each time
        kind.manual_seed_all = lambda seed: None

# Sessions install both. Tests without a session have them too, whatever ran before.
install_native(print)
install_counter(print)

FIRST = "public", "ranks", "compiled", "sharded", "accelerate", "benchmarks"
"""The files of these folders take longest. They come first, so that workers do not wait for one another at the end."""
LEFT_NBYTES = 200_000
"""Small beside every budget of a module that does not ask what is held."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_times: plans are chosen by what things take on this machine: that is tested")
    config.addinivalue_line("markers", "long: starts groups of processes or trains larger models; `make test` leaves it out")
    config.addinivalue_line("markers", "profiled: torch's profiler measures, which sees the bytes of a run alone")
    config.addinivalue_line("markers", "calling_thread(reason): cannot hold where backward has a thread of its own, as on CUDA")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (*FIRST, item.path.parent.name).index(item.path.parent.name))
    for item in items if config.getoption("device_thread") else ():
        if (marker := item.get_closest_marker("calling_thread")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"backward has a thread of its own: {marker.args[0]}"))


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs scripts as users start them, with imports that are made once."""
    with contextlib.closing(Interpreter()) as interpreter:
        yield interpreter


@pytest.fixture(scope="session")
def package_interpreter() -> Iterator[Interpreter]:
    """Another one, for modules of ours: it has imported the package, too, which scripts of users import themselves."""
    with contextlib.closing(Interpreter()) as interpreter:
        yield interpreter


@pytest.fixture(autouse=True, scope="session")
def device_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    with backward_in_its_own_thread() if request.config.getoption("device_thread") else contextlib.nullcontext():
        yield


class Before(NamedTuple):
    """The module that ran before, and what was in memory when it began."""

    name: str
    nbytes: int


before: list[Before] = []


@pytest.fixture
def said() -> Iterator[Said]:
    """What runs say while a test runs."""
    with listening() as lines:
        yield lines


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left(request: pytest.FixtureRequest) -> None:
    """What the module before has left in memory would count in the budgets of this one.

    Every session begins with a collection: it need not look through what the modules before have imported.
    """
    gc.collect()
    gc.freeze()
    counts = counter()
    if counts is None:
        return
    now_nbytes, last = counts.live_nbytes, before.pop() if before else None
    before.append(Before(request.node.name, now_nbytes))
    if last is not None and not request.session.testsfailed:  # a failure holds what its test held
        assert now_nbytes - last.nbytes < LEFT_NBYTES, f"{last.name} leaves {now_nbytes - last.nbytes} bytes of tensors"


@pytest.fixture(autouse=True, scope="module")
def known_times(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("real_times") is None:
            given(patch, OfMachine())
        yield


@pytest.fixture(autouse=True)
def times_of_a_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("real_times") is not None:
        given(monkeypatch, times.Times())


@pytest.fixture(autouse=True, scope="module")
def meter_of_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("profiled") is not None:
            without_counter(patch)
        yield


@pytest.fixture
def deterministic() -> Iterator[None]:
    """For `pytestmark = pytest.mark.usefixtures("deterministic")`."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
