"""Which ops may run again, and how: rules R1 and R3 (record/__init__.py).

An op's `Rule` is derived once per overload from its schema and tags. The tables below correct it where the schema is silent,
and users correct it by `register_op`. The sweep over torch's `op_db` finds each entry of the tables
(tests/cpu/record/test_op_db.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from lightning_memopt.device.determinism import DEPENDENT, cudnn_tunes, raises_where_it_varies, repeats_bits
from lightning_memopt.record.tensors import is_plain, tensors_in
from lightning_memopt.torch_private import OpOverload, custom_op_of

_ALL = 1 << 30
Handling = Literal["pure", "random", "empty", "opaque"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How an op is handled.

    handling: "pure": the same inputs give the same bits. "random": they do under the generator state that the op started from.
        "empty": the op returns memory without content. "opaque": the op never runs again.
    why: the reason why an opaque op never runs again, for `explain`.
    writes: positions (or names) of the arguments that the op mutates.
    whole: the op overwrites them without reading them.
    rewrite: turns (func, args, kwargs) into a form of the op without side effect, which a rebuild runs.
    heavy: the op computes much, so a rebuild of its results is expensive.
    conjugates: the op's kernel takes conjugate views, which torch ignores inside a dispatch mode.
    unshared: the op's views have their own version counters.
    makes: how many of its result tensors the op always writes, counted from the first; the others are small, and kept.
    counted_first: torch increments the version counters of what the op writes before it runs, not after.
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
    counted_first: bool = False


_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# Code that the recorder cannot see may write to the memory that a factory made (R4).
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
# Their results are choices, which a difference of one ulp between forward and rebuild could flip.
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
# Their kernels leave cells of some results unwritten: of log_alpha (_ctc_loss), of bag_size and max_indices (_embedding_bag),
# and of the workspace of oneDNN's LSTM.
_UNWRITTEN = {
    "_ctc_loss",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "linalg_lstsq",
    "mkldnn_rnn_layer",
}
_STORAGE = {"resize_", "set_", "resize_as_", "_resize_output_", "resize", "resize_output_", "set_data"}
_RNN = {"_cudnn_rnn", "miopen_rnn"}
# Under any dispatch mode these return wrong complex numbers (pytorch#198118), so the recorder runs them outside of its mode.
_CONJUGATES = {"linalg_pinv", "linalg_polar", "linalg_matrix_sqrth"}
# Each piece that they return has its own version counter (the cells of LSTM and GRU use them).
_UNSHARED = {"unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}
# How many of the first results their kernels always write whole. Without dropout they leave its seed and offset unwritten, and
# the efficient ones leave the padding of the logarithms to a multiple of 32 unwritten.
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
_registered: dict[OpOverload, Rule] = {}
_generations: list[OpOverload] = []


def register_op(op: OpOverload, rule: Handling | Rule) -> None:
    """Say how an op is handled: "pure" (same bits from the same inputs), "opaque" (it never runs again), or a `Rule`."""
    if not isinstance(rule, Rule):
        rule = Rule(rule, "registered by the user" if rule == "opaque" else "", _written(op))
    _registered[op] = replace(rule, counted_first=_counted_first(op))
    rule_of.cache_clear()
    KNOWN.clear()
    _generations.append(op)


def rules_generation() -> int:
    """A number that changes whenever a rule does."""
    return len(_generations)


def _written(func: OpOverload) -> tuple[int | str, ...]:
    return tuple(
        a.name if a.kwarg_only else i
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


def _counted_first(func: OpOverload) -> bool:
    """Whether torch counts the op's writes before the op runs, as for ops that `torch.library.custom_op` registers."""
    return bool(_written(func)) and custom_op_of(func) is not None


def _norm_without_statistics(func: OpOverload, args: tuple, kwargs: dict) -> tuple[OpOverload, tuple, dict]:
    """Batch norm without its running statistics: in training it does not read them; a rebuild must not update them again."""
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
    return _packet(name) in _NORMS


def _packet(name: str) -> str:
    return name.partition("::")[2].partition(".")[0]


