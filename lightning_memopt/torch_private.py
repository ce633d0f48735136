"""Every private name of torch that this package uses, with the reason. Check this file for each new version of torch.

A name that the installed torch lacks raises UnsupportedError when it is used, not when this module is imported. `missing()`
lists all such names, and tests/cpu/record/test_torch_private.py checks it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch._ops import HigherOrderOperator, OpOverload  # the types of ops, as dispatch modes get them
from torch.utils._python_dispatch import TorchDispatchMode  # documented, although its module is private
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only  # tensors in whatever users return

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.live_objects import live_objects

__all__ = ["HigherOrderOperator", "OpOverload", "TorchDispatchMode", "tree_leaves", "tree_map", "tree_map_only"]

_MISSING: list[str] = []


def _named(path: str) -> Any:
    """The object with this dotted name. If there is none, a function that raises UnsupportedError."""
    module, _, names = path.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        for name in names.split("."):
            owner = getattr(owner, name)
        return owner
    except (ImportError, AttributeError):
        name = path.replace(":", ".")
    _MISSING.append(name)

    def absent(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"torch {torch.__version__} has no {name}: install a version of torch that is supported")

    return absent


# -- storages ----------------------------------------------------------------------------------------

storage_id: Callable[[torch.Tensor], int] = _named("torch:_C._storage_id")  # which storage a tensor is on
storage_use_count: Callable[[int], int] = _named("torch:_C._storage_Use_Count")  # who holds a storage besides the engine
tensor_use_count: Callable[[torch.Tensor], int] = _named("torch:Tensor._use_count")  # whether autograd alone holds a gradient
storage_address: Callable[[torch.UntypedStorage], int] = _named("torch:_C.StorageBase.data_ptr")  # tells no listener
storage_of_weak: Callable[[int], Any] = _named("torch:UntypedStorage._new_with_weak_ptr")  # the storage, while it lives
free_weak: Callable[[int], None] = _named("torch:UntypedStorage._free_weak_ref")  # ends a weak reference
weak_expired: Callable[[int], bool] = _named("torch:UntypedStorage._expired")  # whether a storage is freed
conjugate: Callable[[torch.Tensor], torch.Tensor] = _named("torch:_conj")  # a saved view that is conjugate, made again
negative: Callable[[torch.Tensor], torch.Tensor] = _named("torch:_neg_view")  # a saved view that is negative, made again

# -- dispatch ----------------------------------------------------------------------------------------

no_dispatch_modes = _named("torch:_C._DisableTorchDispatch")  # our own ops do not count as ops of the step
no_torch_functions = _named("torch:_C.DisableTorchFunction")  # nor do users' subclasses see them
below_autograd_keys = _named("torch:_C._AutoDispatchBelowAutograd")  # rebuilds record no history (R6)
excluding_keys = _named("torch:_C._ExcludeDispatchKeyGuard")  # rebuilds run without autocast and vmap's random mode (R6)
set_excluded_keys = _named("torch:_C._SetExcludeDispatchKeyGuard")  # aliases share version counters inside of a mode
DispatchKey = _named("torch:_C.DispatchKey")  # names of the keys above
DispatchKeySet = _named("torch:_C.DispatchKeySet")  # sets of them
has_kernel: Callable[[str, str], bool] = _named("torch:_C._dispatch_has_kernel_for_dispatch_key")  # rules of autocast
dispatch_key = _named("torch:_C._dispatch_key_parse")  # keys that Python does not name
makers_on_default_device = _named("torch.utils._device:_device_constructors")  # what `with torch.device(...)` applies to
parse_to: Any = _named("torch:_C._nn._parse_to")  # which device a module is moved to (fitting/operators.py)
set_grad_enabled: Callable[[bool], None] = _named("torch:_C._set_grad_enabled")  # the grad mode of a call, without a context
CHECKPOINT_GENERATOR = _named("torch.utils.checkpoint:_checkpoint_without_reentrant_generator").__name__  # taken off in fit
current_mode = _named("torch.utils._python_dispatch:_get_current_dispatch_mode")  # whether our mode is the innermost
current_modes = _named("torch.utils._python_dispatch:_get_current_dispatch_mode_stack")  # the modes that are on
pop_mode = _named("torch.utils._python_dispatch:_pop_mode")  # to enter our mode beneath others, and to remove it from there
push_mode = _named("torch.utils._python_dispatch:_push_mode")  # the same
without_modes = _named("torch.utils._python_dispatch:_disable_current_modes")  # to look at tensors without being seen
custom_op_of = _named("torch._library.custom_ops:_maybe_get_opdef")  # whether torch counts an op's writes before it runs
PYTHON_KERNELS: set[str] = _named("torch.library:_impls")  # whether an op of torch runs Python code ("aten/mul.Tensor/CPU")
schema_of = _named("torch:_C._get_schema")  # kinds of an op's arguments, by its name

# -- autograd ----------------------------------------------------------------------------------------

backward_task: Callable[[], int] = _named("torch:_C._current_graph_task_id")  # whether a backward runs in this thread
backward_keeps_graph: Callable[[], bool] = _named("torch:_C._autograd._get_current_graph_task_keep_graph")  # retain_graph
current_node = _named("torch:_C._current_autograd_node")  # whether a node of a backward runs, or what comes after all nodes
is_copied_on_write: Callable[[torch.Tensor], bool] = _named("torch:_C._is_cow_tensor")  # whether others have its bytes
queue_callback = _named("torch.autograd:Variable._execution_engine.queue_callback")  # called when backward has run its nodes
innermost_hooks = _named("torch:_C._autograd._top_saved_tensors_default_hooks")  # whether our hooks are the innermost
hooks_are_enabled: Callable[[], bool] = _named("torch:_C._autograd._saved_tensors_hooks_is_enabled")  # may ours be used
AUTOGRAD = _named("torch:_C._autograd")  # where functions of hooks are replaced (exposure.py, native.py)
compilation = _named("torch._guards:CompileContext.try_get")  # whether dynamo compiles in this thread, when hooks are off
functorch_level = _named("torch:_C._functorch.peek_interpreter_stack")  # whether a transform of torch.func runs
without_functorch = _named("torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack")  # rebuilds inside of one

# -- compilers, profilers, settings ------------------------------------------------------------------

CHECKPOINT_TAG = "recompute"  # key in the meta of a joint graph's node: the policy of the user's checkpointing for it
MUTATED_INPUT = "mutated_input"  # attribute of the description of a joint graph's result: into which input it is copied
PARTITIONER_TAG = "partitioner_tag"  # key in the meta of a joint graph's node: whether it is of the forward or the backward
WRITES_INPUT = "must_be_in_forward"  # its value for a node at the end that writes a result of the forward to an input
EVAL_FRAME = _named("torch:_C._dynamo.eval_frame")  # marks on code objects that keep dynamo away (uncompiled.py)
COMPILED_FRAME = ("compile_wrapper", "torch._dynamo.eval_frame")  # function and module below which compiled code runs
KINETO_PROFILE = _named("torch.profiler.profiler:_KinetoProfile")  # torch.profiler.profile, and what is derived from it
profiler_is_on: Callable[[], bool] = _named("torch:autograd._profiler_enabled")  # whose profiler it would be
record_function = _named("torch:_C._profiler._RecordFunctionFast")  # marks ops in a profile of the allocator
allocator_snapshot = _named("torch.cuda.memory:_snapshot")  # settings, segments and record of the caching allocator
allocator_history = _named("torch.cuda.memory:_record_memory_history")  # record of its requests (trace/requests.py)
WARNED_CAPTURABLE = "_warned_capturable_if_run_uncaptured"  # attribute of optimizers: stops a check of options on CUDA
CXX11_ABI: bool = _named("torch:_C._GLIBCXX_USE_CXX11_ABI")  # how the native allocator must be compiled
JOIN_CONFIG = "_join_config"  # attribute of wrappers: whether some ranks may have no batch
JOIN_DIVIDES = "_divide_by_initial_world_size"  # attribute of wrappers in `Join`: whether gradients are divided as without it
register_comm_hook = _named("torch:_C._distributed_c10d._register_comm_hook")  # without a note on the wrapper, which is copied
C: Any = _named("torch:_C")  # getters and setters of numeric settings, each by name (settings.py); parts of CUDA builds

# -- sharded modules (FSDP2) -------------------------------------------------------------------------
# Imported when a model is sharded, not before: the module takes long to import.

_FSDP2 = "torch.distributed.fsdp._fully_shard"


UNIT_HOOKS = ("unshard", "wait_for_unshard", "reshard", "pre_backward", "post_backward", "finalize_backward")
"""Methods of a unit in which its weights are gathered and freed, and its gradients are reduced."""
COLLECTIVE_HOOKS = ("unshard", "post_backward")
"""Those of them that run a collective themselves."""
FREEING_HOOK = "reshard"
"""The one that frees weights, where `frees_weights` says so. Others call it."""
GLOO_THREADS = "pt_gloo_runloop"
"""The name that torch gives to the threads in which gloo runs collectives (Linux cuts names after 15 characters)."""


FAKE = "fake"
"""The backend of a process group of which one rank alone exists, and whose collectives return at once."""


def fake_store() -> Any:
    """What a group of that backend is made with. Torch knows the backend from then on."""
    return _named("torch.testing._internal.distributed.fake_pg:FakeStore")()


def unit_class() -> Any:
    """The class whose methods gather the weights of a unit, free them, and reduce gradients."""
    return _named(f"{_FSDP2}._fsdp_param_group:FSDPParamGroup")


@cache
def _state_of() -> Any:
    return _named(f"{_FSDP2}._fully_shard:_get_module_fsdp_state")


def may_be_sharded() -> bool:
    """Whether FSDP2 is imported; where it is not, no module is sharded by it."""
    return "torch.distributed.fsdp" in sys.modules


def fsdp_units(module: Any) -> list[Any]:
    """The units (`unit_class()`) of one module; an empty list if it is not sharded by FSDP2."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not isinstance(module, kind):
        return []
    state = _state_of()(module)
    if state is None:
        return []
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11: one unit for each module


