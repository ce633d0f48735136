"""Settings that change the bits of ops: none of torch is forgotten, and rebuilds run under those of the forward."""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.record import numeric_flags, set_numeric_flags, watching
from lightning_memopt.record.settings import _PAIRS, SETTERS
from tests.cpu.lib.harness import assert_exact, outcome

HARMLESS = {
    # not settings of the process
    "_set_conj": "of one tensor",
    "_set_neg": "of one tensor",
    "_set_fake_constant": "of one tensor",
    "_set_tensor_metadata": "of one tensor",
    "_set_value_trace": "of one tensor",
    "_set_storage_access_error_msg": "of one storage",
    "_set_storage_data_ptr_access_error_msg": "of one storage",
    "_set_generator_metaclass": "of a class, once",
    "_set_worker_pids": "of data loaders",
    "_set_worker_signal_handlers": "of data loaders",
    "_set_thread_name": "a name",
    "_setenv": "the environment is read when torch is loaded",
    "_unsetenv": "the environment is read when torch is loaded",
    # above the ops that are recorded, or where replays do not run
    "set_autocast_*": "replays run below autocast, on what it had cast",
    "set_anomaly_enabled": "of autograd: replays run below it",
    "_set_autograd_fallback_mode": "of autograd: replays run below it",
    "_set_fwd_grad_enabled": "of autograd: replays run below it",
    "_set_grad_enabled": "of autograd: replays run below it",
    "_set_grad_layout_enforcement_enabled": "of autograd: replays run below it",
    "_set_multithreading_enabled": "of autograd: replays run below it",
    "_set_view_replay_enabled": "of autograd: replays run below it",
    "_set_override_stale_capture_stream": "of autograd: replays run below it",
    "_set_dispatch_mode": "replays run below modes",
    "_unset_dispatch_mode": "replays run below modes",
    "_set_skip_next_torch_function": "above the dispatcher",
    "_set_torch_function_state": "above the dispatcher",
    "_set_only_lift_cpu_tensors": "of torch.tensor(), above the dispatcher",
    "_set_meta_in_tls_dispatch_include": "of fake tensors",
    "_set_dtensor_allow_implicit_replication": "of distributed tensors, which are refused",
    "_SetExcludeDispatchKeyGuard": "of functionalization, which a replay is not under",
    "_dispatch_*": "the dispatcher's own state: a replay has its own",
    "_dump_local_tls_set": "prints",
    "_dynamo_*_local_dispatch_key_set": "the dispatcher's own state: a replay has its own",
    "_set_tracing_state": "of torch.jit.trace: the ops are those that are recorded",
    "_set_graph_exec*": "of TorchScript: its ops are recorded as they run",
    "_jit_*": "of TorchScript: its ops are recorded as they run",
    "_debug_set_*": "of TorchScript: its ops are recorded as they run",
    "_tracer_set_force_outplace": "of torch.jit.trace",
    "_set_should_use_format_with_string_table": "of files of TorchScript",
    # memory, devices and streams
    "_accelerator_*": "which device, stream or memory: not what is computed",
    "_cuda_setCheckpointPoolState": "memory",
    "_cuda_setMemoryFraction": "memory",
    "_cuda_setMemoryMetadata": "memory",
    "_cuda_setCubla*WorkspaceSize": "memory of cuBLAS; asking for it starts a driver, which not every machine has",
    "_cuda_setDevice": "a replay runs on the device of its tensors",
    "_cuda_setStream": "a replay runs on the stream of its op",
    "_cudnn_set_conv_benchmark_empty_cache": "memory",
    "_ensureCUDADeviceGuardSet": "which device",
    "_set_cached_tensors_enabled": "of CUDA graphs' trees",
    "_set_default_mobile_cpu_allocator": "memory",
    "_unset_default_mobile_cpu_allocator": "memory",
    "_is_default_mobile_cpu_allocator_set": "a getter",
    "_mps_setMemoryFraction": "another device",
    "_mtia_set*": "another device",
    "_cuda_tunableop_set_*": "how kernels are searched for: what was found in the forward is used again",
    "set_num_interop_threads": "how many ops run beside each other, not how each is split",
    # words
    "_cuda_set_sync_debug_mode": "warnings",
    "_logging_set_logger": "logging",
    "set_vital": "logging",
    "_set_backcompat_*_warn": "warnings",
    "_set_check_sparse_tensor_invariants": "checks, which raise",
    "_set_print_stack_traces_on_fatal_signal": "words",
    "_set_throw_on_mutable_data_ptr": "of one tensor",
    "_set_warn*": "warnings",
    # for one kind of build
    "_set_blas_preferred_backend": "of GPUs: handled in their builds",
    "_set_linalg_preferred_backend": "of GPUs: handled in their builds",
    "_set_rocm_fa_preferred_backend": "of AMD's GPUs: handled in their builds",
}
"""Setters of `torch._C` that cannot change the bits of a rebuilt op, and why."""
PYTHON = {
    ("", "__allow_nonbracketed_mutation_flag"): "whether settings may be set, for torch's tests",
    ("cudnn", "__cudnn_version"): "a version",
    ("cusparselt", "__cusparselt_version"): "a version",
    ("cusparselt", "__MAX_ALG_ID"): "a constant of the library",
    ("mha", "_is_fastpath_enabled"): "chooses which ops are called: those are recorded",
    ("mps", "_lib"): "another device",
    ("opt_einsum", "enabled"): "chooses in which order products are called: those are recorded",
    ("opt_einsum", "strategy"): "chooses in which order products are called: those are recorded",
}
"""Settings that Python files of `torch.backends` keep for themselves, and why no bit depends on them."""


