"""`memopt fit` with plans that offload and that update parameters in backward: what it says, and a real run that keeps it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_memopt
from lightning_memopt import optimize
from lightning_memopt.bench.subject import Training
from lightning_memopt.cli import main
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.fitting.allowed import config_of
from lightning_memopt.fitting.answer import Fit, answered
from lightning_memopt.fitting.cards import Card, cards_of, of_the_host
from lightning_memopt.fitting.found import EARLY, OFFLOAD, RECOMPUTE
from lightning_memopt.fitting.options import Options
from lightning_memopt.fitting.recording import marked, record
from lightning_memopt.fitting.sources import of_training, source_of
from lightning_memopt.fitting.techniques import check
from lightning_memopt.graph import unmodified_levels
from lightning_memopt.integrations.plain import Run
from lightning_memopt.plan import updated
from lightning_memopt.plan.rates import Link
from lightning_memopt.session.parked_states import StatesAtRest
from lightning_memopt.trace.in_place import held_by_autograd_alone
from lightning_memopt.units import format_nbytes
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.loops import counted_nbytes, leaves_nothing
from tests.cpu.lib.training_script import training_script
from tests.cpu.lib.trainings import training_of

STEPS = 5
Build = Callable[[], Training]


class Sorted(nn.Module):
    """Sorting never runs again, so its results can only be offloaded."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values.tanh()


def chain(layer: Callable[[], nn.Module], optimizer: type[torch.optim.Optimizer], batch: int, width: int) -> Build:
    def build() -> Training:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), layer()) for _ in range(6)]
        model = nn.Sequential(*layers, nn.Linear(width, 1))
        steps = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        x = torch.randn(batch, width)
        return training_of(model, steps, lambda: model(x).square().mean())

    return build


SORTED = chain(Sorted, torch.optim.SGD, 512, 128)
DEEP = chain(nn.Tanh, torch.optim.Adam, 128, 256)


@cache
def asked(build: Build, nbytes: int, offload: str = "none", early: str = "never", disk: int | None = None) -> Fit:
    source = of_training("a chain", lambda _: build(), None, "cpu")
    config = config_of(offload, early, budgets={"disk": disk})
    return answered(source, of_the_host(cards_of([str(nbytes)])), config=config)


def trained(build: Build, **options: Any) -> tuple[list[Tensor], Run | None]:
    """What a few steps leave, in a run with options. Its backwards are marked."""
    training, run = build(), None
    if options:
        optimizer: Any = training.optimizer
        with leaves_nothing(training.model), optimize(training.model, optimizer, verbose=False, **options) as run, marked(run):
            for _ in range(STEPS):
                training.step()
    else:
        for _ in range(STEPS):
            training.step()
    return [p.detach().clone() for p in training.model.parameters()], run


def assert_keeps(build: Build, nbytes: int, **options: Any) -> Run:
    """A run within so many bytes, beside what the process holds, keeps its budget, with the bits of the plain run."""
    expected, _ = trained(build)
    gc.collect()
    with pytest.raises(InfeasibleError):
        trained(build, budget=nbytes + counted_nbytes())
    gc.collect()  # what the error's frames held
    budget = nbytes + counted_nbytes()
    found, run = trained(build, budget=budget, **options)
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    assert run is not None
    status = run.status()
    assert status.phase == "planned" and not status.deviates and not status.replans
    assert status.measured_peak_nbytes is not None and status.measured_peak_nbytes <= budget
    return run


def smallest(build: Build) -> int:
    return asked(build, 1 << 40).smallest_nbytes


def test_offload_makes_a_step_fit_that_no_recomputation_does() -> None:
    nbytes = int(0.8 * smallest(SORTED))
    (without,) = asked(SORTED, nbytes).cards
    assert without.verdict == "no"
    (other,) = without.others
    assert (other.offload, other.optimizer_in_backward, other.missing_nbytes) == ("disk", "never", 0)
    answer = asked(SORTED, nbytes, offload="disk")
    (on,) = answer.cards
    assert on.verdict == "plan" and OFFLOAD in on.techniques and not on.others and on.peak_nbytes <= nbytes
    assert 0 <= on.tier_nbytes - on.offloaded_nbytes < 64 * 4096, "each of a few tensors takes whole pieces"
    assert on.tier_nbytes > 0 and on.slowdown > 1 and answer.smallest_nbytes <= nbytes
    run = assert_keeps(SORTED, nbytes, offload="disk")
    assert run.plan is not None and run.plan.parks