def is_unshared(name: str) -> bool:
    """Whether an op of this name (`aten::name`, with or without its overload) gives views with their own version counters."""
    return _packet(name) in _UNSHARED


def trains_statistics(func: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether this call of a batch norm updates running statistics; in evaluation it only reads them, and is pure."""
    names = [a.name for a in func._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    return bool(bound.get("training", True))


def written_by(func: OpOverload, rule: Rule, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The plain tensors among the arguments of this call that it writes to."""
    if not rule.writes or (rule.rewrite is not None and not trains_statistics(func, args, kwargs)):
        return []
    targets: list[torch.Tensor] = []
    for where in rule.writes:
        if isinstance(where, str):
            value = kwargs.get(where)
        else:
            value = args[where] if where < len(args) else None
        if isinstance(value, torch.Tensor):
            if is_plain(value):
                targets.append(value)
        else:
            targets += filter(is_plain, tensors_in(value))
    return targets


@cache
def rule_of(func: OpOverload) -> Rule:
    """The rule of an overload. Ops of unknown namespaces and ops with hidden state are opaque."""
    if func in _registered:
        return _registered[func]
    namespace, _, name = func._schema.name.partition("::")
    writes: tuple[Any, ...] = _written(func)
    heavy = name in _HEAVY
    if namespace not in ("aten", "prims"):
        why = f"{namespace}:: is not aten: nothing is known of its operators"
        return Rule("opaque", why, writes, counted_first=_counted_first(func))
    if name in _NORMS and func._overloadname in ("", "default", "no_stats"):
        if func._overloadname == "no_stats":
            return Rule("pure", heavy=heavy)
        if name == "_batch_norm_with_update":
            return Rule("opaque", "batch norm in a form that always updates its statistics", writes or (3, 4))
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
    if getattr(torch.Tag, "nondeterministic_bitwise", None) in tags:
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
def _dropout_position(func: OpOverload) -> int | None:
    names = [a.name for a in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


@cache
def _pure(rule: Rule) -> Rule:
    return replace(rule, handling="pure")


KNOWN: dict[int, Rule] = {}
"""Identity of an overload -> its rule, because the hash of an overload is slow (Python computes it). The cache of `rule_of`,
which is cleared together with this one, keeps the overload alive, so that no other overload gets its identity.
"""


def rule_of_call(func: OpOverload, args: tuple, kwargs: dict) -> Rule:
    """The rule for this call: fused attention without dropout draws no numbers, whatever the operator's tag says."""
    rule = KNOWN.get(id(func))
    if rule is None:
        rule = KNOWN[id(func)] = rule_of(func)
    position = _dropout_position(func) if rule.handling == "random" else None
    if position is None:
        return rule
    dropout_p = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return _pure(rule) if dropout_p == 0.0 else rule


@cache
def _non_blocking_position(func: OpOverload) -> int | None:
    names = [a.name for a in func._schema.arguments]
    return names.index("non_blocking") if "non_blocking" in names else None


def blocking(func: OpOverload, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of an op, changed so that a copy is complete when the op returns.

    User code waits for a copy to the host before it reads the result. Nobody waits when a rebuild makes the copy.
    """
    position = _non_blocking_position(func)
    if position is None:
        return args, kwargs
    if kwargs.get("non_blocking"):
        return args, kwargs | {"non_blocking": False}
    if position < len(args) and args[position]:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, kwargs


def may_run_again(func: OpOverload, device_type: str) -> bool:
    """Whether R1 lets the op run again on this type of device: it is not opaque, and the device gives the same bits again."""
    if rule_of(func).handling not in ("pure", "random", "empty"):
        return False
    name = _dependent(func)
    return name is None or repeats_bits(name, device_type)


@cache
def _dependent(func: OpOverload) -> str | None:
    """The name of the op if its bits depend on the device, else None."""
    name = func._schema.name.partition("::")[2]
    return name if name in DEPENDENT else None


def rules_in_force() -> tuple[Any, ...]:
    """A value that changes with every rule and every setting that decides which ops may run again. When it changes, earlier
    decisions are void.
    """
    return rules_generation(), raises_where_it_varies(), cudnn_tunes()
