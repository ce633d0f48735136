"""Small models and plain training loops whose runs are compared bit by bit, and what must be as it was afterwards."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memopt import optimize
from lightning_memopt.graph import resident_nbytes
from lightning_memopt.integrations.plain import Run
from lightning_memopt.native import counter, engine
from lightning_memopt.native.counting import process
from lightning_memopt.session.measure.peak_meter import Metering
from lightning_memopt.trace.living import count_all, living

WORDS, CLASSES, LENGTH, BATCH = 24, 24, 8, 48
EXPOSING = ("data_ptr", "numpy", "__array__", "__dlpack__")

torch.set_num_threads(1)  # for processes that tests start: they load no conftest

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


class Small(nn.Module):
    """Embedding tied with the head, dropout, BatchNorm, and layers enough that activations are most of the step."""

    def __init__(self, width: int = 32, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.norm = nn.BatchNorm1d(LENGTH)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        for layer in self.layers:
            h = h + self.dropout(nn.functional.gelu(layer(h)))
        return self.head(h)


def small(seed: int = 0, **options: float) -> Small:
    torch.manual_seed(seed)
    return Small(**options)  # type: ignore[arg-type]


def batches(count: int, size: int = BATCH, seed: int = 1) -> list[Batch]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda high: torch.randint(0, high, (size, LENGTH), generator=g)  # noqa: E731
    return [(draw(WORDS), draw(CLASSES)) for _ in range(count)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def body(model: Small, x: Tensor) -> Tensor:
    """The hidden states, by calls of the model's modules."""
    h = model.norm(model.embed(x))
    for layer in model.layers:
        h = h + model.dropout(nn.functional.gelu(layer(h)))
    return h


def through_modules(model: Small, batch: Batch) -> Tensor:
    """`loss_of`, without a call of the model itself."""
    return nn.functional.cross_entropy(model.head(body(model, batch[0])).flatten(0, 1), batch[1].flatten())


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, loss: Loss = loss_of) -> Tensor:
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch], loss: Loss = loss_of, seed: int = 7
) -> list[Tensor]:
    """The losses of a plain loop, and last what the generator draws after it."""
    torch.manual_seed(seed)
    return [*(step(model, optimizer, batch, loss) for batch in data), torch.rand(3)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, t in one.items():
        assert torch.equal(t, other[name]), name


def no_step_is_measured(patch: pytest.MonkeyPatch) -> None:
    """Sessions measure no step."""
    patch.setattr(Metering, "begin", lambda *_, **__: None)


def without_counter(patch: pytest.MonkeyPatch) -> None:
    """As where no compiler is: torch's profiler measures."""
    patch.setattr(process, "tried", True)
    patch.setattr(process, "counter", None)


QUIET: dict[str, Any] = dict(verbose=False, profile_steps=2)


def agrees(
    use: Callable[[Any, Any], Any],
    build: Callable[[], nn.Module] = small,
    make: Callable[[nn.Module], Any] = sgd,
    **options: Any,
) -> Run:
    """`use(model, optimizer)`, plainly and inside `optimize` (at the smallest plan): same results and states, nothing left."""
    model = build()
    plain = use(model, make(model))
    expected = state(model)
    model = build()
    optimizer = make(model)
    with leaves_nothing(model), optimize(model, optimizer, **({"budget": "min"} | QUIET | options)) as run:
        found = use(model, optimizer)
    assert_same(expected, state(model))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain or [], found or [], strict=True))
    return run


def budget_at(run: Run, share: float) -> int:
    """Bytes that hold what is resident and `share` of what the unmodified step has on top, or the smallest plan."""
    frontier = run.status().frontier
    assert frontier is not None
    base = resident_nbytes(frontier.graph)
    return max(frontier.smallest_nbytes, int(base + share * (frontier.unmodified_peak_nbytes - base)))


def counted_nbytes() -> int:
    """Bytes of all tensors that this process holds on the CPU, whoever made them: what a budget counts before a step begins."""
    gc.collect()
    count_all(lambda _: None)
    count = counter()
    return count.live_nbytes if count is not None else sum(s.nbytes() for s in living(torch.device("cpu")))


def _registries() -> list[dict]:
    """Copies of the hooks that are registered for all modules and all optimizers."""
    names = ["_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_always_called",
             "_global_backward_hooks", "_global_backward_pre_hooks"]  # fmt: skip
    found = [dict(getattr(modules, name)) for name in names]
    return [*found, dict(optimizers._global_optimizer_pre_hooks), dict(optimizers._global_optimizer_post_hooks)]


def installed() -> list[object]:
    """All that could be left of us outside of the model."""
    methods = [(name in torch.Tensor.__dict__, getattr(torch.Tensor, name)) for name in EXPOSING]
    return [
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        list(_get_current_dispatch_mode_stack()),
        _registries(),
        methods,
        nn.Module.__dict__["__call__"],
        "grad" in vars(nn.Parameter),
        torch.get_rng_state().shape,
        0 if (native := engine.loaded()) is None else native.under_way(),
        "resize_" in vars(torch.UntypedStorage),
    ]


@contextlib.contextmanager
def leaves_nothing(*models: nn.Module) -> Iterator[None]:
    """What is installed in torch and on the models is the same after this block as before it."""

    def attributes() -> list[object]:
        return [
            (sorted(vars(m)), type(m), dict(m._forward_hooks), dict(m._forward_pre_hooks)) for r in models for m in r.modules()
        ]

    gc.collect()  # a strategy of an earlier test, in a cycle with its Trainer, takes its hooks along: not inside the block
    before = installed(), attributes()
    assert before[0][0] is None and before[0][1] == [], "something was left before"
    try:
        yield
    finally:
        assert (installed(), attributes()) == before
