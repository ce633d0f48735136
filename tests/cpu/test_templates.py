"""Steps that change after templates were learned: the bits of the plain loop, whatever is other than in the step before."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_memopt.graph import resident_nbytes
from lightning_memopt.runtime import PlannedEngine
from lightning_memopt.session.recording import PlannedRecording
from lightning_memopt.solvers.baselines import recompute_everything
from lightning_memopt.solvers.planner import Frontier
from lightning_memopt.trace import metered_cpu
from tests.cpu.models import Body, attached, data, made, sgd, trains

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:MemOpt. the forward left the plan")

STEPS = [data(96, 16, seed=s) for s in range(8)]
NAN, tanh = float("nan"), torch.tanh


@pytest.fixture(autouse=True, params=["smallest", "everything"])
def plan(request, monkeypatch):
    """The smallest plan, and the one that drops everything that can be made again."""
    if request.param == "everything":
        original = Frontier.plan
        monkeypatch.setattr(
            Frontier, "plan", lambda f, limit: dataclasses.replace(original(f, limit), lives=recompute_everything(f.graph))
        )
    return request.param


class Turns(Body):
    """Layers around `f(model, step, x)`, which a test supplies; `i` counts the steps."""

    def __init__(self, f):
        super().__init__()
        self.f, self.i = f, -1
        self.norm = nn.BatchNorm1d(16)
        self.side = Side()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x):
        return self.f(self, self.i, x)


class Side(nn.Module):
    """Ops that no plan says anything about: it runs without the recorder. `meddle(self, h)` is what happens in it besides."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(16))
        self.meddle = lambda h: None

    def forward(self, h):
        self.meddle(h)
        with torch.no_grad():
            k = h.mean(0).mul(2).add(1).neg().cos()
        return k + self.w


def first(m, x):
    return tanh(m.layers[0](x)).exp()


def last(m, h):
    return m.layers[2](tanh(m.layers[1](h)).exp().sin()).sin()


def mean(m, x):
    m.i += 1
    m.given = data(96, 16, seed=20 + m.i)
    return m(x).square().mean()


def pick(values):
    """The value of a step: the first one while templates are learned."""
    return lambda i: values[0] if i < 3 else values[i % len(values)]


