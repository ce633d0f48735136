"""The plan of `memopt fit`: as a file, and in runs of every front that take it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.bench import zoo
from lightning_memopt.bench.subject import Training
from lightning_memopt.cli import main
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import ConfigError, InfeasibleError, PlanMismatchError
from lightning_memopt.fitting.answer import answered
from lightning_memopt.fitting.cards import cards_of, of_the_host
from lightning_memopt.fitting.options import Options
from lightning_memopt.fitting.recording import Recorded, record
from lightning_memopt.fitting.sources import Source, of_training, source_of
from lightning_memopt.graph import COMPILED, unmodified_levels
from lightning_memopt.integrations.plain import Run
from lightning_memopt.plan import Plan, read_plan, write_plan
from lightning_memopt.session.given_plan import read_given
from lightning_memopt.session.solve.foreseen import Foreseen
from lightning_memopt.solvers import planner
from tests.cpu.lib.harness import assert_same_tree, same_bits
from tests.cpu.lib.loops import counted_nbytes, leaves_nothing
from tests.cpu.lib.said import Said
from tests.cpu.lib.training_script import training_script
from tests.cpu.lib.trainings import training_of

STEPS = 5
Build = Callable[..., Training]


def of_zoo(name: str, **sizes: int) -> Build:
    """A seeded training of a model of the zoo."""

    def build(**others: int) -> Training:
        torch.manual_seed(0)
        return zoo.training(zoo.MODELS[name](**(sizes | others)), torch.device("cpu"))

    return build


def with_adapters(**sizes: int) -> Training:
    """A Llama of which only adapters are trained."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, batch, _ = zoo.llama(**({"layers": 3, "batch": 4, "length": 64} | sizes))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return training_of(model, optimizer, lambda: model(**batch).loss)


BUILDS: dict[str, Build] = {
    "gpt2": of_zoo("gpt2", layers=3, batch=4, length=64),
    "resnet": of_zoo("resnet50", batch=4),
    "llama with adapters": with_adapters,
}
WORKSPACES = {"resnet": 1 << 20}
"""What kernels of the CPU may take beside the recorded step, in bytes."""


def fitted(record: Callable[[], Recorded], path: Path) -> Plan:
    """The plan for a card of the CPU's operators, halfway between the smallest plan and the unmodified step, in a file."""
    recorded = record()
    nbytes = (max(unmodified_levels(recorded.graph)) + planner.smallest_nbytes(recorded.graph)) // 2
    source = Source("a step", lambda *_: recorded, device="cpu")
    answered(source, of_the_host(cards_of([str(nbytes)]))).save_plan(str(path))
    return read_plan(path)[0]


def of(build: Build) -> Callable[[], Recorded]:
    return lambda: record(build)


@dataclass
class Ends:
    """What a training left: parameters and buffers, the state of the optimizer, the next random numbers; and its run."""

    tensors: list[Tensor]
    run: Run | None = None


