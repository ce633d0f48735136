"""The made-up machines of tests/cpu/lib/machines.py: what ops take, and that the processes of tests are on the same machine."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from build import Step

from lightning_memopt.graph import Graph
from tests.cpu.lib.machines import MACHINES, OP_SECONDS, STANDARD, enter, known, machine

ROOT = Path(__file__).parents[2]


def step() -> Graph:
    """Four ops: two alike, one that reads more, and one with a bfloat16 result."""
    made = Step()
    x, wide = made.given(nbytes=1000), made.given(nbytes=5000)
    made.op(x, name="sin")
    made.op(x, name="sin")
    made.op(wide, name="sin")
    (cast,) = made.op(x, name="cast")
    graph = made.build()
    tensors = tuple(replace(t, dtype="bfloat16" if t.id == cast else "float32") for t in graph.tensors)
    return replace(graph, tensors=tensors)


def seconds(name: str) -> list[float]:
    graph = step()
    return [MACHINES[name].seconds(graph, op) for op in graph.forward]


def test_what_ops_take() -> None:
    graph = step()
    times = [known(graph, op) for op in graph.forward]
    assert times[0] == times[1] < times[2]
    assert seconds("bfloat16") == [*times[:3], 10 * times[3]]
    assert seconds("launches") == pytest.approx([t + 9 * OP_SECONDS for t in times])
    assert len(set(seconds("equal"))) == 1
    for name in ("standard", "avx512", "avx2"):
        assert seconds(name) == times


def test_random_times_are_the_same_in_every_process() -> None:
    """Alike ops take the same time, and two seeds are two machines."""
    code = "from test_machines import seconds; print(*seconds('random-1'))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env={"PYTHONPATH": f"{ROOT}:."}, check=True, capture_output=True, text=True)  # fmt: skip # noqa: E501
    assert list(map(float, ended.stdout.split())) == seconds("random-1")
    first, second = seconds("random-1"), seconds("random-2")
    assert first[0] == first[1] and len(set(first)) == 3
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_processes_are_on_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MEMOPT_TESTS_MACHINE", *MACHINES["avx2"].environment):
        monkeypatch.setenv(variable, "")  # put back at the end
        monkeypatch.delenv(variable)
    assert machine() is MACHINES[STANDARD]
    enter("avx2")
    code = "import os, tests.cpu.lib.machines as m; print(m.machine() == m.MACHINES['avx2'], os.environ['ONEDNN_MAX_CPU_ISA'])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert ended.stdout.split() == ["True", "AVX2"]


def test_ci_runs_on_one_of_them() -> None:
    name = re.search(r"make test-all MACHINE=(\S+)", (ROOT / ".ci" / "run").read_text())[1]  # type: ignore[index]
    assert name != STANDARD and MACHINES[name].seconds is not known and MACHINES[name].environment
