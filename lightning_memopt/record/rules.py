"""Which ops may run again, and how: rules R1 and R3 (record/__init__.py).

An op's `Rule` is derived once per overload from its schema and tags, corrected by the tables below, and by what users add
with `register_op`. The tables hold what schemas do not say; each entry is found by the sweep over torch's `op_db`
(tests/cpu/record/test_op_db.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from lightning_memopt.record.tensors import is_plain, tensors_in
from lightning_memopt.torch_private import OpOverload

_ALL = 1 << 30
Handling = Literal["pure", "random", "empty", "opaque"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How an op is handled.

    `pure`: same inputs, same bits. `random`: the same under the generator state it started from. `empty`: memory whose
    content means nothing until an op overwrites it whole. `opaque`: never replayed; `why` says so in `explain`.
    `writes`: positions (or names) of arguments it mutates. `whole`: it overwrites them without reading them.
    `rewrite`: makes (func, args, kwargs) of a form without side effect, for replay. `conjugates`: its kernel takes
    conjugate views, which torch ignores inside a dispatch mode unless told otherwise. `unshared`: its views have version
    counters of their own. `makes`: how many of the tensors it returns it always writes; the rest are small, and kept.
    """

    handling: Handling
    why: str = ""
    writes: tuple[int | str, ...] = ()
    whole: bool = False
    rewrite: Callable[[OpOverload, tuple, dict], tuple[OpOverload, tuple, dict]] | None = None
    heavy: bool = False
    conjugates: bool = False
    unshared: bool = False
    makes: int = _ALL


_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# Content made by a factory may be written by what the recorder cannot see (R4).
_FACTORIES = {
    "zeros",
    "zeros_like",
    "new_zeros",
    "ones",
    "ones_like",
    "new_ones",
    "full",
    "full_like",
    "new_full",
    "_efficientzerotensor",
}
_WHOLE = {
    "bernoulli_",
    "fill_",
    "zero_",
    "copy_",
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
}
# Arguments that a kernel fills although the schema does not say so (pytorch#193671).
_HIDDEN_WRITES: dict[str, tuple[int, ...]] = {"rrelu_with_noise": (1,), "rrelu_with_noise_": (0, 1)}
# A replay that differs by one ulp flips a choice.
_CHOICES = {
    "topk",
    "sort",
    "argsort",
    "argmax",
    "argmin",
    "kthvalue",
    "median",
    "nanmedian",
    "mode",
    "unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "nonzero",
    "histc",
    "bincount",
}
# They return cells that no kernel wrote: _ctc_loss in log_alpha, _embedding_bag in bag_size and max_indices, the LSTM of
# oneDNN in its workspace.
_UNWRITTEN = {
    "_ctc_loss",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "linalg_lstsq",
    "mkldnn_rnn_layer",
}
_STORAGE = {"resize_", "set_", "resize_as_", "_resize_output_", "resize", "resize_output_", "set_data"}
_RNN = {"_cudnn_rnn", "miopen_rnn"}
# Under any dispatch mode these return wrong complex numbers (pytorch#198118); the recorder runs them outside of it.
_CONJUGATES = {"linalg_pinv", "linalg_polar", "linalg_matrix_sqrth"}
# Each piece counts its in-place changes for itself (the cells of LSTM and GRU).
_UNSHARED = {"unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}
# How many of their results kernels write whole: not the seed and offset of dropout where there is none, nor the logarithms
# that one of them pads to a multiple of 32.
_MAKES = {
    "_scaled_dot_product_flash_attention": 2,
    "_scaled_dot_product_cudnn_attention": 2,
    "_flash_attention_forward": 2,
    "_scaled_dot_product_efficient_attention": 1,
    "_efficient_attention_forward": 1,
}
_HEAVY = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_convolution",
    "mkldnn_convolution",
    "convolution_overrideable",
    "addmv",
    "mv",
    "dot",
    "linear",
    "mkldnn_rnn_layer",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_cudnn_rnn",
    "_conv_depthwise2d",
    "slow_conv3d_forward",
    "_slow_conv2d_forward",
    "_trilinear",
    "cudnn_convolution",
    "einsum",
    "_addmm_activation",
}
# Sums in an order that atomics choose: not the same bits twice on CUDA unless deterministic algorithms are on.
_ATOMIC = {
    "index_add",
    "index_add_",
    "scatter_add",
    "scatter_add_",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "scatter_reduce",
    "scatter_reduce_",
    "cumsum",
    "put_",
    "histc",
    "bincount",
    "grid_sampler_2d",
    "index_reduce",
    "index_reduce_",
    "nll_loss2d_forward",
    "_cudnn_ctc_loss",
    "_segment_reduce",
}

_registered: dict[OpOverload, Rule] = {}
_generations: list[OpOverload] = []


def register_op(op: OpOverload, rule: Handling | Rule) -> None:
    """Say how an op is to be handled: "pure" (same bits from the same inputs), "opaque" (never replayed), or a `Rule`."""
    _registered[op] = rule if isinstance(rule, Rule) else Rule(rule, "registered by the user" if rule == "opaque" else "")
    rule_of.cache_clear()
    _generations.append(op)


