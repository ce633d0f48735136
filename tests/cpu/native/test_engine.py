"""The native engine runs recorded calls again: the same bits, and the same state of what is held, as the Python engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lightning_memopt.cxx import BuildError
from lightning_memopt.native import counter, engine
from lightning_memopt.record import Call, StorageVersion, Tape, View
from lightning_memopt.record.below import below_autograd
from lightning_memopt.runtime import install_native
from lightning_memopt.runtime.engine import native, rebuild
from lightning_memopt.runtime.engine.holding import Holding
from lightning_memopt.trace import count_all
from tests.cpu.lib.engines import bits_of

aten = torch.ops.aten


@pytest.fixture
def module() -> Any:
    if engine.loaded() is None:
        pytest.skip("there is no native engine: MEMOPT_NATIVE=0, or it cannot be built")
    return engine.loaded()


class Case(NamedTuple):
    """A call. The number of a tensor among its arguments stands for the tensor.

    writes: which of the tensors it overwrites.
    draws: it draws random numbers.
    """

    func: Any
    args: tuple
    kwargs: dict[str, Any] = {}
    writes: tuple[int, ...] = ()
    draws: bool = False


class T(int):
    """The number of a tensor."""


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(5)
    base = torch.randn(6, 8)
    return [base, base.t(), base[1:3, ::2], torch.randn(6, 8), torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(8)]


CASES = {
    "scalar": Case(aten.add.Tensor, (T(0), T(3)), {"alpha": 0.5}),
    "window": Case(aten.mul.Tensor, (T(2), T(2))),
    "transposed": Case(aten.mm.default, (T(0), T(1))),
    "list": Case(aten.cat.default, ([T(0), T(3), T(0)], 1)),
    "optional list": Case(aten.index.Tensor, (T(0), [None, T(7)])),
    "optional tensors": Case(aten.native_layer_norm.default, (T(0), [8], T(6), None, 1e-5)),
    "convolution": Case(aten.convolution.default, (T(4), T(5), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "several results": Case(aten.split_with_sizes_copy.default, (T(0), [2, 4])),
    "dtype": Case(aten._to_copy.default, (T(0),), {"dtype": torch.float64}),
    "numbers": Case(aten.sum.dim_IntList, (T(3), [1], True)),
    "text": Case(aten.gelu.default, (T(3),), {"approximate": "tanh"}),
    "factory": Case(aten.full.default, ([2, 3], 1.5), {"dtype": torch.float32, "device": torch.device("cpu")}),
    "in place": Case(aten.mul_.Tensor, (T(3), T(0)), writes=(0,)),
    "in place, a window": Case(aten.add_.Tensor, (T(2), 1.0), writes=(0,)),
    "without a generator": Case(aten.native_dropout.default, (T(0), 0.3, True), draws=True),
    "with a generator": Case(aten.bernoulli_.float, (T(3), 0.3), writes=(0,), draws=True),
    "another overload": Case(aten.rand.default, ([3, 4],), {"device": torch.device("cpu")}, draws=True),
}


def recorded(case: Case) -> tuple[Call, Mapping[int, StorageVersion[Holding]]]:
    """The call and the versions it reads; tensors that share a storage share a version. All bytes are held."""
    given = [*tensors(), torch.tensor([3, 0, 5])]
    tape: Tape[Holding] = Tape(Holding, engine.loaded())
    ids: dict[int, int] = {}
    versions = tape.versions

    def view(i: int) -> View:
        t = given[i]
        id = ids.setdefault(t.untyped_storage()._cdata, len(ids))
        if id not in versions:
            versions[id] = tape.version(id, t)
            versions[id].holding.rebuilt(t.detach().as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0))
        return tape.view(id, t)

    def argument(a: Any) -> Any:
        return [argument(x) for x in a] if type(a) is list else view(a) if type(a) is T else a

    args = [argument(a) for a in case.args]
    call = tape.call(0, case.func, args, case.kwargs, tuple(ids.values()), False)
    if case.draws:
        call.rng = torch.default_generator, torch.Generator().manual_seed(9).get_state()
    made = 100 + len(case.writes)
    call.mutates = tuple((args[i].version, 100 + k) for k, i in enumerate(case.writes))
    call.made = () if case.writes else ((0, made), (1, made + 1))[: len(case.func._schema.returns)]
    if case.func is aten.split_with_sizes_copy.default:
        call.made = ((1, made),)
    for id in [*(new for _, new in call.mutates), *(id for _, id in call.made)]:
        versions[id] = tape.version(id, torch.empty(1))
    return call, versions


def state(versions: Mapping[int, StorageVersion[Holding]]) -> list[Any]:
    seen = []
    for id, version in versions.items():
        value, holding = version.holding.value, version.holding
        bits = None if value is None else (value.dtype, value.size(), value.stride(), bits_of(value))
        seen.append((id, bits, holding.expected, holding.stream, None if value is None else value._version))
    return seen


def run(case: Case, prepared: bool, survives: Callable[[Any], bool]) -> list[Any]:
    call, versions = recorded(case)
    if prepared:
        call.prepared = rebuild.prepared(call, case.draws)
        assert call.prepared is not None
    torch.manual_seed(2)
    with below_autograd():
        rebuild.run(call, versions, survives)
    return [*state(versions), torch.get_rng_state().tolist(), torch.is_grad_enabled()]


@pytest.mark.parametrize("survive", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_call_leaves_what_python_leaves(name: str, survive: bool, module: Any) -> None:
    native_state, python_state = (run(CASES[name], prepared, lambda _: survive) for prepared in (True, False))
    assert native_state == python_state


def test_values_that_are_there_already_stay(module: Any) -> None:
    call, versions = recorded(CASES["scalar"])
    call.prepared = rebuild.prepared(call, False)
    ((_, made),) = call.made
    there = torch.zeros(3)
    versions[made].holding.rebuilt(there)
    with below_autograd():
        rebuild.run(call, versions, lambda _: False)
    assert versions[made].holding.value is there


def test_a_missing_value_is_left_to_python_before_anything_is_done(module: Any) -> None:
    call, versions = recorded(CASES["in place"])
    call.prepared = rebuild.prepared(call, False)
    versions[call.reads[1]].holding.drop()
    before = state(versions)
    assert not module.run(call, versions, lambda _: True)
    assert state(versions) == before


def test_an_error_of_the_op_is_its_own(module: Any) -> None:
    call, versions = recorded(Case(aten.mm.default, (T(0), T(3))))
    call.prepared = rebuild.prepared(call, False)
    with below_autograd(), pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        rebuild.run(call, versions, lambda _: False)


def test_an_exception_of_survives_is_passed_on(module: Any) -> None:
    call, versions = recorded(CASES["in place"])
    call.prepared = rebuild.prepared(call, False)

    def raises(_: object) -> bool:
        raise KeyboardInterrupt

    before = state(versions)
    with below_autograd(), pytest.raises(KeyboardInterrupt):
        rebuild.run(call, versions, raises)
    assert state(versions) == before


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ([T(0), 1j], {}),
        ([T(0), "text"], {}),
        ([T(0), 1 << 70], {}),
        ([T(0), 1], {"unknown": 2}),
        ([T(0), 1, 2, 3, 4], {}),
        ([], {}),
    ],
)
def test_what_is_not_prepared(args: list[Any], kwargs: dict[str, Any], module: Any) -> None:
    views = [module.View(0, torch.zeros(2)) if type(a) is T else a for a in args]
    assert module.prepare("aten::add", "Scalar", views, kwargs) is None


def test_conjugate_windows_and_unknown_ops_are_not_prepared(module: Any) -> None:
    assert module.prepare("aten::neg", "", [module.View(0, torch.zeros(2, dtype=torch.complex64).conj())], {}) is None
    assert module.prepare("aten::no_such_op", "", [], {}) is None


def test_one_line_where_it_cannot_be_built_and_none_where_it_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MEMOPT_NATIVE", raising=False)
    monkeypatch.setattr(engine, "_module", None)
    monkeypatch.setattr(engine, "_tried", False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines: list[str] = []
    install_native(lines.append)
    install_native(lines.append)
    (line,) = lines
    assert "there is no C++ compiler" in line and "Python runs instead" in line
    assert engine.loaded() is None
    call, _ = recorded(CASES["scalar"])
    assert rebuild.prepared(call, False) is None
    monkeypatch.setattr(engine, "_tried", False)
    monkeypatch.setenv("MEMOPT_NATIVE", "0")
    install_native(lines.append)
    assert lines == [line] and engine.loaded() is None


def test_a_module_that_gives_other_bits_is_not_used(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_gives_equal_bits", lambda module, name: name != "random")
    monkeypatch.delenv("MEMOPT_NATIVE", raising=False)
    monkeypatch.setattr(engine, "_module", None)
    monkeypatch.setattr(engine, "_tried", False)
    lines: list[str] = []
    install_native(lines.append)
    assert len(lines) == 1 and "its test fails: random" in lines[0]
    assert engine.loaded() is None


def test_a_module_that_does_not_know_the_objects_is_not_used(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.delitem(native._OBJECTS, "UNKNOWN")
        with pytest.raises(BuildError, match=r"does not know this engine's objects \(UNKNOWN is missing\)"):
            native._prepare(module)
    native._prepare(module)


def test_prepared_calls_have_no_memory_of_torch(module: Any) -> None:
    """Numbers given instead of tensors become tensors only while the call runs: a budget counts all bytes that live longer."""
    count_all(print)
    counts = counter()
    if counts is None:
        pytest.skip("bytes are counted by the native counter, which is not there")
    call, _ = recorded(CASES["in place, a window"])
    before = counts.live_nbytes
    kept = [rebuild.prepared(call, False) for _ in range(100)]
    assert None not in kept and counts.live_nbytes == before


@pytest.mark.parametrize("name", CASES)
def test_prepared_calls_hold_no_tensor_after_they_ran(name: str, module: Any) -> None:
    """They live as long as the plan. What they read, and a list of indices above all, would be in memory from step to step."""
    count_all(print)
    counts = counter()
    if counts is None:
        pytest.skip("bytes are counted by the native counter, which is not there")
    gc.collect()  # earlier calls of `recorded`, whose functions call themselves
    before = counts.live_nbytes
    call, versions = recorded(CASES[name])
    kept = call.prepared = rebuild.prepared(call, CASES[name].draws)
    with below_autograd():
        rebuild.run(call, versions, lambda _: False)
    del call, versions
    gc.collect()
    assert kept is not None and counts.live_nbytes == before
