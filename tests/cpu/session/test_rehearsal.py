"""What an update takes, as it is said before one has run, is what the allocator counts; nothing of the user's is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt.session.observe.resident import resident_nbytes, resident_tensors
from lightning_memopt.session.solve.rehearsal import UNKNOWN, Update, rehearse, with_gradients
from lightning_memopt.trace import metered_cpu
from tests.cpu.lib.observed_graph import CPU

STEPS = 7
"""RAdam does something else from its sixth step on."""
SCALARS = 64
CLASSES = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adadelta, optim.Adagrad, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.Adafactor,
)  # fmt: skip
OPTIONS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    *((cls, {}) for cls in CLASSES),
    *((cls, {"foreach": True}) for cls in CLASSES),
    *((cls, {"fused": True}) for cls in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "maximize": True, "foreach": True}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    (optim.Adam, {"amsgrad": True, "foreach": True}),
    (optim.Adam, {"lr": torch.tensor(1e-3)}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (optim.ASGD, {"t0": 2}),
]


def shaped() -> nn.Module:
    """A model in which some layers are alike and others are not."""
    torch.manual_seed(0)
    layers = [nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40), nn.Conv2d(4, 64, 5), nn.Linear(40, 300)]
    model = nn.Sequential(*layers)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    model[1].bias.grad = None
    return model


def rehearsed(optimizer: optim.Optimizer) -> Update:
    return rehearse(optimizer, with_gradients(optimizer), CPU, lambda nbytes: nbytes)


def taken(optimizer: optim.Optimizer) -> tuple[int, int]:
    """By the allocator: bytes of state that the first step makes, and the most beside all of the state, over some steps."""
    state = lambda: resident_nbytes(resident_tensors(nn.Module(), [optimizer], ()), CPU)  # noqa: E731
    made = beside = 0
    for _ in range(STEPS):
        before = state()
        with metered_cpu() as events:
            optimizer.step()
        new = state() - before
        made += new
        beside = max(beside, events.peak_nbytes - new)
    return made, beside


@pytest.mark.parametrize(("cls", "options"), OPTIONS, ids=[f"{c.__name__}{list(o)}" for c, o in OPTIONS])
def test_as_the_allocator_counts(cls: Any, options: dict[str, Any]) -> None:
    """Exact but for a few scalars. Afterwards the user's optimizer has no new state, and the generator has not moved."""
    optimizer = cls(shaped().parameters(), **copy.deepcopy(options))
    before = {p: dict(s) for p, s in optimizer.state.items()}
    generator = torch.get_rng_state()
    update = rehearsed(optimizer)
    assert {p: dict(s) for p, s in optimizer.state.items()} == before
    assert torch.equal(generator, torch.get_rng_state())
    made, beside = taken(optimizer)
    assert update.known and update.state_nbytes == made
    assert 0 <= update.beside_nbytes - beside <= SCALARS


def test_state_that_there_is_is_not_made_again() -> None:
    """A resumed run."""
    optimizer = optim.Adam(shaped().parameters())
    first = rehearsed(optimizer)
    optimizer.step()
    assert first.state_nbytes > 0
    assert rehearsed(optimizer) == first._replace(state=())


def test_groups_have_options_of_their_own() -> None:
    """Moments are counted where a group has momentum, and the larger group's temporaries."""
    a, b = shaped(), shaped()
    optimizer = optim.SGD([{"params": a.parameters()}, {"params": b.parameters(), "momentum": 0.9}], lr=0.1, foreach=True)
    update = rehearsed(optimizer)
    assert (update.state_nbytes, update.beside_nbytes - SCALARS) == (taken(optimizer)[0], 0)


def test_nothing_of_the_users_runs() -> None:
    """Hooks, modes and schedulers do not see the throw-away step; an optimizer that is not torch's does not run at all."""
    ran: list[str] = []

    class Own(optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            ran.append("own step")

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    params = list(shaped().parameters())
    optimizer = optim.AdamW(params)
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre hook"))
    handle = register_optimizer_step_post_hook(lambda *_: ran.append("post hook"))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    versions = [(p._version, p.grad) for p in params]
    try:
        with Seen():
            assert rehearsed(optimizer).state_nbytes > 0
    finally:
        handle.remove()
    assert rehearsed(Own(params, lr=0.1)) == UNKNOWN
    assert ran == [] and scheduler.last_epoch == 0
    assert all(p._version == v and p.grad is g for p, (v, g) in zip(params, versions, strict=True))


@pytest.mark.parametrize("cls", CLASSES)
def test_what_torch_asks_of_an_optimizer_on_cuda(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each step it asks the groups for an option that not all classes have, unless the optimizer has warned already."""

    def asked(optimizer: Any) -> None:
        if not getattr(optimizer, "_warned_capturable_if_run_uncaptured", False):
            assert not all(group["capturable"] for group in optimizer.param_groups)

    optimizer = cls(shaped().parameters())
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):  # of newer and older torch
        monkeypatch.setattr(optim.Optimizer, name, asked, raising=False)
    assert rehearsed(optimizer).known


def test_sparse_gradients_are_not_known() -> None:
    """Which rows get a gradient depends on the data."""
    layer = nn.Embedding(50, 4, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    assert not rehearsed(optim.SparseAdam(layer.parameters())).known


def test_a_history_that_grows_is_counted_when_it_is_full() -> None:
    """LBFGS: what it makes in its first steps is part of what was said, and in the end all of it is."""
    torch.manual_seed(0)
    model, x = nn.Linear(30, 30), torch.randn(64, 30)
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sin().mean()
        loss.backward()
        return loss

    full = rehearsed(optimizer).state_nbytes
    left = [full]
    for _ in range(4):
        optimizer.step(closure)
        left.append(rehearsed(optimizer).state_nbytes)
    assert left == sorted(left, reverse=True) and left[1] < left[0]
    assert 0 <= left[-1] <= SCALARS