def is_plainly_sharded(unit: Any) -> bool:
    """Whether a unit is split over the processes of a 1-D mesh, and its weights are gathered unchanged."""
    mesh = _named(f"{_FSDP2}._fsdp_common:FSDPMeshInfo")
    parameters = unit.fsdp_params
    extended = any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in parameters)
    again = any(getattr(p, "_unsharded_dtensor_spec", None) is not None for p in parameters)  # a weight that is split twice
    return type(unit.mesh_info) is mesh and unit.mesh_info.mesh.ndim == 1 and not (extended or again)


def places_of_weights(unit: Any) -> list[tuple[Any, str]]:
    """(module, name of its parameter) of every weight of a unit, for each module that shares it."""
    infos = [p._module_info for p in unit.fsdp_params]
    shared = (zip(i.shared_modules, i.shared_param_names, strict=True) for i in infos)
    return [*((i.module, i.param_name) for i in infos), *(place for places in shared for place in places)]


def sharded_parameters(unit: Any) -> list[tuple[Any, Any, Any]]:
    """(parameter of the optimizer, parameter that its module has now, gathered weight or None) of each weight of a unit."""
    infos = ((p, p._module_info) for p in unit.fsdp_params)
    return [(p.sharded_param, i.module._parameters[i.param_name], unsharded_parameter(p)) for p, i in infos]


