"""Plans of these tests are chosen by times that are known beforehand, so none depends on how busy the machine is.

What tests real times is marked `real_times`, a test or a whole module. A module whose budgets leave no room for what the
process holds from other tests is marked `profiled`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lightning_memopt.native import counter
from lightning_memopt.session import times
from tests.cpu.loops import without_counter
from tests.cpu.times import Known, given

LEFT_NBYTES = 200_000
"""Small beside every budget of a module that does not ask what is held."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_times: plans are chosen by what things take on this machine: that is tested")
    config.addinivalue_line("markers", "profiled: torch's profiler measures, which sees the bytes of a run alone")


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module leaves in memory counts in the budgets of all that come after it.

    Every session begins with a collection: it need not look through what the modules before have imported.
    """
    gc.collect()
    gc.freeze()
    before = counter()
    before_nbytes = before.live_nbytes if before is not None else 0
    yield
    gc.collect()
    after = counter()
    if before is not None and after is not None and not request.session.testsfailed:  # a failure holds what its test held
        left_nbytes = after.live_nbytes - before_nbytes
        assert left_nbytes < LEFT_NBYTES, f"{left_nbytes} bytes of tensors are left"


@pytest.fixture(autouse=True, scope="module")
def known_times(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("real_times") is None:
            given(patch, Known())
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
