"""`python -m benchmarks soak` with few steps: its draws, its faults, a comparison that finds a wrong bit, and the command."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.robustness import soak
from benchmarks.robustness.samples import EVERY, NAMES
from benchmarks.robustness.soaking.draws import AT_HEAD, LATE, PLACES, READS, RESTARTS, Step, draw
from benchmarks.robustness.soaking.loop import PARTS, Loop, ctrl_c
from benchmarks.robustness.soaking.measured import COMBINATIONS
from tests.cpu.lib.scripts import Interpreter

STEPS = 70


def test_the_draws_have_everything() -> None:
    """Each place to fail by an exception and by an interrupt, timers, accumulation, autocast, validations, checkpoints."""
    steps = [draw(0, number, early=False) for number in range(5000)]
    faults = Counter((s.fault.place, s.fault.interrupts) for s in steps if s.fault is not None)
    assert all(faults[place, how] > 5 for place in (*PLACES, *LATE) for how in (False, True)) and faults["timer", True] > 50
    assert {len(s.shapes) for s in steps} == {1, 2, 3} and {i for s in steps for i in s.shapes} == {0, 1, 2}
    assert {s.validates for s in steps} == {"", "after", "within"} and {s.resumes for s in steps} == {"", "file", "copy"}
    assert sum(s.fault is None for s in steps) > 0.7 * len(steps)
    sampled = Step(shapes=(0,), autocast=(False,))
    assert all(draw(seed, EVERY // 2 + i * EVERY, early=True) == sampled for seed in range(3) for i in range(9))


def test_a_head_is_read_and_fails_in_the_same_steps() -> None:
    steps = [(draw(0, number, early=False), draw(0, number, early=False, head=True)) for number in range(5000)]
    assert {s.reads for _, s in steps} == {"", *READS}
    assert {s.fault.place for _, s in steps if s.fault is not None} == {"timer", *PLACES, *LATE, *AT_HEAD.values()}
    for step, with_head in steps:
        assert replace(with_head, reads="", fault=step.fault) == step
        assert (with_head.fault is None) == (step.fault is None)


def test_half_a_step_is_restored() -> None:
    """Where parameters may have been updated in backward, what raises from there on is followed by the checkpoint."""
    steps = [draw(1, number, early=True) for number in range(5000)]
    faults = [s.fault for s in steps if s.fault is not None]
    assert not any(f.place in LATE for f in faults)
    assert all(f.restores for f in faults if f.place in ("backward", "gradient", "timer"))


@pytest.mark.parametrize("head", (False, True))
def test_a_fault_is_raised_and_the_loop_goes_on(tmp_path: Path, head: bool) -> None:
    loop = Loop(0, early=False, folder=tmp_path, head=head)
    outcomes = set()
    with ctrl_c():
        for number in range(100):
            step = draw(0, number, early=False, head=head)
            loop.step(number, step)
            assert loop.outcome == ("done" if step.fault is None else step.fault.place)
            assert all(p.grad is None for p in loop.model.parameters()) and loop.model.training
            outcomes.add(loop.outcome)
    assert {"done", "timer", "forward", "backward", *(AT_HEAD.values() if head else ())} <= outcomes


@pytest.mark.long
@pytest.mark.real_times
def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter) -> None:
    """Through a restart and faults: the same bits after every step, and steps that ran as planned."""
    assert RESTARTS[0] < STEPS
    interpreter.stands_in(monkeypatch)
    result = soak.soaked("early updates", 0, STEPS, tmp_path)
    assert result["different"] == 0, result["first"]
    assert result["hooks_left"] == 0 and result["growth"] == {}
    assert "recompute" in result["on"] and result["techniques"]["forwards"]["planned"] > STEPS / 2


@pytest.mark.long
@pytest.mark.real_times
def test_a_short_soak_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter) -> None:
    """Batches of several shapes, whose logits are read, and at which steps fail: the same bits, and most plans in tiles."""
    interpreter.stands_in(monkeypatch)
    result = soak.soaked("tiles", 0, STEPS, tmp_path)
    assert result["different"] == 0, result["first"]
    assert result["hooks_left"] == 0
    assert "tiles" in result["on"] and result["techniques"]["tiled"] > STEPS / 4


def test_a_wrong_bit_is_found(tmp_path: Path) -> None:
    """Which step, and which part."""
    line = json.dumps(["done", *PARTS])
    (tmp_path / "plain").write_text("\n".join([line] * 3))
    (tmp_path / "planned").write_text("\n".join([line, json.dumps(["done", "other", *PARTS[1:]]), line]))
    (said,) = soak.different(tmp_path / "plain", tmp_path / "planned", 0, early=False)
    assert said.startswith("step 1: losses; Step(")


def test_what_is_wrong_is_said() -> None:
    flat = {name: 0.0 for name in NAMES}
    good: dict[str, Any] = {
        "combination": "late updates", "different": 0, "first": [], "growth": flat, "hooks_left": 0,
        "on": ["recompute", "offload", "compress"], "techniques": {"forwards": {"planned": 90, "deviating": 10}},
    }  # fmt: skip
    assert soak.wrong(good) == []
    bad = copy.deepcopy(good) | {"different": 1, "first": ["step 3: losses"], "growth": flat | {"files": 2.0}}
    bad["on"] = ["recompute"]
    bad["techniques"]["forwards"] = {"planned": 10, "observing": 90}
    said = "; ".join(soak.wrong(bad))
    for words in ("1 steps differ, step 3: losses", "files grows", "offload was never on", "10 % of forwards as planned"):
        assert words in said


def test_the_digests_have_every_part(tmp_path: Path) -> None:
    """One bit of any part changes its digest, and no other."""
    loop = Loop(0, early=False, folder=tmp_path)
    for number in range(2):
        loop.step(number, Step(shapes=(0,), autocast=(False,)))
    state = loop.optimizer.state[loop.model.head.bias]
    changes = {
        "parameters": loop.model.head.bias.data, "buffers": loop.model.norm.running_mean, "optimizer": state["exp_avg"],
    }  # fmt: skip
    loop._digest()
    before = dict(zip(PARTS, loop.digests, strict=True))
    for part, value in changes.items():
        assert value is not None
        kept = value.clone()
        value.view(torch.int32)[0] ^= 1
        loop._digest()
        after = dict(zip(PARTS, loop.digests, strict=True))
        assert [name for name in PARTS if after[name] != before[name]] == [part]
        value.copy_(kept)
    torch.rand(1)
    loop._digest()
    after = dict(zip(PARTS, loop.digests, strict=True))
    assert [name for name in PARTS if after[name] != before[name]] == ["generator"]


def test_all_techniques_are_on_in_a_combination() -> None:
    proved = {technique for combination in COMBINATIONS.values() for technique in combination.proves}
    assert proved == {"recompute", "offload", "compress", "pool", "tiles", "optimizer_in_backward"}