@pytest.fixture(autouse=True)
def assignable() -> Iterator[None]:
    """Properties of `torch.backends` may be set, as in a user's program: torch's own test modules forbid it when imported."""
    with torch.backends.__allow_nonbracketed_mutation():
        yield


def test_every_setter_of_torch_is_handled_or_known_to_change_no_bits() -> None:
    handled = {name for owner, name in SETTERS if owner in (torch, torch._C)}
    setters = {
        name
        for name in dir(torch._C)
        if "set" in name.lower() and "get" not in name.lower() and "reset" not in name.lower() and "keyset" not in name
        if not name[0].isupper() and callable(getattr(torch._C, name))
    }
    new = {name for name in setters - handled if not any(fnmatch.fnmatchcase(name, known) for known in HARMLESS)}
    assert not new, f"put {sorted(new)} into record/settings.py, or into HARMLESS with the reason"
    assert len(setters & handled) > 20


def test_every_setting_in_python_is_handled_or_known_to_change_no_bits() -> None:
    folder = Path(next(iter(torch.backends.__path__)))
    names = {
        (".".join(path.parent.relative_to(folder).parts), name)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Global)
        for name in node.names
    }
    assert names and not names - PYTHON.keys()


@contextlib.contextmanager
def _told() -> Iterator[list[None]]:
    calls: list[None] = []
    seams, listener = watching(lambda t, address: None, lambda: calls.append(None), lambda t: t)
    with seams.listening(listener):
        yield calls


def _properties() -> Iterator[tuple[Any, str]]:
    for name, module in sorted(sys.modules.items()):
        if name.startswith("torch.backends"):
            for attribute, value in vars(type(module)).items():
                if isinstance(value, torch.backends.ContextProp):
                    yield module, attribute


def test_settings_are_noticed_however_they_are_set() -> None:
    properties = list(_properties())
    assert len(properties) > 8
    for module, name in properties:
        value = getattr(module, name)
        if value is None:
            continue  # not in this build
        with _told() as calls:
            setattr(module, name, value)
        assert calls, f"{module.__name__}.{name}"
    for get, put in _PAIRS:
        value = getattr(torch._C, get)()
        with _told() as calls, contextlib.suppress(TypeError, RuntimeError):
            getattr(torch._C, put)(*(value if isinstance(value, tuple) else (value,)))
        assert calls, put


def _other(value: Any) -> Any:
    """Another value of a setting: of an enum, a size, a name, an order or a switch the same, or the next."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (not value[0], *value[1:])
    return value[::-1] if isinstance(value, list) else value


@pytest.mark.parametrize("pair", _PAIRS, ids=[put for _, put in _PAIRS])
def test_settings_are_read_and_put_back(pair: tuple[str, str]) -> None:
    get, put = (getattr(torch._C, name) for name in pair)
    before, flags = get(), numeric_flags()
    other = _other(before)
    if before is None:
        pytest.skip("not in this build")
    try:
        put(*other) if isinstance(other, tuple) else put(other)
        if other != before:
            assert get() == other and numeric_flags() != flags
        set_numeric_flags(flags)
        assert get() == before and numeric_flags() == flags
    except RuntimeError as error:
        assert "not supported by the CPU" in str(error)
        pytest.skip(str(error))
    finally:
        set_numeric_flags(flags)


class Convolutions(nn.Module):
    """`between` is called after the first of three layers."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.x, self.between = torch.randn(16, 8, 16, 16), between

    def forward(self) -> Tensor:
        h = torch.tanh(self.layers[0](self.x))
        self.between()
        return torch.tanh(self.layers[2](torch.tanh(self.layers[1](h)))).square().mean()


def _nnpack(on: bool) -> None:
    torch.backends.nnpack.set_flags(on)


def _mkldnn(on: bool) -> None:
    torch.backends.mkldnn.enabled = on


@pytest.mark.skipif(not torch.backends.nnpack.is_available(), reason="this build has no NNPACK")
@pytest.mark.parametrize("switch", [_nnpack, _mkldnn])
@pytest.mark.parametrize("when", ["in the forward", "before backward"])
def test_rebuilds_run_under_the_kernels_of_their_forward(when: str, switch: Callable[[bool], None]) -> None:
    """Two libraries convolve with other bits."""
    nothing = lambda: None  # noqa: E731

    def step(model: nn.Module) -> Tensor:
        torch.backends.mkldnn.enabled = switch is _mkldnn
        _nnpack(True)
        loss = model()
        if when == "before backward":
            switch(False)
        return loss  # type: ignore[no-any-return]

    flags = numeric_flags()
    torch.manual_seed(0)
    model = Convolutions((lambda: switch(False)) if when == "in the forward" else nothing)
    try:
        plain = outcome(model, step, drop=False)
        rebuilt = outcome(model, step, drop=True)
        assert rebuilt.dropped
        assert_exact(plain, rebuilt)
    finally:
        set_numeric_flags(flags)