def in_pipeline(model: Any) -> bool:
    """Whether a module of the model belongs to a stage of a pipeline, whose schedule runs several forwards before backwards."""
    base = _named("torch.distributed.pipelining.stage:_PipelineStageBase")
    stages = live_objects(lambda kind: base in kind.__mro__)
    modules = {id(module) for module in model.modules()}
    return any(id(module) in modules for stage in stages for module in stage.submod.modules())


def keeps_weights(unit: Any) -> bool:
    """Whether a unit's weights stay in memory from its forward to its backward."""
    return not unit._reshard_after_forward


def frees_weights(unit: Any) -> bool:
    """Whether the hook of a unit that frees weights does so now."""
    return unit._training_state is not _in_forward() or not keeps_weights(unit)


@cache
def _in_forward() -> Any:
    """The state of a unit in its forward, until its weights were freed, or were not."""
    return _named(f"{_FSDP2}._fsdp_common:TrainingState.FORWARD")


def unsharded_parameter(parameter: Any) -> Any:
    """The gathered weight of a parameter of a unit, one object for all steps; None before it was gathered."""
    return getattr(parameter, "_unsharded_param", None)


def local_tensor(t: Any) -> Any:
    """The part of a distributed tensor in this process; any other tensor unchanged."""
    return getattr(t, "_local_tensor", t)