def trained(training: Training, **options: Any) -> Ends:
    """A few steps, within a run if there are options."""
    torch.manual_seed(1)
    run = None
    if options:
        with leaves_nothing(training.model), optimize(training.model, training.optimizer, **options) as run:
            for _ in range(STEPS):
                training.step()
    else:
        for _ in range(STEPS):
            training.step()
    assert isinstance(training.optimizer, torch.optim.Optimizer)
    states = [t for state in training.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    tensors = [*training.model.parameters(), *training.model.buffers(), *states]
    return Ends([*(t.detach().clone() for t in tensors), torch.rand(3)], run)


def assert_same(one: Ends, other: Ends) -> None:
    assert all(same_bits(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


@pytest.mark.parametrize("name", BUILDS)
def test_a_plan_is_in_force_after_one_step(name: str, tmp_path: Path, said: Said) -> None:
    """With the bits of the plain run, within the budget as the allocator counts, and nothing is solved."""
    build, path = BUILDS[name], tmp_path / "plan.json"
    plan = fitted(of(build), path)
    assert plan.predicted.rebuilt_ops > 0
    plain = trained(build())
    held = counted_nbytes()
    budget = plan.budget_nbytes + held + WORKSPACES.get(name, 0)
    ours = trained(build(), budget=budget, plan=path)
    assert_same(plain, ours)
    assert ours.run is not None
    lines, status = said.taken(), ours.run.status()
    assert f"{path} is the plan of this step; nothing is solved" in lines and "observing 1 step" in lines
    assert "solving for" not in lines and "looking for a plan" not in lines
    assert status.phase == "planned" and status.plan is not None and not status.deviates and status.replans == 0
    assert status.plan.predicted.rebuilt_ops == plan.predicted.rebuilt_ops
    assert status.measured_peak_nbytes is not None and status.measured_peak_nbytes <= budget
    off = status.measured_peak_nbytes - held - plan.predicted.needed_nbytes
    assert abs(off) <= max(WORKSPACES.get(name, 0), 1 << 13), off


@pytest.mark.parametrize("sizes", [{"batch": 2}, {"batch": 6}, {"length": 80}])
def test_a_step_of_other_sizes(sizes: dict[str, int], tmp_path: Path, said: Said) -> None:
    """The plan is the start of a search."""
    build, path = BUILDS["gpt2"], tmp_path / "plan.json"
    plan = fitted(of(build), path)
    plain = trained(build(**sizes))
    budget = plan.budget_nbytes + counted_nbytes()
    ours = trained(build(**sizes), budget=budget, plan=path)
    assert_same(plain, ours)
    assert ours.run is not None
    lines, status = said.taken(), ours.run.status()
    assert f"{path} is taken as the start of a search (" in lines and "of its tensors have other sizes here" in lines
    assert status.measured_peak_nbytes is not None and status.measured_peak_nbytes <= budget and not status.replans


def test_a_budget_that_the_plan_does_not_keep(tmp_path: Path, said: Said) -> None:
    build, path = BUILDS["gpt2"], tmp_path / "plan.json"
    plan = fitted(of(build), path)
    budget = plan.predicted.needed_nbytes - 100_000 + counted_nbytes()
    run = trained(build(), budget=budget, plan=path).run
    assert run is not None and run.plan is not None
    assert "above the budget with all that is in memory here)" in said.taken()
    assert (run.status().measured_peak_nbytes or 0) <= budget


def test_the_smallest_plan_is_searched(tmp_path: Path, said: Said) -> None:
    build, path = BUILDS["gpt2"], tmp_path / "plan.json"
    plan = fitted(of(build), path)
    run = trained(build(), budget="min", plan=path).run
    assert run is not None and run.plan is not None
    assert run.plan.predicted.peak_nbytes - counted_nbytes() < plan.predicted.peak_nbytes
    assert "is taken as the start of a search;" not in said.taken()


def test_a_step_above_the_budget_is_solved_for(tmp_path: Path, said: Said) -> None:
    """The step takes more than its ops say: a step is observed once more, and solved for."""
    build, path = BUILDS["gpt2"], tmp_path / "plan.json"
    plan = fitted(of(build), path)
    plain = trained(build())
    more, held = 2 << 20, []
    budget = plan.predicted.needed_nbytes + counted_nbytes() + more // 2
    training = build()
    taken = training.step

    def step() -> None:
        taken()
        if not held:
            held.append(torch.zeros(more, dtype=torch.uint8))  # an average of weights, say

    ours = trained(replace(training, step=step), budget=budget, plan=path)
    assert_same(plain, ours)
    assert "observing a step, to solve for it" in said.taken()
    assert ours.run is not None
    status = ours.run.status()
    assert status.frontier is not None and status.frontier.searched and not status.deviates


@pytest.mark.parametrize("other", [{"layers": 2}, {"layers": 4}])
def test_another_model_is_refused(other: dict[str, int], tmp_path: Path) -> None:
    build, path = BUILDS["gpt2"], tmp_path / "plan.json"
    plan = fitted(of(build), path)
    training = build(**other)
    assert isinstance(training.optimizer, torch.optim.Optimizer)
    before = [p.detach().clone() for p in training.model.parameters()]
    words = r"made for another model: its weights are 40 tensors of .*, this model's are .*Nothing was updated\. Remove plan="
    with leaves_nothing(training.model), pytest.raises(PlanMismatchError, match=words):
        with optimize(
            training.model, training.optimizer, budget=2 * plan.budget_nbytes + counted_nbytes(), plan=path, verbose=False
        ):
            training.step()
    assert all(same_bits(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
    assert not training.optimizer.state


class Net(nn.Module):
    """The same weights for two different steps."""

    def __init__(self, layer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.between = layer

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


def net(layer: Callable[[Tensor], Tensor]) -> Training:
    torch.manual_seed(0)
    model = Net(layer)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(512, 32)
    return training_of(model, optimizer, lambda: model(x).square().mean())


def test_the_same_weights_in_another_step_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    fitted(of(lambda: net(lambda t: t.tanh().sin().exp())), path)
    training = net(lambda t: t.cos())
    with pytest.raises(PlanMismatchError, match="at op 2: aten::tanh in the model against aten::cos"):
        trained(training, budget="1GiB", plan=path, verbose=False)


def test_compiled_code_is_no_other_model() -> None:
    """`memopt fit` runs it eagerly, so nothing tells whether the ops in it are the recorded ones."""
    graph = record(lambda: net(torch.tanh)).graph
    plan = planner.solve(graph).smallest_plan()
    other, compiled = (
        replace(graph, ops=tuple(replace(op, name=name, recomputable=False) for op in graph.ops)) for name in ("a::b", COMPILED)
    )
    with pytest.raises(PlanMismatchError):
        Foreseen("plan.json", plan, graph).check(other)
    foreseen = Foreseen("plan.json", plan, graph)
    foreseen.check(compiled)
    known = foreseen.take(compiled)
    assert known is not None and known.others > 0
    assert foreseen.take(compiled) is None, "it is the plan of one batch"


def test_a_few_other_ops(tmp_path: Path, said: Said) -> None:
    """A device may have other kernels for a few ops: what they save is kept, and the rest of the plan is carried out."""
    path = tmp_path / "plan.json"
    activations = iter([torch.tanh, torch.tanh, torch.tanh, torch.sigmoid] * 100)
    plan = fitted(of(lambda: net(lambda t: t.sin().tanh().exp())), path)

    def build() -> Training:
        return net(lambda t: next(activations)(t.sin()).exp())

    plain = trained(build())
    ours = trained(build(), budget=plan.budget_nbytes + counted_nbytes() + (1 << 16), plan=path)
    assert_same(plain, ours)
    assert "is the plan of this step (1 of its ops are others here); nothing is solved" in said.taken()
    assert ours.run is not None and ours.run.plan is not None
    assert ours.run.plan.predicted.rebuilt_ops >= plan.predicted.rebuilt_ops - 2


def test_a_plan_for_cuda_is_refused_here(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    build = BUILDS["gpt2"]
    graph = replace(record(build, cuda=True).graph, computed=False)
    write_plan(path, planner.solve(graph, search_seconds=1).plan(1 << 40), graph)
    assert all(t.nbytes % 512 == 0 for t in graph.tensors), "blocks of CUDA's allocator"
    with pytest.raises(PlanMismatchError, match="was made for cuda, the model is on cpu"):
        trained(build(), budget="1GiB", plan=path)
    given, foreseen = read_given(torch.device("cuda"), 1000, MemOptConfig(budget=1000, plan=path))
    assert given is None and isinstance(foreseen, Foreseen), "there it is taken, and compared with the first step"


def test_a_plan_is_for_one_card(tmp_path: Path) -> None:
    answer = answered(of_training("a net", lambda _: net(torch.tanh), None), cards_of(["1GiB", "2GiB"]))
    with pytest.raises(ConfigError, match=r"a plan is for one card: give it by --card, as --card 24GiB \(2 are given\)"):
        answer.save_plan(str(tmp_path / "plan.json"))
    (on,) = answered(of_training("a net", lambda _: net(torch.tanh), None, "cpu"), of_the_host(cards_of(["1KiB"]))).cards
    assert on.verdict == "no"
    none = replace(answer, cards=(on,))
    with pytest.raises(InfeasibleError, match="no plan fits 1KiB: nothing is written"):
        none.save_plan(str(tmp_path / "plan.json"))
    assert not list(tmp_path.iterdir())


# -- every front ---------------------------------------------------------------------------------


def by_lightning(budget: int, path: Path) -> Run:
    pytest.importorskip("lightning")
    from tests.cpu.lib import fits

    return fits.session_of(fits.both(budget=budget, plan=path)[1])  # type: ignore[return-value]


def by_transformers(budget: int, path: Path) -> Run:
    pytest.importorskip("accelerate")
    from tests.cpu.lib import trainers

    return trainers.agrees(options={"budget": budget, "plan": path}).run


def by_accelerate(budget: int, path: Path) -> Run:
    pytest.importorskip("accelerate")
    from tests.cpu.lib import prepared

    plain = prepared.trained(prepared.Loop()).end
    ours = prepared.trained(prepared.Loop(), budget=budget, plan=path)
    prepared.front.end()
    assert_same_tree(plain, ours.end)
    assert ours.run is not None
    return ours.run


BESIDE = 1 << 19
"""What the loops hold beside the step, in bytes: data, and what the plain run left."""
FRONTS: dict[str, tuple[str, Callable[[int, Path], Run]]] = {
    "lightning": ("from tests.cpu.lib.fits import fit; fit('auto')", by_lightning),
    "transformers": ("from tests.cpu.lib.trainers import train; train()", by_transformers),
    "accelerate": ("from tests.cpu.lib.prepared import trained, Loop; trained(Loop())", by_accelerate),
}


@pytest.mark.parametrize("front", FRONTS)
def test_a_script_of_every_front(front: str, tmp_path: Path) -> None:
    """The plan of a plain script is taken by the front, with the bits of the plain script and within the budget."""
    script, use = FRONTS[front]
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(script)
    path = tmp_path / "plan.json"
    source = source_of(["python", str(tmp_path / "train.py")], Options(device="cpu"), ("", 0))
    plan = fitted(lambda: source.record(1, 1), path)
    gc.collect()
    budget = plan.budget_nbytes + counted_nbytes() + BESIDE
    status = use(budget, path).status()
    assert status.phase == "planned" and status.plan is not None and status.plan.predicted.rebuilt_ops > 0
    assert status.frontier is not None and not status.frontier.searched and not status.replans
    assert status.measured_peak_nbytes is not None and status.measured_peak_nbytes <= budget


MODULE = training_script("nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid()) for _ in range(6)))", 512)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mine_to_plan.py"
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


@pytest.mark.parametrize("as_script", [False, True])
def test_the_command(module: Path, as_script: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A script on the CPU counts all that it holds, as a function does."""
    path = module.with_name("plan.json")
    source = ["--", "python", str(module)] if as_script else ["mine_to_plan:build"]

    def ask(*words: str) -> int:
        return main(["fit", "--device", "cpu", "--json", *words, *source])

    assert ask("--card", "1GiB") == 0
    answer = json.loads(capsys.readouterr().out)
    (step,) = answer["steps"]
    between = (step["peak_nbytes"] + step["smallest_nbytes"]) // 2
    assert answer["context_nbytes"] == 0 and step["purposes"]["inputs"] == 512 * 64 * 4
    assert ask("--card", str(between), "-o", str(path)) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) and f"{path}: a plan for {between}, which runs " in printed.err
    plan, graph = read_plan(path)
    assert graph.device == "cpu" and not graph.computed and plan.predicted.needed_nbytes <= between
    assert ask("--card", "1GiB", "-o", str(path)) == 0
    assert "which keeps everything" in capsys.readouterr().err and not read_plan(path)[0].predicted.rebuilt_ops
    other = str(module.with_name("none.json"))
    assert ask("--card", "1KiB", "-o", other) == 3
    assert "is not written: no plan fits" in capsys.readouterr().err and not Path(other).exists()


def test_what_is_refused_before_anything_is_recorded(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "mine_to_plan:build", "-o", "plan.json"]) == 2
    assert "a plan is for one card: give it by --card, as --card 24GiB (0 are given)" in capsys.readouterr().err
    assert main(["fit", "mine_to_plan:build", "--card", "1GiB", "-o", "/nowhere/plan.json"]) == 2
    assert "/nowhere/plan.json" in capsys.readouterr().err
    assert main(["fit", "mine_to_plan:build", "--device", "tpu"]) == 2
    assert "device is 'tpu'; give one of cuda, cpu" in capsys.readouterr().err


def test_planned_again_for_another_budget(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`memopt plan` of such a file gives one of its kind."""
    path, smaller = (str(module.with_name(name)) for name in ("plan.json", "smaller.json"))
    assert main(["fit", "--device", "cpu", "--card", "1GiB", "-o", path, "mine_to_plan:build"]) == 0
    assert main(["plan", path, "--budget", "min", "-o", smaller]) == 0
    assert not read_plan(smaller)[1].computed
