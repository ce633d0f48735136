"""Every byte of the process counts: what the loop holds from the step before, other models, what no op makes."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import Window, counter, install
from lightning_memopt.plan import lower, read_plan, validate
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.runtime.engine.rebuild import checksum
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.failed import Failed
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET
from tests.cpu.lib.models import Calls
from tests.cpu.lib.scripts import Interpreter

ROWS, WIDTH, CLASSES = 256, 32, 500
F = nn.functional

pytestmark = pytest.mark.skipif(install() is None, reason="no C++ compiler")


@pytest.fixture
def window() -> Iterator[Window]:
    """By the counter, beside what the library opens itself."""
    gc.collect()
    counts = counter()
    assert counts is not None
    found = counts.window()
    assert found is not None
    yield found
    found.close()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, CLASSES))


def trained(
    model: nn.Module,
    window: Window,
    budget: int | str = "90%",
    steps: int = 8,
    after: Callable[[int], None] = lambda _: None,
    loss_of: Callable[[Tensor], Tensor] | None = None,
) -> tuple[list[int], Run]:
    """The peak of every step of a loop that holds its logits and its loss until the next ones are there. Logits are whole."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    peaks = []
    with optimize(model, optimizer, **({"budget": budget, "tile": "off"} | QUIET)) as run:
        for i in range(steps):
            window.reset()
            logits = model(x)
            loss = F.cross_entropy(logits, y) if loss_of is None else loss_of(logits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            peaks.append(window.peak_nbytes)
            after(i)
    return peaks, run


def graph_of(run: Run) -> Graph:
    assert run.status().phase == "planned"
    return state_of(run).program.graph


def test_what_the_loop_holds_from_the_step_before(window: Window) -> None:
    """Logits that die in the middle of the next forward: predicted as measured, within 0.1 %."""
    peaks, run = trained(classifier(), window)
    assert run.plan is not None
    assert peaks[-1] == pytest.approx(run.plan.predicted_peak_nbytes, rel=0.001)
    state = state_of(run)
    assert isinstance(state, Running) and state.peaks.measured_nbytes == peaks[-1]
    logits = ROWS * CLASSES * 4
    held = [t for t in graph_of(run).tensors if t.born_at == BEFORE and t.nbytes == logits and t.name.startswith("held")]
    assert len(held) == 1 and 0 <= held[0].freed_at < len(graph_of(run).points) - 1


def test_a_copy_that_is_made_later_is_planned_for(window: Window) -> None:
    """An EMA copy in the middle of training: one step above the budget, one new plan, and the budget holds."""
    _, run = trained(classifier(), window, steps=4)
    assert run.plan is not None
    budget = int(0.97 * run.plan.unmodified_peak_nbytes)
    del run
    gc.collect()
    held: list[nn.Module] = []
    model = classifier()
    after = lambda i: held.append(copy.deepcopy(model)) if i == 4 else None  # noqa: E731
    peaks, run = trained(model, window, budget, steps=10, after=after)
    state, nbytes = state_of(run), sum(p.nbytes for p in model.parameters())
    assert isinstance(state, Running) and run.plan is not None
    assert state.past.regrown == 1 and state.past.replanned == 0 and nbytes <= state.past.held_nbytes < nbytes + 4096
    assert peaks[5] > budget >= max(peaks[6:])
    assert peaks[-1] == pytest.approx(run.plan.predicted_peak_nbytes, rel=0.001)


class Repeats(nn.Module):
    """Rows times a number that no tensor of the batch shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.times = nn.Linear(WIDTH, 128), nn.Linear(128, CLASSES), 1

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(x.repeat(self.times, 1))))


def test_a_size_that_no_tensor_shows_is_observed_again(window: Window) -> None:
    """The plan drops nothing, so nothing is compared: the step that is measured above the budget is another one."""
    torch.manual_seed(0)
    model = Repeats()
    loss_of = lambda logits: logits.square().mean()  # noqa: E731
    model.times = 2
    _, run = trained(model, window, steps=4, loss_of=loss_of)
    budget = run.status().frontier.smallest_nbytes + 8192  # type: ignore[union-attr]
    del run
    gc.collect()
    model.times = 1

    def larger(i: int) -> None:
        model.times = 2 if i >= 3 else 1

    peaks, run = trained(model, window, budget, steps=10, after=larger, loss_of=loss_of)
    assert peaks[4] > budget >= max(peaks[:3] + peaks[7:]), (peaks, budget)
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0


@pytest.mark.parametrize("grows", ["outside", "inside"])
def test_the_smallest_plan_says_what_it_needs_now(window: Window, grows: str) -> None:
    """Nothing was promised but the smallest plan: after a copy is made, or with more rows, its prediction is right again."""
    held: list[nn.Module] = []
    model = Repeats()

    def after(i: int) -> None:
        if i == 4 and grows == "outside":
            held.append(copy.deepcopy(model))
        elif i == 4:
            model.times = 2

    with warnings.catch_warnings():
        warnings.simplefilter("error" if grows == "outside" else "ignore")
        peaks, run = trained(model, window, "min", steps=10, after=after, loss_of=lambda logits: logits.square().mean())
    assert run.plan is not None and min(peaks[6:]) > peaks[4]
    assert peaks[-1] == pytest.approx(run.plan.predicted_peak_nbytes, rel=0.001)


def test_a_failed_state_says_once_that_the_budget_is_not_kept() -> None:
    state = Failed("it varies")
    state.measured(90, 100)
    with pytest.warns(UserWarning, match="without a plan was measured at 101 bytes"):
        state.measured(101, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.measured(150, 100)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.Dropout(0.1), nn.Linear(128, WIDTH), nn.Tanh())


def checkpointed() -> nn.Module:
    """Each keeps 5,056 bytes of generator state, which no op makes."""

    def call(x: Tensor, *layers: nn.Module) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    return Calls(call, *(block() for _ in range(6)))


class Graphed(nn.Module):
    """A sparse adjacency matrix as a buffer: indices and values."""

    def __init__(self, layout: torch.layout = torch.sparse_coo, share: float = 0.1) -> None:
        super().__init__()
        edges = (torch.rand(ROWS, ROWS) < share).float()
        self.first, self.last = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.edges = edges.to_sparse(layout=layout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sparse.mm(self.edges, self.first(x)).relu())


def compiled() -> nn.Module:
    """What compiled code saves for its backward is made by no op that is recorded."""
    inner = torch.compile(nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 256), nn.Tanh()), backend="aot_eager")
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), Calls(lambda x, f: f(x), inner), nn.Linear(256, WIDTH), nn.GELU())


UNSEEN: dict[str, Callable[[], nn.Module]] = {
    "checkpoints": checkpointed,
    "coo": Graphed,
    "coo, its transpose at the peak": lambda: Graphed(share=0.5),
    "csr": lambda: Graphed(torch.sparse_csr),
    "compiled": compiled,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_op_makes_is_predicted(name: str, window: Window) -> None:
    torch.manual_seed(0)
    peaks, run = trained(UNSEEN[name](), window, loss_of=lambda out: out.square().mean())
    assert run.plan is not None
    assert peaks[-1] == pytest.approx(run.plan.predicted_peak_nbytes, rel=0.001)
    graph = graph_of(run)
    report = validate(graph, keep_all(graph), lower(graph, keep_all(graph)))
    assert report.ok, report.problems[:3]
    assert at_peak(graph, run.plan.lives).total == run.plan.predicted_peak_nbytes
    assert "MemOpt" in run.report()


def test_a_plan_with_what_no_op_makes_is_written_and_read(window: Window, tmp_path: Path) -> None:
    _, run = trained(checkpointed(), window, "min", loss_of=lambda out: out.square().mean())
    run.save_plan(str(tmp_path / "plan.json"))
    plan, graph = read_plan(str(tmp_path / "plan.json"))
    assert plan.predicted_peak_nbytes == run.plan.predicted_peak_nbytes  # type: ignore[union-attr]
    assert graph.tensors == graph_of(run).tensors
    assert sum(t.nbytes == 5056 for t in graph.tensors if t.name == "made by what is not recorded") >= 6


LOOP = """
import sys, warnings, torch
from lightning_memopt.native.counting import process
if sys.argv[1] == "profiled":
    process.tried = True
from tests.cpu.lib.loops import *

def steps(model, optimizer, between=lambda: None):
    for batch in batches(8):
        step(model, optimizer, batch)
        between()

def scheduled():
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        when = torch.profiler.schedule(wait=0, warmup=1, active=3)
        with torch.profiler.profile(schedule=when, profile_memory=True) as theirs:
            steps(model, optimizer, theirs.step)
    return run.plan, run.status().measured_peak_nbytes

def waiting():
    model = small()
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=2, warmup=1, active=2)) as theirs:
        with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
            steps(model, optimizer, theirs.step)
    return run.plan, run.status().measured_peak_nbytes