CONSTANTS = {
    "int or float": ([1, 1.0, True], lambda h, c: (h * c).exp()),
    "signed zero": ([0.0, -0.0], lambda h, c: torch.copysign(h, torch.full_like(h, c)) * (h * c).exp()),
    "signed zero in place": ([0.0, -0.0], lambda h, c: (1 / (h * c)).atan().exp() * h),
    "nan": ([0.5, NAN, 0.25], lambda h, c: torch.nan_to_num(h * c, 0.75).exp()),
    "offset": ([0, 3, 7], lambda h, c: (h[c : c + 80] * h[8:88].sin()).exp()),
    "column": ([0, 3, 7], lambda h, c: h * h[:, c : c + 1].exp()),
    "dropout": ([0.1, 0.5, 0.0, 1.0], lambda h, c: dropout(h, c).exp()),
    "from data": ([1, 2], lambda h, c: h * float(h.detach().sum()) ** (-c)),
    "dim": ([0, 1], lambda h, c: h.softmax(c).exp()),
    "axes": ([(0, 1), (1, 0)], lambda h, c: h.permute(c).exp().reshape(96, 16)),
    "padding": ([(1, 1), (0, 2), (2, 0)], lambda h, c: nn.functional.pad(h, c)[:, 1:17].exp()),
    "size": ([(96, 16), (48, 32)], lambda h, c: h.reshape(c).exp().cumsum(1).sin().reshape(96, 16)),
    "index": ([[0, 2, 1], [1, 1, 1]], lambda h, c: h.view(96, 16)[None, :, c][0].exp().sum(1, keepdim=True) * h),
    "dtype": ([torch.float64, torch.bfloat16, torch.float32], lambda h, c: h.to(c).exp().sin().float() * h),
    "target": (["add", "mul"], lambda h, c: getattr(h * 1.0, c + "_")(h.detach().sin()).sin()),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_other_constants(name):
    """EXACT when an argument that is no tensor changes from step to step."""
    values, f = CONSTANTS[name]
    choose = pick(values)
    trains(lambda: Turns(lambda m, i, x: last(m, f(first(m, x), choose(i))[:, :16])), STEPS, mean, drops=False)


def other_views(m, i, x):
    a, b, c, d = first(m, x).chunk(4)
    a, b = (b, a) if i % 2 else (a, b)
    c = (c, a, d)[i % 3 if i > 2 else 0]
    return last(m, a.exp() * b.sin().exp() + c * d.sin())


def lists(m, i, x):
    parts = list(first(m, x).chunk(4))
    parts = parts[: (4, 3, 2, 1)[i % 4]] if i > 2 else parts
    parts = parts[::-1] if i % 3 == 2 else parts
    return last(m, torch.cat([torch.cat(parts), torch.stack(parts, 1).flatten(0, 1).sin()]).exp())


def branches(m, i, x):
    h = first(m, x)
    one, two = (lambda v: m.layers[1](v).tanh().exp()), (lambda v: m.layers[2](v).tanh().exp())
    h = two(one(h)) if i % 2 else one(two(h))
    return h.sin()


def skipped(m, i, x):
    h = first(m, x)
    for layer in m.layers[1:]:
        h = h if i > 2 and (i + layer.in_features) % 3 == 0 else h + tanh(layer(h)).exp()
    return h.sin().exp().sin()


def extra(m, i, x):
    h = first(m, x)
    for _ in range(1 + (i > 2) * (i % 3)):
        h = h.sin().exp()
    m.seen = h.detach().exp().sum()
    return last(m, h)


def grad_mode(m, i, x):
    h = first(m, x)
    with torch.set_grad_enabled(i % 3 != 2):
        h = h + tanh(m.layers[1](h)).exp()
    return last(m, h)


def inference(m, i, x):
    with torch.inference_mode() if i % 3 == 2 else torch.no_grad():
        k = data(96, 16, seed=i).sin()
    z = m.layers[0](x)
    with torch.inference_mode() if i % 4 == 3 else torch.no_grad():
        own = z.detach().clone().sin().exp()
    return last(m, (z + k + own).exp().sin().exp())


def autocast(m, i, x):
    with torch.autocast("cpu", torch.bfloat16, enabled=i % 3 == 2):
        h = last(m, first(m, x))
    return h.float()


def aliases(m, i, x):
    other = x if i % 3 == 2 else m.layers[2].weight.repeat(6, 1) if i % 3 == 1 else data(96, 16, seed=50 + i)
    weight = m.layers[1].weight if i % 2 else m.layers[2].weight
    return last(m, (tanh(m.layers[0](x)) * other.exp()).sin().exp() @ weight.sin().exp())


def own_generator(m, i, x):
    g = torch.Generator().manual_seed(i)
    noise = torch.rand(96, 16, generator=g if i % 2 else None)
    return last(m, first(m, x) * torch.bernoulli(noise, generator=g if i % 3 else None) + noise)


def moved_generator(m, i, x):
    h = dropout(first(m, x), 0.3)
    torch.rand(i % 3 * 7)
    h = (dropout(h, 0.3) + torch.randn_like(h)).exp()
    if i % 4 == 3:
        torch.manual_seed(i)
    return last(m, dropout(h, 0.3).sin())


def sized_by_data(m, i, x):
    h = first(m, x)
    kept = h.masked_select(h > 1.0 + 0.1 * (i % 3)).exp().sin()
    repeats = (torch.arange(96) + (i > 2) * i) % 3
    return last(m, h.repeat_interleave(repeats, 0).exp() * kept.mean())


def statistics(m, i, x):
    """Rebuilds start from the running statistics that the same forward writes, before and after it does."""
    m.norm.momentum = (0.1, 0.3, None)[i % 3]
    h = (m.layers[0](x) - m.norm.running_mean).exp().sin().exp()
    h = m.norm(h)
    return last(m, h * m.norm.running_mean.exp())


def statistics_twice(m, i, x):
    h = m.norm((m.layers[0](x) - m.norm.running_mean).exp().sin().exp())
    h = m.norm((h * (m.norm.running_var + 1)).exp().sin())
    return last(m, h * m.norm.running_mean.exp())


def statistics_of_a_module_that_runs_unrecorded(m, i, x):
    def meddle(h):
        m.norm(h)

    m.side.meddle = meddle
    h = (m.layers[0](x) - m.norm.running_mean).exp().sin().exp() + 1
    with torch.no_grad():
        k = m.side(x + 0.5)
    return last(m, h) + k


def settings(m, i, x):
    h = x.view(12, 8, 16)
    for j, layer in enumerate(m.layers):
        with torch.backends.mkldnn.flags(enabled=not (i > 2 and j == 1)):  # type: ignore[attr-defined]
            h = nn.functional.conv1d(h, layer.weight.view(2, 8, 16)[..., :3].repeat(4, 1, 1), padding=1).sin().exp()
    return h


def deterministic(m, i, x):
    torch.use_deterministic_algorithms(i % 3 == 2)
    try:
        return last(m, first(m, x).index_add(0, torch.tensor([0, 0, 1]), m.layers[1].weight[:3].exp()).sin())
    finally:
        torch.use_deterministic_algorithms(False)


def in_place(where):
    """An op of the same name writes over something else, which a rebuild starts from or which is rebuilt."""

    def f(m, i, x):
        free, given = torch.ones(96, 16), m.given
        h = tanh(m.layers[0](x)).sin().add_(1.0)
        k = given.exp() * m.layers[1](x)
        with torch.no_grad():
            target = {"h": h, "h.data": h.data, "given": given, "given.data": given.data}[where] if i > 3 else free
            target.sub_(0.5)
        return last(m, (h.sin().exp() + k.sin())) + free

    return f


def in_place_unrecorded(m, i, x):
    """A module that ran unrecorded writes over what it is given, in some steps."""

    def meddle(h):
        if i > 3:
            with torch.no_grad():
                h.mul_(0.5)

    m.side.meddle = meddle
    h = tanh(m.layers[0](x)).sin().add_(1.0)
    k = m.side(h)
    return last(m, h.sin().exp()) + k


def memory_handed_out(m, i, x):
    given = m.given
    if i % 3 == 2:
        given.numpy()[:8] = 1
    h = given.exp() * first(m, x)
    return last(m, (given.sin().exp() * m.layers[1](h)).exp())


def _entered(m, i, x, context):
    m.side.meddle = lambda h: None
    h = first(m, x) + 1
    with context if i % 3 == 2 else contextlib.nullcontext():
        k = m.side(h)
        h = h.sin().exp()
    return last(m, h) + k


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def checkpointed(m, i, x):
    call = (lambda f, h: checkpoint(f, h, use_reentrant=bool(i % 2))) if i % 3 == 2 else (lambda f, h: f(h))
    h = first(m, x) + 1
    k = call(m.side, h)
    return last(m, call(lambda v: v.sin().exp(), h)) + k


def called_otherwise(m, i, x):
    h = first(m, x) + 1
    k = m.side(h)
    if i > 2:
        k = {0: lambda: m.side.forward(h), 1: lambda: k + m.side(h), 2: lambda: m.side(h.detach())}[i % 3]()
    h = last(m, h.sin())
    return h + k + (m.side(h) if i == 6 else 0)


def from_a_thread(m, i, x):
    h = first(m, x) + 1
    k = m.side(h)
    if i > 2:
        found = []
        thread = threading.Thread(target=lambda: found.append(m.side(h.detach())))
        thread.start()
        thread.join()
        k = k + found[0].detach()
    return last(m, h.sin()) + k


def calls_itself(m, i, x):
    def meddle(h):
        if i > 2 and not m.nested:
            m.nested = True
            with save_on_cpu(), Passing():
                m.side(h)

    m.nested, m.side.meddle = False, meddle
    h = first(m, x) + 1
    return last(m, h.sin()) + m.side(h)


def raises_inside(m, i, x):
    def meddle(h):
        if i > 2 and i % 2:
            raise KeyError("of the user")

    m.side.meddle = meddle
    h = first(m, x) + 1
    try:
        k = m.side(h)
    except KeyError:
        k = m.side.w
    return last(m, h.sin()) + k


TURNS = {
    f.__name__: f
    for f in (
        other_views,
        lists,
        branches,
        skipped,
        extra,
        grad_mode,
        inference,
        autocast,
        aliases,
        own_generator,
        moved_generator,
        sized_by_data,
        statistics,
        statistics_twice,
        statistics_of_a_module_that_runs_unrecorded,
        settings,
        deterministic,
        in_place_unrecorded,
        memory_handed_out,
        checkpointed,
        called_otherwise,
        from_a_thread,
        calls_itself,
        raises_inside,
    )
}
TURNS |= {f"in_place {where}": in_place(where) for where in ("h", "h.data", "given", "given.data")}
TURNS["hooks around"] = lambda m, i, x: _entered(m, i, x, saved_tensors_hooks(lambda t: t.clone(), lambda t: t))
TURNS["save_on_cpu around"] = lambda m, i, x: _entered(m, i, x, save_on_cpu())
TURNS["mode around"] = lambda m, i, x: _entered(m, i, x, Passing())
TURNS["no_grad around"] = lambda m, i, x: _entered(m, i, x, torch.no_grad())


@pytest.mark.parametrize("name", TURNS)
def test_another_forward(name):
    """EXACT when the forward of a step is not that of the step before."""
    trains(lambda: Turns(TURNS[name]), STEPS, mean, drops=False)


def steady(m, i, x):
    h = first(m, x) + 1
    return last(m, dropout(h, 0.2).sin()) + m.side(h)


def frozen(m):
    m.layers[1].weight.requires_grad_(m.i % 3 != 1)


def replaced(m):
    if m.i % 3 == 1:
        with torch.no_grad():
            m.layers[0].weight.data = m.layers[0].weight.detach().clone() * 0.5
            m.layers[1].weight = nn.Parameter(m.layers[1].weight * 0.5)
            m.side = copy.deepcopy(m.side)


def parametrized(m):
    if m.i == 4:
        nn.utils.parametrizations.weight_norm(m.layers[1])
    if m.i == 6:
        nn.utils.parametrize.remove_parametrizations(m.layers[1], "weight")


def tied(m):
    m.layers[2].weight = m.layers[0].weight if m.i % 3 == 1 else m.layers[1].weight


def validated(m):
    m.eval()
    with torch.no_grad():
        m(data(96, 16, seed=9))
    m(data(96, 16, seed=9)).sum().backward()
    m.zero_grad()
    m.train()


def copied(m):
    other = copy.deepcopy(m)
    other(data(96, 16, seed=9)).sum().backward()


def hooked(m):
    handle = m.side.register_forward_hook(lambda _, a, out: out * 2)
    if m.i % 3 == 2:
        m.side.register_full_backward_hook(lambda _, gi, go: None)
        handle.remove()


def left_alone(m):
    m.f, f = (lambda *_: 1 / 0), m.f
    with pytest.raises(ZeroDivisionError):
        m(data(96, 16, seed=9))
    m.f = f


@pytest.mark.parametrize("between", [frozen, replaced, parametrized, tied, validated, copied, hooked, left_alone])
def test_something_between_steps(between):
    """EXACT when the model is changed, used or copied between steps."""

    def loss(m, x):
        m.i += 1
        if m.i > 2:
            between(m)
        return m(x).square().mean()

    trains(lambda: Turns(steady), STEPS, loss, drops=False)


def twice(loss, m, x):
    loss.backward(retain_graph=True)
    loss.backward()


def subset(loss, m, x):
    torch.autograd.grad(loss, list(m.layers[2].parameters()), retain_graph=True)
    loss.backward()


def first_layer_only(loss, m, x):
    torch.autograd.grad(loss, [m.layers[0].weight], retain_graph=True)
    loss.backward()


def doubly(loss, m, x):
    (g,) = torch.autograd.grad(loss, [m.layers[0].weight], create_graph=True)
    (loss + g.square().sum()).backward()


def two_at_once(loss, m, x):
    (m(x * 2).square().mean() + loss).backward()


def two_in_turn(loss, m, x):
    other = m(x * 2).square().mean()
    (loss.backward(), other.backward()) if m.i % 2 else (other.backward(), loss.backward())


def never(loss, m, x):
    m(x * 2)
    loss.backward()


@pytest.mark.parametrize("backward", [twice, subset, first_layer_only, doubly, two_at_once, two_in_turn, never])
def test_another_backward(backward):
    """EXACT when some steps run backward otherwise; or the run says that it cannot."""
    current = []

    def loss(m, x):
        current[:] = [m, x]
        return mean(m, x)

    def run(value):
        m, x = current
        backward(value, m, x) if m.i > 2 and m.i % 2 else value.backward()

    trains(lambda: Turns(steady), STEPS, loss, run, drops=False)


def test_peak_and_lives_of_steady_steps(plan):
    """Templated steps peak where the plan says, do not grow, and leave nothing: no engine, no tape; after exceptions too."""
    refs = []
    original = PlannedEngine.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        refs.extend([weakref.ref(self), weakref.ref(self.tape)])

    batch = data(2048, 16)
    model = made(lambda: Turns(steady))
    optimizer = sgd(model)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    gc.collect()
    gc.disable()
    try:
        PlannedEngine.__init__ = init
        with attached(model, optimizer) as run:
            for _ in range(4):
                step()
            frontier = run.session.frontier
            predicted = run.plan.predicted_peak_bytes - resident_nbytes(frontier.graph) if plan == "smallest" else None
            peaks = []
            for i in range(4):
                with metered_cpu() as events:
                    step()
                peaks.append(events.peak_nbytes)
                if i == 1:
                    left_alone(model)
            assert len(refs) > 8 and [r() for r in refs if r() is not None] == []
    finally:
        PlannedEngine.__init__ = original
        gc.enable()
    assert max(peaks) - min(peaks) <= 256
    assert predicted is None or max(peaks) <= predicted * 1.006 + 512, (peaks, predicted)


def test_side_modules_run_unrecorded():
    """The tests above test what they say: a module that nothing depends on is left by the recorder."""
    left = []
    original = PlannedRecording._module_ends

    def ends(self, module, *args):
        left.append(module is self._outside)
        original(self, module, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedRecording, "_module_ends", ends)
        trains(lambda: Turns(steady), STEPS[:4], mean)
    assert any(left)


@pytest.mark.parametrize("kind", ["sparse", "sparse csr", "inference", "now and then"])
def test_batches_that_are_not_recorded(kind):
    """EXACT with a batch, and a buffer, that the recorder leaves alone: sparse, or made in inference mode."""

    class Graph(Body):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", torch.eye(96).to_sparse(), persistent=False)

        def forward(self, x, given):
            return super().forward(torch.sparse.mm(self.adjacency, x) + torch.matmul(given, x))

    turn = [0]

    def loss(m, x):
        turn[0] += 1
        kinds = {"sparse": torch.Tensor.to_sparse, "sparse csr": torch.Tensor.to_sparse_csr, "inference": torch.Tensor.neg}
        make = kinds.get(kind, (torch.Tensor.to_sparse, torch.Tensor.neg)[turn[0] % 2])
        with torch.inference_mode() if kind == "inference" else torch.no_grad():
            given = make(torch.eye(96))
        return m(x.clone().requires_grad_() if kind != "inference" else x, given).square().mean()

    trains(Graph, STEPS, loss, drops=False)


def test_one_other_step_does_not_raise_the_peak_of_those_after_it():
    """A step whose batch was handed out as raw memory keeps more; the next one peaks where the others did."""

    def f(m, i, x):
        if i == 3:
            x.numpy()
        return last(m, first(m, x))

    model, peaks = made(lambda: Turns(f)), {}
    optimizer = sgd(model)
    with attached(model, optimizer):
        for i in range(7):
            x, model.i = data(2048, 16, seed=i), i
            with metered_cpu() if i > 1 else contextlib.nullcontext() as events:
                model(x).square().mean().backward()
            peaks[i] = events.peak_nbytes if events else 0
            optimizer.step()
            optimizer.zero_grad()
    assert peaks[4] == peaks[5] == peaks[2]