def rules_generation() -> int:
    """Changes whenever a rule does: what was concluded from rules is concluded anew."""
    return len(_generations)


def _written(func: OpOverload) -> tuple[int | str, ...]:
    return tuple(
        a.name if a.kwarg_only else i
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


def _norm_without_statistics(func: OpOverload, args: tuple, kwargs: dict) -> tuple[OpOverload, tuple, dict]:
    """Batch norm in training does not read its running statistics; a replay must not update them a second time."""
    names = [a.name for a in func._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    if func._schema.name == "aten::_native_batch_norm_legit":
        order = ("input", "weight", "bias", "training", "momentum", "eps")
        return torch.ops.aten._native_batch_norm_legit.no_stats, tuple(bound[n] for n in order), {}
    bound["running_mean"] = bound["running_var"] = None
    return func, tuple(bound[n] for n in names), {}


_NORMS = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_batch_norm_with_update",
}


def is_norm(name: str) -> bool:
    """Whether an op of this name (`aten::name`, with or without its overload) may update running statistics."""
    return name.partition("::")[2].partition(".")[0] in _NORMS


def trains_statistics(func: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether this call of a batch norm updates running statistics: in evaluation it reads them and is pure."""
    names = [a.name for a in func._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    return bool(bound.get("training", True))


def written_by(func: OpOverload, rule: Rule, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The plain tensors among the arguments of this call that it writes to."""
    if not rule.writes or (rule.rewrite is not None and not trains_statistics(func, args, kwargs)):
        return []
    found: list[torch.Tensor] = []
    for where in rule.writes:
        value = kwargs.get(where) if isinstance(where, str) else (args[where] if where < len(args) else None)
        found.extend(t for t in tensors_in(value) if is_plain(t))
    return found


@cache
def rule_of(func: OpOverload) -> Rule:
    """The rule of an overload. Unknown namespaces and everything with hidden state are opaque."""
    if func in _registered:
        return _registered[func]
    namespace, _, name = func._schema.name.partition("::")
    writes: tuple[Any, ...] = _written(func)
    heavy = name in _HEAVY
    if namespace not in ("aten", "prims"):
        return Rule("opaque", f"{namespace}:: is not aten: nothing is known of its operators", writes)
    if name in _NORMS and func._overloadname in ("", "default", "no_stats"):
        if func._overloadname == "no_stats":
            return Rule("pure", heavy=heavy)
        if name == "_batch_norm_with_update":
            return Rule("opaque", "batch norm whose update form has no replay", writes or (3, 4))
        return Rule("pure", writes=(3, 4), rewrite=_norm_without_statistics)
    if name in _HIDDEN_WRITES:
        return Rule("opaque", "its kernel fills an argument that autograd saved before", _HIDDEN_WRITES[name])
    if name in _STORAGE:
        return Rule("opaque", "changes a storage", writes or (0,))
    if name == "record_stream":
        return Rule("opaque", "it writes nothing, whatever its schema says", ())
    if name in _EMPTY:
        return Rule("empty")
    if name in _FACTORIES:
        return Rule("opaque", "a factory's memory may be written unseen")
    if name in _CHOICES:
        return Rule("opaque", "a choice that one ulp would flip", writes)
    if name in _UNWRITTEN:
        return Rule("opaque", "returns cells that no kernel writes", writes)
    if name in _RNN:
        return Rule("opaque", "not the same bits twice", writes)
    if "out" in writes or any(isinstance(w, str) for w in writes):
        return Rule("opaque", "writes into memory that it is given", writes)
    if name.startswith("_foreach") or name.startswith("_fused") or name in ("_local_scalar_dense", "item"):
        return Rule("opaque", "not part of a forward", writes)
    tags = func.tags
    if torch.Tag.nondeterministic_seeded in tags:
        return Rule("random", writes=writes, whole=name in _WHOLE, heavy=heavy, makes=_MAKES.get(name, _ALL))
    if torch.Tag.nondeterministic_bitwise in tags if hasattr(torch.Tag, "nondeterministic_bitwise") else False:
        return Rule("opaque", "not the same bits twice", writes)
    return Rule(
        "pure",
        writes=writes,
        whole=name in _WHOLE,
        heavy=heavy,
        conjugates=name in _CONJUGATES,
        unshared=name in _UNSHARED,
        makes=_MAKES.get(name, _ALL),
    )


@cache
def _place_of_dropout(func: OpOverload) -> int | None:
    names = [a.name for a in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


@cache
def _pure(rule: Rule) -> Rule:
    return replace(rule, handling="pure")


def rule_of_call(func: OpOverload, args: tuple, kwargs: dict) -> Rule:
    """The rule for this call: fused attention without dropout draws no numbers, whatever the operator's tag says."""
    rule = rule_of(func)
    place = _place_of_dropout(func) if rule.handling == "random" else None
    if place is None:
        return rule
    chance = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
    return _pure(rule) if chance == 0.0 else rule


def may_replay(func: OpOverload, device_type: str) -> bool:
    """R1 for this device: pure or random, and on CUDA not summed by atomics."""
    rule = rule_of(func)
    if rule.handling not in ("pure", "random", "empty"):
        return False
    if device_type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        return func._schema.name.partition("::")[2] not in _ATOMIC
    return True
