"""Copies, pickles and files of a model that is watched are those of the plain model, at any moment, whatever its class does."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.record import around_calls, instead_of_calls
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.loops import QUIET, leaves_nothing

from tests.cpu.lib import sweeps  # noqa: F401  # isort: skip  # the stub for expecttest
from torch.testing._internal.common_modules import module_db  # isort: skip


class Custom(nn.Module):
    """Says itself how it is copied and pickled, and keeps a slot."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.slot = nn.Linear(8, 8), 3

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.slot

    def __getstate__(self) -> Any:
        return dict(self.__dict__), self.slot

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state[0])
        self.slot = state[1]


class OwnCopy(Custom):
    def __deepcopy__(self, memo: Any) -> OwnCopy:
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        other.slot = self.slot
        return other

    def __copy__(self) -> OwnCopy:
        other = type(self).__new__(type(self))
        other.__dict__ = self.__dict__.copy()
        other.slot = self.slot
        return other


class Within(nn.Module):
    """A recurrent network inside of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(self.rnn(x)[0]))


def _normed() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))


def _scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))  # type: ignore[no-any-return]


def _graph() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: nn.GRU(8, 8, batch_first=True),
    "LSTM": lambda: nn.LSTM(8, 8, batch_first=True),
    "RNN": lambda: nn.RNN(8, 8, batch_first=True),
    "LSTM within": Within,
    "own state": Custom,
    "own copy": OwnCopy,
    "parametrized": _normed,
    "scripted": _scripted,
    "traced": _graph,
    "torch's own state": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
}
X = torch.linspace(-1, 1, 4 * 3 * 8).reshape(4, 3, 8)


def _saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _replica(module: nn.Module) -> Any:
    other: Any = type(module).__new__(type(module))
    other.__dict__ = module.__dict__.copy()  # as `nn.DataParallel` does
    if isinstance(module, Custom):
        other.slot = module.slot
    return other


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "save": _saved,
    "copy": copy.copy,
    "replica": _replica,
}


def _keys(module: nn.Module) -> list[tuple[str, str, list[str]]]:
    names = [(name, type(m).__name__, sorted(vars(m))) for name, m in module.named_modules()]
    return [*names, ("state", "", list(module.state_dict()))]


def _value(module: nn.Module) -> Tensor:
    with torch.no_grad():
        out = module.eval()(X)
    return out[0] if isinstance(out, tuple) else out


def _taken(way: str, module: nn.Module) -> Any:
    """The copy, or the type of what it raises."""
    if isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule)) and way == "replica":
        return None  # nobody replicates those by their attributes
    try:
        return WAYS[way](module)
    except Exception as error:
        return type(error)


def _told(calls: list[Any], module: nn.Module) -> Any:
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return original(*args, **kwargs)

    return call


@contextlib.contextmanager
def _watched(module: nn.Module) -> Iterator[list[Any]]:
    """The root as `optimize` watches it, and all below it as an observed forward does."""
    calls: list[Any] = []
    rest = [m for m in module.modules() if m is not module]
    with instead_of_calls(module, _told(calls, module)), around_calls(rest, calls.append, lambda m: None):
        yield calls


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_watched_model_is_that_of_the_plain_model(way: str, build: str) -> None:
    """The same attributes and values, and it runs its own weights; nobody is told of its calls."""
    torch.manual_seed(0)
    module = BUILDS[build]()
    plain = _taken(way, module)
    with _watched(module) as calls:
        other = _taken(way, module)
        if not isinstance(other, nn.Module):
            assert plain is other
            return
        assert _keys(plain) == _keys(other)
        _value(module)
        assert calls[0] is module
        calls.clear()
        assert same_bits(_value(other), _value(plain)) and not any(m is module for m in calls)
        if way not in ("copy", "replica"):  # which share parameters, and modules within
            assert not calls
            with torch.no_grad():
                for p in module.parameters():
                    p.zero_()
            assert same_bits(_value(other), _value(plain)) and not same_bits(_value(other), _value(module))
    assert "_compiled_call_impl" not in {name for m in (module, other) for c in type(m).__mro__[:-2] for name in vars(c)}


def _classes() -> dict[str, Callable[[], nn.Module]]:
    """One module of every class that torch has inputs for."""
    found: dict[str, Callable[[], nn.Module]] = {}
    for info in module_db:
        samples = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
        built = next(s for s in samples).constructor_input
        found[info.name] = lambda cls=info.module_cls, built=built: cls(*built.args, **built.kwargs)
    return found


def test_a_pickle_of_a_watched_module_is_that_of_the_plain_one_byte_by_byte() -> None:
    """For every class there is in torch."""
    classes = _classes()
    assert len(classes) > 100
    for name, build in classes.items():
        torch.manual_seed(0)
        module = build()
        before, keys = pickle.dumps(module), _keys(module)
        with _watched(module):
            assert pickle.dumps(module) == before, name
            assert _keys(copy.deepcopy(module)) == keys, name
        assert _keys(module) == keys and pickle.dumps(module) == before, name


MOMENTS = ("before the forward", "in the forward", "between forward and step", "after the step")


@pytest.mark.parametrize("build", ["GRU", "LSTM within", "own state", "own copy"])
def test_copies_at_any_moment_of_a_run(build: str) -> None:
    """In observed and in planned steps. What comes out of a copy changes with its own weights alone."""
    torch.manual_seed(0)
    module = BUILDS[build]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    keys = _keys(module)
    taken: list[str] = []

    def take(moment: str) -> None:
        if taken and taken[-1] == "now":
            return  # a call of a copy
        taken.append("now")
        for way in ("deepcopy", "pickle", "save"):
            other = _taken(way, module)
            assert isinstance(other, nn.Module), (moment, way, other)
            assert _keys(other) == keys, (moment, way)
            before = _value(other)
            with torch.no_grad():
                for p in other.parameters():
                    p.add_(1)
            assert not same_bits(_value(other), before), (moment, way)
        taken[-1] = moment

    hook = nn.modules.module.register_module_forward_hook(lambda *_: take(MOMENTS[1]))  # not on the model: it would be copied
    try:
        with leaves_nothing(module), optimize(module, optimizer, budget="min", **QUIET) as run:
            for _ in range(4):
                take(MOMENTS[0])
                out = module(X)
                take(MOMENTS[2])
                (out[0] if isinstance(out, tuple) else out).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                take(MOMENTS[3])
            assert run.plan is not None
    finally:
        hook.remove()
    assert all(taken.count(moment) >= 4 for moment in MOMENTS)
