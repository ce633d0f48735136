"""Early updates where several processes train one model: reasons against them, and the names of sharded parameters."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memopt.ranks import joins, several_processes, wrapper_of
from lightning_memopt.record.gathered import units_of
from lightning_memopt.runtime.early_updates import Reason
from lightning_memopt.runtime.reduced import is_ours
from lightning_memopt.torch_private import sharded_parameters

_REDUCED = Reason(
    "gradients are reduced over several processes after the hooks",
    "Give MemOpt the model in its DistributedDataParallel, or train in one process",
)
_DISTRIBUTED = Reason("parameters are distributed tensors", "Train on one device")
_BUCKETS = Reason(
    "gradients are the buckets of DistributedDataParallel (gradient_as_bucket_view=True), which stay, so earlier updates would "
    "free nothing",
    "Do nothing: the gradients take no memory of their own",
)
_VIEWS = Reason(
    "with gradient_as_bucket_view=True, gradients are rounded in another way unless the number of processes is a power of two",
    "Set gradient_as_bucket_view=False",
)
_HOOK = Reason(
    "DistributedDataParallel has a communication hook of yours, and can have one only", "Leave register_comm_hook out"
)
_MIXED = Reason("DistributedDataParallel reduces gradients in another type (mixed_precision)", "Leave mixed_precision out")
_DELAYED = Reason("DistributedDataParallel reduces gradients later (delay_all_reduce_named_params)", "Leave that out")
_SPARSE = Reason("DistributedDataParallel reduces sparse gradients in another way", "Set sparse=False in the embeddings")
_JOIN = Reason(
    "inside of Join, a process may have no batch of its own", "Leave Join out, and give all processes equally many batches"
)


def of_processes(model: nn.Module, always: bool) -> list[Reason]:
    """The reasons, in how processes train this model together, why no parameter can be updated early. `always`: the user asks
    for early updates even where they free nothing.
    """
    if units_of(model):  # a sharded parameter's hook comes after its gradient was reduced
        return []
    if any(type(p.data).__name__ == "DTensor" for p in model.parameters()):
        return [_DISTRIBUTED]
    wrapper = wrapper_of(model)
    if wrapper is not None:
        return _of_wrapper(wrapper, model, always)
    return [_REDUCED] if several_processes() else []


def names_of(model: nn.Module) -> dict[int, str]:
    """Identity -> name of the parameters as optimizers have them: while modules have gathered weights, those are others."""
    names = {id(p): name for name, p in model.named_parameters()}
    for unit in units_of(model):
        for sharded, present, _ in sharded_parameters(unit):
            names[id(sharded)] = names[id(present)]
    return names


def _of_wrapper(wrapper: DistributedDataParallel, model: nn.Module, always: bool) -> list[Reason]:
    reasons = []
    if wrapper._get_ddp_logging_data().get("comm_hook") and not is_ours(wrapper):
        reasons.append(_HOOK)
    if wrapper.mixed_precision is not None:
        reasons.append(_MIXED)
    if wrapper._delay_all_reduce_params:
        reasons.append(_DELAYED)
    if any(getattr(module, "sparse", False) is True for module in wrapper.modules()):
        reasons.append(_SPARSE)
    if joins(model):
        reasons.append(_JOIN)
    if wrapper.gradient_as_bucket_view:
        size = wrapper.process_group.size()
        if not always:
            reasons.append(_BUCKETS)
        elif size & (size - 1):
            reasons.append(_VIEWS)
    return reasons