def test_a_budget_of_the_disk_limits_what_is_parked() -> None:
    """What a run takes there is said; with less than that, the smallest plan is larger, and a run keeps it."""
    nbytes = int(0.8 * smallest(SORTED))
    (free,) = asked(SORTED, nbytes, offload="disk").cards
    assert f"a run takes {format_nbytes(free.tier_nbytes)} beside the device" in asked(SORTED, nbytes, offload="disk").table()
    (on,) = asked(SORTED, nbytes, offload="disk", disk=free.tier_nbytes).cards
    assert on.verdict == "plan" and on.tier_nbytes <= free.tier_nbytes
    tight = asked(SORTED, nbytes, offload="disk", disk=free.tier_nbytes // 4)
    (off,) = tight.cards
    assert off.tier_nbytes <= free.tier_nbytes // 4 and (off.verdict == "no" or off.slowdown > on.slowdown)
    assert tight.smallest_nbytes > asked(SORTED, nbytes, offload="disk").smallest_nbytes
    run = assert_keeps(SORTED, nbytes, offload="disk", disk_budget=free.tier_nbytes)
    assert run.plan is not None and 0 < run.plan.in_tiers["disk"] <= free.tier_nbytes


def test_early_updates_make_a_step_fit_that_no_recomputation_does() -> None:
    nbytes = int(0.9 * smallest(DEEP))
    (without,) = asked(DEEP, nbytes).cards
    assert without.verdict == "no" and [o.missing_nbytes for o in without.others] == [0]
    (on,) = asked(DEEP, nbytes, early="auto").cards
    assert on.verdict == "plan" and EARLY in on.techniques and on.early_updates > 0 and on.peak_nbytes <= nbytes
    run = assert_keeps(DEEP, nbytes, optimizer_in_backward="auto")
    assert run.plan is not None and run.plan.updates
    (must,) = asked(DEEP, 1 << 40, early="always").cards
    assert must.techniques == (EARLY,) and must.early_updates == 14


def test_both_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is enough alone where gradients cannot be parked: the least of each is above the card."""
    monkeypatch.setattr(StatesAtRest, "_parameters", lambda self: iter(()))
    build = chain(Sorted, torch.optim.Adam, 128, 512)
    alone = asked(build, 1000, offload="disk").smallest_nbytes, asked(build, 1000, early="auto").smallest_nbytes
    nbytes = (min(alone) + asked(build, 1000, "disk", "auto").smallest_nbytes) // 2
    (without,) = asked(build, nbytes).cards
    assert [(o.offload, o.optimizer_in_backward, o.missing_nbytes) for o in without.others] == [("disk", "auto", 0)]
    (on,) = asked(build, nbytes, "disk", "auto").cards
    assert on.verdict == "plan" and {OFFLOAD, EARLY} <= set(on.techniques)
    run = assert_keeps(build, nbytes, offload="disk", optimizer_in_backward="auto")
    assert run.plan is not None and run.plan.parks and run.plan.updates


def test_what_more_would_miss() -> None:
    (on,) = asked(SORTED, 100_000).cards
    (other,) = on.others
    assert other.slowdown is None and 0 < other.missing_nbytes < on.missing_nbytes
    assert other.text.startswith("with offload='disk'") and other.text.endswith("would be missing")


def test_the_table_and_json() -> None:
    answer = asked(SORTED, int(0.8 * smallest(SORTED)), offload="disk")
    assert "fits by a plan:" in answer.table()
    assert f"│ offload {format_nbytes(answer.cards[0].offloaded_nbytes)} " in answer.table()
    assert max(map(len, answer.table().splitlines()[2:-2])) <= 140
    (on,) = json.loads(json.dumps(answer.to_json()))["cards"]
    assert on["techniques"] == ["offload"] and on["offloaded_nbytes"] == answer.cards[0].offloaded_nbytes
    (without,) = json.loads(json.dumps(asked(SORTED, answer.cards[0].usable_nbytes).to_json()))["cards"]
    assert without["others"][0]["offload"] == "disk" and without["others"][0]["missing_nbytes"] == 0


def test_the_verdict_has_its_techniques_in_lines_that_fit() -> None:
    answer = asked(DEEP, 1 << 40)
    (on,) = answer.cards
    plan = replace(on, verdict="plan", techniques=(RECOMPUTE, OFFLOAD, EARLY), offloaded_nbytes=3 << 30)
    text = replace(answer, cards=(plan,)).table()
    assert [line in text for line in ("fits by a plan: recompute,", "offload 3.00 GiB,", "early updates ")] == [True] * 3


def test_a_slower_link_makes_a_slower_step() -> None:
    def card(name: str, rate: float) -> Card:
        (known,) = of_the_host(cards_of([str(nbytes)]))
        assert known.rates is not None
        link = Link(out_bytes_per_second=rate, in_bytes_per_second=rate)
        return replace(known, name=name, rates=replace(known.rates, links={"disk": link}))

    nbytes = int(0.8 * smallest(SORTED))
    source = of_training("a chain", lambda _: SORTED(), None, "cpu")
    config = config_of("disk")
    fast, slow = answered(source, [card("fast", 1e12), card("slow", 1e9)], config=config).cards
    assert fast.verdict == slow.verdict == "plan" and 1 <= fast.slowdown < slow.slowdown


def test_the_usual_step_of_one_with_early_updates_is_the_one_without() -> None:
    for cuda in (False, True):
        plain, early = record(DEEP, cuda).graph, record(DEEP, cuda, early=True).graph
        assert not plain.updates and len(early.updates) == 14
        usual = max(unmodified_levels(updated(early, ())))
        assert abs(usual / max(unmodified_levels(plain)) - 1) < 0.02


def test_backwards_of_the_package_itself_are_not_marked() -> None:
    """One runs when the first forward of a process is observed."""
    held_by_autograd_alone.cache_clear()
    assert len(record(DEEP, early=True).graph.updates) == 14


# -- where they are not possible -----------------------------------------------------------------


def clipped() -> Training:
    training = DEEP()
    model, optimizer = training.model, training.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    x = torch.randn(128, 256)

    def step() -> None:
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return replace(training, step=step)


def accumulating() -> Training:
    training = DEEP()
    model, optimizer = training.model, training.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    x = torch.randn(128, 256)

    def step() -> None:
        for _ in range(2):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return replace(training, step=step)


@pytest.mark.parametrize("build", [clipped, accumulating])
def test_a_step_that_does_not_allow_early_updates(build: Build) -> None:
    answer = asked(build, 1000, early="auto")
    assert answer.cards[0].verdict == "no" and not answer.cards[0].early_updates
    assert "No parameter is updated in backward: " in answer.table() and answer.to_json()["as_usual"]
    with pytest.raises(ConfigError, match="optimizer_in_backward='always' would be wrong"):
        asked(build, 1000, early="always")


def test_a_plan_that_does_more_than_recompute_is_not_written(tmp_path: Path) -> None:
    answer = asked(SORTED, int(0.8 * smallest(SORTED)), offload="disk")
    with pytest.raises(ConfigError, match="uses offload, and only plans that recompute are written"):
        answer.save_plan(str(tmp_path / "plan.json"))
    assert not list(tmp_path.iterdir())


def test_what_is_refused_before_anything_is_recorded() -> None:
    for options, words in (
        ({"offload": "tape"}, "offload is 'tape'"),
        ({"optimizer_in_backward": "perhaps"}, "optimizer_in_backward is 'perhaps'"),
        ({"offload": "host", "device": "cpu"}, "on the CPU, use 'disk'"),
        ({"offload": "host", "host_budget": "50%"}, "a share of a machine that need not be this one"),
        ({"host_budget": "1GiB"}, "Set offload='host', or leave host_budget out"),
        ({"offload": "host", "ranks": [2]}, "a model that FSDP2 shards parks nothing. Leave ranks"),
        ({"optimizer_in_backward": "auto", "ranks": [1, 2]}, "early updates are asked about on one card only"),
    ):
        with pytest.raises(ConfigError, match=words):
            lightning_memopt.fit("nowhere.to.be:found", **options)  # type: ignore[arg-type]
    (card,) = cards_of(["24GiB"])
    with pytest.raises(ConfigError, match="the rates of 24GiB have no link to the tier 'host'"):
        check(config_of("host"), "cuda", [replace(card, rates=None)])


SCRIPT = training_script("nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))", 32)


def test_the_command_and_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "mine_that_updates.py"
    script.write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = source_of(["python", str(script)], Options(device="cpu"), ("", 0))
    assert source.early is not None and len(source.early(1, 1).graph.updates) == 8
    words = ["fit", "--device", "cpu", "--json", "--card", "1GiB", "--optimizer-in-backward", "always", "--offload", "disk"]
    for named in ["mine_that_updates:build"], ["--", "python", str(script)]:
        assert main([*words, *named]) == 0
        (on,) = json.loads(capsys.readouterr().out)["cards"]
        assert on["techniques"] == [EARLY] and on["early_updates"] == 8
