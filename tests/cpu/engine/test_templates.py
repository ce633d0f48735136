"""Steps that change after templates were learned: the bits of the plain loop, whatever differs from the step before."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.cpu.lib.changing_steps import NAN, STEPS, Turns, first, last, mean, pick, plans, tanh  # noqa: F401 (a fixture)
from tests.cpu.lib.models import data, trains

pytestmark = pytest.mark.filterwarnings("ignore:MemOpt. the forward left the plan")


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
    """EXACT when an argument that is not a tensor changes from step to step."""
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


CLONES = torch.clone, lambda t: t


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
TURNS["hooks around"] = lambda m, i, x: _entered(m, i, x, saved_tensors_hooks(*CLONES))
TURNS["hooks around at first"] = lambda m, i, x: _entered(m, i if i > 3 else 2, x, saved_tensors_hooks(*CLONES))
TURNS["save_on_cpu around"] = lambda m, i, x: _entered(m, i, x, save_on_cpu())
TURNS["mode around"] = lambda m, i, x: _entered(m, i, x, Passing())
TURNS["no_grad around"] = lambda m, i, x: _entered(m, i, x, torch.no_grad())


@pytest.mark.parametrize("name", TURNS)
def test_another_forward(name):
    """EXACT when the forward of a step is not that of the step before."""
    trains(lambda: Turns(TURNS[name]), STEPS, mean, drops=False)