_GRAD: Any = torch.Tensor.grad


def accumulation_hooks(p: torch.Tensor) -> list[Any]:
    """What is called when autograd has accumulated the gradient of this leaf."""
    return list(_accumulation_hooks(p).values())


def remove_accumulation_hook(parameters: Iterable[torch.Tensor], hook: Callable[..., None]) -> None:
    """Remove this hook of leaves, however often it was registered: an interrupt may come before there is a handle of it."""
    for p in parameters:
        hooks = _accumulation_hooks(p)
        for key in [key for key, other in hooks.items() if other == hook]:
            del hooks[key]


def _accumulation_hooks(p: torch.Tensor) -> dict[int, Any]:
    """Those of a leaf, by their keys."""
    return getattr(p, "_post_accumulate_grad_hooks", None) or {}


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks of this module run in backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks of this module run in the forward or in backward."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or has_backward_hooks(module)


def gradient_of(t: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a leaf, or of a tensor that retains it; None if there is none.

    Torch warns if `grad` of any other tensor is read, and a model's parameters may be such tensors:
    `torch.func.functional_call` replaces parameters by whatever it is given.

    `is_leaf` is not read for a view of a tensor with a history, because torch takes a lock of the view for that. Another thread
    may have that lock and wait for Python's, because its ops are recorded.

    It uses torch's own getter, because `grad` of a parameter may be a property that tells listeners (runtime/gradients.py).
    """
    try:
        base = t._base
        leaf = t.is_leaf if base is None or not base.requires_grad else False
        return _GRAD.__get__(t) if leaf or t.retains_grad else None
    except RuntimeError:
        return None  # the user wrote into a view where torch forbids it, after which each use of autograd raises


# -- compiled regions --------------------------------------------------------------------------------
# Imported when something was compiled, not before: the compilers take seconds to import.


def inductor_config() -> Any:
    """Settings of Inductor: `custom_partitioner_fn` splits a joint graph into forward and backward."""
    return _named("torch._inductor:config")


def autograd_config() -> Any:
    """Settings of AOT autograd: with `enable_autograd_cache`, it does not call the partitioner for a graph that it knows."""
    return _named("torch._functorch:config")


def partitioner_class() -> Any:
    """The class of which a `custom_partitioner_fn` must be an instance."""
    return _named("torch._inductor.custom_graph_pass:CustomPartitionerFn")


def scheduler_pass_class() -> Any:
    """What a pass over Inductor's kernels must be an instance of, so that code it made is cached; None where there is none."""
    return getattr(importlib.import_module("torch._inductor.custom_graph_pass"), "CustomSchedulerPass", None)


NEVER_MOVED = ("_CollectiveKernel", "_WaitKernel", "Conditional", "WhileLoop", "InvokeSubgraph")
"""Kernels of Inductor that all ranks run in one order, or that may have such kernels."""


class KernelBuffer(NamedTuple):
    """A buffer of Inductor's: the kernel that allocates it (None: it is given), those that use it, whether it is returned."""

    maker: Any
    users: tuple[Any, ...]
    nbytes: int
    returned: bool


def _names(names: Iterable[str]) -> Any:
    return _named("torch.utils._ordered_set:OrderedSet")(names)


def _scheduling() -> tuple[Any, Any, Any]:
    """Inductor's estimates, its scheduler, and the names of what the code returns."""
    graph = _named("torch._inductor.virtualized:V").graph
    return importlib.import_module("torch._inductor.memory"), graph.scheduler, _names(graph.get_output_names())


def inductors_order(nodes: list[Any]) -> list[Any]:
    """The order in which Inductor would run its kernels. Each knows then which ones it needs, and their buffers."""
    memory, scheduler, returned = _scheduling()
    given = _names(_named("torch._inductor.virtualized:V").graph.graph_inputs)
    arguments = scheduler.name_to_buf, scheduler.name_to_fused_node, given, returned
    if inductor_config().reorder_for_peak_memory:
        return list(memory.reorder_for_peak_memory(nodes, *arguments))
    memory.prepare_planning_info(nodes, *arguments)
    return nodes


def _given(nodes: Sequence[Any]) -> dict[str, Any]:
    """Name -> what is given to the code and may be freed within it."""
    memory, _, _ = _scheduling()
    names = _names(_named("torch._inductor.virtualized:V").graph.graph_inputs)
    given: dict[str, Any] = memory.get_freeable_input_buf(list(nodes), names)
    return given


def estimated_peak(nodes: list[Any]) -> int:
    """The most bytes at once, as Inductor estimates them for kernels in this order."""
    memory, _, returned = _scheduling()
    return int(memory.estimate_peak_memory(nodes, _given(nodes), returned)[0])


def kernel_buffers(nodes: Sequence[Any]) -> Iterable[KernelBuffer]:
    """The buffers of kernels that were asked for `inductors_order`, as its estimate counts them.

    A kernel with several results allocates them at once; each is freed by itself.
    """
    _, _, returned = _scheduling()
    for name, buffer in _given(nodes).items():
        info = buffer.mpi_buffer
        yield KernelBuffer(None, tuple(info.succ_nodes), info.size_free, name in returned)
    made = {buffer.get_name(): (node, buffer) for node in nodes for buffer in node.get_outputs()}
    for name, (node, buffer) in made.items():
        info, maker, source = buffer.mpi_buffer, node, buffer
        if not info.size_free:
            continue
        while not source.mpi_buffer.size_alloc:
            maker, source = made[source.node.inputs[0].get_name()]
        yield KernelBuffer(maker, tuple(info.succ_nodes) or (node,), info.size_free, name in returned)


AOT_BACKENDS, AOT_ENTRY = "torch._dynamo.backends.common", "aot_module_simplified"
"""The module with the function by which backends reach AOT autograd; wrapped in compiled/backends.py."""
DYNAMO = "torch._dynamo.eval_frame"
INDUCTOR = "torch._inductor.compile_fx"
INDUCTOR_CODE = "torch._inductor.output_code"


def wrapper_class() -> Any:
    """The class of what `torch.compile(module)` returns; None if dynamo was not imported."""
    return _wrapper_class() if DYNAMO in sys.modules else None


@cache
def _wrapper_class() -> Any:
    return _named(f"{DYNAMO}:OptimizedModule")


@cache
def _backends() -> Any:
    return _named(f"{DYNAMO}:cached_backends")


def inductor_compiles() -> bool:
    """Whether Inductor may compile in this process, because it is imported, or the first call of compiled code will import it.

    In the latter case dynamo knows a backend. (For code that it never compiles, such as an optimizer's step, it notes None.)
    """
    return INDUCTOR in sys.modules or (DYNAMO in sys.modules and any(map(callable, list(_backends().values()))))


def inlining_code() -> Any:
    """The code object that dynamo compiles for a whole call of any module of torch.nn itself."""
    return _named("torch._dynamo.external_utils:wrap_inline")(lambda: None).__code__


def generated_code_class() -> Any:
    """The class of what Inductor makes of a graph. A call of it runs the code (compiled_code.py)."""
    return _named(f"{INDUCTOR_CODE}:CompiledFxGraph")


def aot_backends() -> Any:
    """The module `AOT_BACKENDS`, imported."""
    return importlib.import_module(AOT_BACKENDS)


def split_by_cut(*arguments: Any, **options: Any) -> Any:
    """Inductor's default partitioner."""
    return _named("functorch.compile:min_cut_rematerialization_partition")(*arguments, **options)


def split_in_place(*arguments: Any, **options: Any) -> Any:
    """The partitioner that leaves each op in its place."""
    return _named("functorch.compile:default_partition")(*arguments, **options)


def told_of_code(hook: Callable[[Any, Any], None]) -> Any:
    """Call `hook(code, compiled code)` when dynamo has compiled a frame. The handle's `remove()` ends that."""
    return _named("torch._dynamo.convert_frame:register_bytecode_hook")(hook)


def compiled_codes() -> list[Any]:
    """The code objects that dynamo has compiled and that are still alive."""
    codes = (weak() for weak in _named("torch._dynamo.convert_frame:input_codes").seen)
    return [code for code in codes if code is not None]


def compile_again(code: Any) -> None:
    """Make dynamo compile a frame of this code anew when it next runs."""
    _named("torch._dynamo.eval_frame:reset_code")(code)


def unique_nodes(module: Any) -> None:
    """Merge nodes of a joint graph that compute the same, as torch's partitioner does first."""
    module.graph.eliminate_dead_code()
    module.graph = _named("torch._functorch.compile_utils:fx_graph_cse")(module.graph)
    module.recompile()


@cache
def _symbolic_shapes() -> Any:
    return importlib.import_module("torch.fx.experimental.symbolic_shapes")


def hint_of(size: torch.SymInt) -> int | None:
    """The value of a symbolic size for the batch being compiled, without a guard; None if it depends on values of tensors."""
    if not size.node.has_hint():
        return None
    shapes = _symbolic_shapes()
    hint = getattr(shapes, "optimization_hint", None) or shapes.size_hint  # torch < 2.13
    return int(hint(size))


ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (torch.UntypedStorage, "_cdata"),  # the address of a storage
    (torch.UntypedStorage, "_weak_ref"),  # a weak reference that keeps the address from being used again
    (torch.Tensor, "_version"),  # the version counter
    (torch.Tensor, "_base"),  # whether a view is one of a parameter
    (torch.Tensor, "_is_zerotensor"),  # zeros of tangents have no bytes
    (torch.ops.aten.add.Tensor, "_op"),  # the op without Python's wrapper
    (torch.ops.aten.add.Tensor, "_name"),  # its name, without making a string
    (torch.ops.aten.add.Tensor, "_schema"),  # which arguments it writes
    (torch.ops.aten.add.Tensor, "_overloadpacket"),  # its other overloads
    (torch.ops.aten.add.Tensor, "_overloadname"),  # which of them it is
    (torch.autograd, "_engine_run_backward"),  # which all backwards of Python run (backwards.py)
    (torch.autograd.forward_ad, "_current_level"),  # whether a level of forward-mode AD is open
    (torch.nn.parallel.DistributedDataParallel, "_active_ddp_module"),  # the wrapper of a model that was given without it
    (torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data"),  # the bytes of its buckets
    (torch.nn.Module, "_compiled_call_impl"),  # the seam at which calls of modules are seen (calls.py)
)
"""Private attributes that are read directly where they are needed, because a function around each would cost a call per op."""


def missing() -> list[str]:
    """The private names that this package uses and that the installed torch does not have."""
    attributes = [f"{owner}.{name}" for owner, name in ATTRIBUTES if not hasattr(owner, name)]
    attributes += _missing_of_fsdp2()
    return [*_MISSING, *attributes]


def _missing_of_fsdp2() -> list[str]:
    """The private names of FSDP2 that the installed torch does not have; imports FSDP2."""
    group, param = unit_class(), _named(f"{_FSDP2}._fsdp_param:FSDPParam")
    _state_of()
    _in_forward()
    fake_store()
    _named(f"{_FSDP2}._fsdp_common:FSDPMeshInfo")
    _named("torch.distributed.pipelining.stage:_PipelineStageBase")
    methods = [(group, name) for name in (*UNIT_HOOKS, "pre_forward", "post_forward", "_reshard_after_forward")]
    return [f"{owner}.{name}" for owner, name in (*methods, (param, "_sharded_local_tensor")) if not hasattr(owner, name)]


def default_device() -> torch.device | None:
    """The device of `with torch.device(...)` or `torch.set_default_device`; None if none is set."""
    return cast("torch.device | None", _named("torch.utils._device:CURRENT_DEVICE"))