def lightning(profiler, **options):
    from lightning.pytorch.profilers import PyTorchProfiler
    from tests.cpu.lib.fits import fit, memopt
    strategy = memopt(profile_steps=2)
    fit(strategy, profiler=PyTorchProfiler() if profiler is None else profiler, **options)
    return "fitted", None

def alone():
    model = small()
    with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
        steps(model, optimizer)
    return run.plan, run.status().measured_peak_nbytes

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for loop in sys.argv[2:]:
        plan, measured = eval(loop)
        print("plan", plan is not None, "measured", measured is not None)
print("said", sum("another profiler" in str(w.message) for w in said))
"""


@pytest.mark.long
@pytest.mark.parametrize("meter", ["native", "profiled"])
@pytest.mark.parametrize("loops", [["scheduled()", "waiting()"], ["lightning('pytorch', max_epochs=1)", "lightning(None, fast_dev_run=1)"]], ids=["plain", "lightning"])  # fmt: skip # noqa: E501
def test_beside_a_profiler_of_the_users(loops: list[str], meter: str, tmp_path: Path, interpreter: Interpreter) -> None:
    """Nothing crashes; natively all is measured, by the profiler nothing is, and one line says so."""
    pytest.importorskip("lightning")
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    done = interpreter.run(str(script), meter, *loops, cwd=tmp_path, needs=("torch._dynamo", "lightning.pytorch"))
    assert done.returncode == 0, done.stderr[-2000:]
    native = meter == "native"
    measured = ["plan True measured " + str(native and "scheduled" in "".join(loops))] * 2
    lines = [line for line in done.stdout.splitlines() if line.startswith(("plan", "said"))]
    assert lines == [*measured, f"said {int(not native)}"]


@pytest.mark.long
@pytest.mark.parametrize("meter", ["native", "profiled"])
def test_torch_says_nothing_of_memory_from_before(meter: str, tmp_path: Path, interpreter: Interpreter) -> None:
    """ "Memory block of unknown size", which is ours to avoid."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP.replace("for loop in", "train(m := small(), sgd(m), batches(2))\n    for loop in"))
    done = interpreter.run(str(script), meter, "alone()", cwd=tmp_path, needs=("torch._dynamo",))
    assert "plan True measured True" in done.stdout and "Memory block" not in done.stderr, done.stderr


def test_what_the_library_keeps_for_itself_counts_in_no_budget() -> None:
    """The weights of checksums are in Python's memory: as torch's, 32 KiB would be part of the smallest step."""
    checksum(torch.ones(8))
    counts = counter()
    assert counts is not None
    ours = [module for name, module in sys.modules.items() if name.startswith("lightning_memopt")]
    kept = {(m.__name__, name): t for m in ours for name, t in vars(m).items() if isinstance(t, Tensor)}
    assert kept, "the weights"
    assert [name for name, t in kept.items() if counts.counts(t.untyped_storage())] == []
