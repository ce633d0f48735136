"""A dispatch mode in which ops make tensors without computing their bytes.

An unfilled tensor is an ordinary CPU tensor whose memory nobody has touched: the operating system gives it addresses, and no
pages. So autograd, optimizers, hooks and our own recorder see what they see in a real step, torch's allocator counts what it
counts in a real step, and a model of any size takes a step on a laptop.

What an op returns is asked of its kernel for the `meta` device. Three kinds of ops run for real: views, ops whose inputs have
bytes and are small (positions, masks, counters of optimizers), and ops that have no kernel for `meta`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from lightning_memopt.fitting.values import GIVEN, Values, asked
from lightning_memopt.native.counting import counter
from lightning_memopt.torch_private import (
    OpOverload,
    TorchDispatchMode,
    free_weak,
    no_dispatch_modes,
    storage_id,
    storage_of_weak,
    tree_map,
)

SMALL = 1 << 24
"""Maximum number of bytes of an op's inputs and outputs with which it runs for real."""
_LOOKS = 1024
"""Number of ops between two calls of `Unfilled.look`."""
_META = torch.device("meta")
_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}
"""Ops that move no bytes, although neither their schemas nor their tags say so."""
_FILLS = {"aten::zero_", "aten::fill_", "aten::copy_"}
"""Ops that overwrite every byte of their first argument."""
_TOPK = "aten::topk"
_ARGMAX = "aten::argmax"
"""The ops by which a mixture of experts chooses experts. Of unfilled scores they choose all experts equally often."""
_NUMBER = "aten::_local_scalar_dense"
_ANSWERS = {"aten::isnan": torch.zeros, "aten::all": torch.ones, "aten::_is_all_true": torch.ones}
"""Conditions on unfilled tensors whose answers are known: nothing is NaN, and what is asked about all is true of all."""
_CONTIGUOUS = {
    "aten::native_layer_norm_backward",
    "aten::_softmax_backward_data",
    "aten::_log_softmax_backward_data",
    "aten::mse_loss_backward",
}
_FORMAT_OF = {"aten::native_batch_norm": 0, "aten::native_batch_norm_backward": 1}
_STRIDES_OF = {"aten::softplus_backward": 0}
"""Ops to whose first result the kernel for `meta` gives strides that no device gives it. It is contiguous, or has the memory
format or the strides of the argument with this index.
"""
_NAMES = {_NUMBER: "item", "aten::_is_all_true": "all"}
"""What ops are called in a question."""
_KEEPS = {"aten::mse_loss", "aten::smooth_l1_loss", "aten::binary_cross_entropy", "aten::soft_margin_loss", "aten::col2im"}
"""Ops whose result keeps memory for as many elements as the first argument has, in which it was made before it was reduced."""
_FINITE = {"aten::_amp_foreach_non_finite_check_and_unscale_": 1}
"""Name -> the argument that it writes only if it meets a value that is not finite: a step is planned in which there is none."""


class Unfilled(TorchDispatchMode):
    """Within, ops make unfilled tensors.

    values: the user's function that gives values; where it gives none, they are assumed.
    assumed: op that returns a number to Python -> how often the number was assumed, because the tensor is unfilled. After
        GIVEN, the op's name stands for those that `values` gave.
    ran: op without a kernel for `meta` -> how often it ran for real.
    ops: how many ops have run.
    look: is called with that number, each time some more have run; None: nobody looks.
    """

    sees_last = True  # it runs the ops, so other modes must see them first (record/modes.py)

    def __init__(self, values: Values | None = None) -> None:
        super().__init__()
        self._values = values
        self.assumed: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self.ops = 0
        self.look: Callable[[int], None] | None = None
        self._told: Callable[..., None] | None = None
        self._unfilled: dict[int, int] = {}  # address of a storage -> a weak reference, which keeps the address from another
        self._on_device: dict[int, int] = {}  # the same
        self._asked: dict[Hashable, Any] = {}  # op and layouts of its arguments -> what its kernel for `meta` makes

    def close(self) -> None:
        """Forget which tensors are unfilled."""
        for weak in (self._unfilled, self._on_device):
            while weak:
                free_weak(weak.popitem()[1])

    def moves(self, values: Any) -> None:
        """Note that these tensors would be on the card, and all that ops make from them."""
        for t in _tensors(values):
            if storage_id(t) not in self._on_device:
                self._on_device[storage_id(t)] = t.untyped_storage()._weak_ref()  # type: ignore[assignment]

    def is_on_device(self, t: torch.Tensor) -> bool:
        return any(storage_id(part) in self._on_device for part in _tensors(t))

    @property
    def host_nbytes(self) -> int:
        """Bytes of all tensors of the process that were not moved to the card; 0 if nobody counts them."""
        counted = counter()
        if counted is None:
            return 0
        with no_dispatch_modes():
            alive = (storage_of_weak(weak) for weak in self._on_device.values())
            return counted.live_nbytes - sum(storage.nbytes() for storage in alive if storage is not None)

    @contextlib.contextmanager
    def beneath(self, told: Callable[..., None]) -> Iterator[None]:
        """Within, a mode above this one runs ops of its own: on `meta`, they stay there; of the others, `told` is told (the op,
        its arguments, and what it made).
        """
        before, self._told = self._told, told
        try:
            yield
        finally:
            self._told = before

    def is_unfilled(self, t: torch.Tensor) -> bool:
        if t.layout is torch.strided:
            return storage_id(t) in self._unfilled
        return any(map(self.is_unfilled, _tensors(t)))

    def answers(self, t: torch.Tensor) -> None:
        """User code reads all values of `t`: if they are not known, each is as a number that it asks for."""
        if self.is_unfilled(t):
            with no_dispatch_modes():
                given = self._given(_NUMBER, t.size(), t.dtype)
                whole = t.data  # it counts no versions: a read would be a write otherwise
                if given is not None:
                    whole.copy_(given)
                else:
                    self.assumed[_NUMBER] += 1
                    whole.fill_(float(t.dtype.is_floating_point))

    def empties(self, t: torch.Tensor) -> torch.Tensor:
        """Note that the bytes of `t` are not computed."""
        if storage_id(t) not in self._unfilled:
            self._unfilled[storage_id(t)] = t.untyped_storage()._weak_ref()  # type: ignore[assignment]
        return t

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.ops += 1
        if self.ops % _LOOKS == 0 and self.look is not None:
            self.look(self.ops)
        with no_dispatch_modes():  # the ops that this mode itself runs are not the step's
            if func.is_view or torch.Tag.inplace_view in func.tags or func._schema.name in _VIEWS:
                return func(*args, **kwargs)
            inputs = list(_tensors((args, kwargs)))
            if self._told is not None and (kwargs.get("device") == _META or any(t.is_meta for t in inputs)):
                return func(*args, **kwargs)
            made = self._made(func, args, kwargs, inputs)
            if self._told is not None:
                self._told(func, args, kwargs, made)
            if self._on_device and any(storage_id(t) in self._on_device for t in inputs):
                self.moves(made)
            return made

    def _made(self, func: OpOverload, args: tuple[Any, ...], kwargs: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """What the op returns, unless it is a view."""
        name, unfilled = func._schema.name, any(map(self.is_unfilled, inputs))
        if unfilled and name in (_NUMBER, "aten::item"):  # the latter in inference mode
            return self._number(inputs[0])
        if unfilled and name in _FILLS and self._is_small_and_filled_by(inputs):
            self._fills(inputs[0])
            return func(*args, **kwargs)
        return self._run(func, args, kwargs, inputs, may_run=not unfilled)

    def _is_small_and_filled_by(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the first tensor is small and a whole storage, and the others have bytes."""
        whole = inputs[0].untyped_storage().nbytes() == inputs[0].nbytes <= SMALL
        return whole and not any(map(self.is_unfilled, inputs[1:]))

    def _fills(self, t: torch.Tensor) -> None:
        """Note that the bytes of `t` are computed from now on."""
        free_weak(self._unfilled.pop(storage_id(t)))

    def _number(self, t: torch.Tensor) -> Any:
        """A number that user code asks for. A loss is 1.0; nothing is infinite or not a number; nothing is True."""
        given = self._given(_NUMBER, torch.Size(), t.dtype)
        if given is None:
            self.assumed[_NUMBER] += 1
            given = torch.full((), float(t.dtype.is_floating_point), dtype=t.dtype)
        return given.item()

    def _given(self, name: str, size: torch.Size, dtype: torch.dtype, choices: int | None = None) -> torch.Tensor | None:
        """Values that the user knows, if there are any."""
        if self._values is None:
            return None
        given = asked(self._values, _NAMES.get(name, name.removeprefix("aten::")), size, dtype, choices)
        if given is not None:
            self.assumed[GIVEN + name] += 1
        return given

    def _run(self, func: OpOverload, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], may_run: bool) -> Any:
        """What the op returns. `may_run`: all its inputs have bytes."""
        schema = func._schema
        try:
            made = self._on_meta(func, args, kwargs)
        except (NotImplementedError, RuntimeError):
            made = func(*args, **kwargs)
            if may_run:
                return made
            self.ran[schema.name] += 1
            for t in _tensors(made):
                self.empties(t)
            return made
        if may_run and _nbytes((*inputs, *_tensors(made))) <= SMALL and not schema.name.startswith("aten::empty"):
            with contextlib.suppress(NotImplementedError):  # an operator of CUDA
                return func(*args, **kwargs)
        written = self._written(func, args, kwargs)
        if schema.name == _TOPK:
            dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
            return self._like(made[0]), self._routed(_TOPK, made[1], inputs[0], dim)
        if schema.name == _ARGMAX and len(args) > 1 and args[1] is not None:
            return self._routed(schema.name, made, inputs[0], args[1])
        is_condition = schema.name in _ANSWERS or (isinstance(made, torch.Tensor) and made.dtype == torch.bool)
        if is_condition and not may_run and not written:
            condition = self._condition(schema.name, made)
            if condition is not None:
                return condition

        def of(index: int, value: Any) -> Any:
            info = schema.returns[index].alias_info
            if info is not None:
                return next(given for names, given in written if names == info.before_set)
            if schema.name in _KEEPS:
                return self.empties(torch.empty(inputs[0].numel(), dtype=value.dtype).as_strided(value.size(), value.stride()))
            return self._like(value) if isinstance(value, torch.Tensor) else tree_map(self._like, value)

        if len(schema.returns) == 1:
            return of(0, made)
        return tuple(of(i, value) for i, value in enumerate(made)) if schema.returns else None

    def _on_meta(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """What the op's kernel for `meta` makes of such arguments. Most ops of a model have been asked before, in another layer
        or another step.
        """
        key = _key((func, args, kwargs, torch.get_default_dtype()))
        if key in self._asked:
            return self._asked[key]
        given = tree_map(_as_meta, (args, kwargs))
        if any(a.name == "device" for a in func._schema.arguments):
            given[1]["device"] = _META
        kernel: Callable[..., Any] = _WITHOUT_META.get(func._schema.name, func)
        made = _with_strides(func._schema.name, args, kernel(*given[0], **given[1]))
        if isinstance(made, torch.Tensor) and made.layout is not torch.strided:
            raise NotImplementedError("how many values a sparse tensor has is known when it is made")
        self._asked[key] = made
        return made

    def _routed(self, name: str, made: torch.Tensor, scores: torch.Tensor, dim: int) -> torch.Tensor:
        """Indices along a dimension of unfilled scores, each as often as any other."""
        given = self._given(name, made.size(), made.dtype, scores.size(dim))
        if given is not None:
            return given.clone(memory_format=torch.contiguous_format)
        self.assumed[_TOPK] += 1
        return (torch.arange(made.numel()) % scores.size(dim)).view(made.size())

    def _condition(self, name: str, made: torch.Tensor) -> torch.Tensor | None:
        """What is true of unfilled tensors, as far as it is known."""
        given = self._given(name, made.size(), made.dtype)
        if given is not None:
            return torch.empty_strided(made.size(), made.stride(), dtype=made.dtype).copy_(given)
        if name not in _ANSWERS or made.numel() > SMALL:
            return None
        self.assumed[_NUMBER] += 1
        return _ANSWERS[name](made.size(), dtype=made.dtype)

    def _written(self, func: OpOverload, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
        """(names in the schema, argument) of the arguments that the op writes, which are unfilled from now on."""
        written = []
        for i, argument in enumerate(func._schema.arguments):
            info = argument.alias_info
            if info is None or not info.is_write:
                continue
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            written.append((info.before_set, given))
            if _FINITE.get(func._schema.name) != i:
                for t in _tensors(given):
                    self.empties(t)
        return written

    def _like(self, made: Any) -> Any:
        """An unfilled tensor like one of the `meta` device."""
        if not isinstance(made, torch.Tensor):
            return made
        return self.empties(torch.empty_strided(made.size(), made.stride(), dtype=made.dtype))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors that have the bytes: of a sparse one, its indices and values."""
    if isinstance(values, torch.Tensor):
        if values.layout is torch.sparse_coo:
            yield from (values._indices(), values._values())
        else:
            yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _nbytes(tensors: Any) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def _key(value: Any) -> Hashable:
    """What kernels for `meta` can tell of an argument: 1, 1.0 and True differ. Each sparse tensor is one of its own."""
    if isinstance(value, torch.Tensor):
        return (value.size(), value.stride(), value.dtype) if value.layout is torch.strided else object()
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(given)) for name, given in value.items())
    return type(value), value


def _as_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)


def _lstm_cell(input_gates: torch.Tensor, hidden_gates: torch.Tensor, cx: torch.Tensor, *biases: torch.Tensor | None) -> Any:
    states = (torch.empty_like(cx, memory_format=torch.contiguous_format) for _ in range(2))
    return *states, torch.empty_like(input_gates, memory_format=torch.contiguous_format)


def _gru_cell(input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *biases: torch.Tensor | None) -> Any:
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty(hx.size(0), 5 * hx.size(1))


def _gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    rows, width = grad_hy.size()
    gates = [workspace.new_empty(rows, 3 * width) for _ in range(2)]
    biases = [workspace.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad_hy, memory_format=torch.contiguous_format), *biases


_WITHOUT_META: dict[str, Callable[..., Any]] = {
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
"""Operator that torch has no kernel for `meta` for, or one that raises without biases -> what it makes of tensors on `meta`."""


def _with_strides(name: str, args: tuple[Any, ...], made: Any) -> Any:
    """What a kernel for `meta` made, with the strides that kernels for devices give it."""
    if name in _STRIDES_OF:
        like = args[_STRIDES_OF[name]]
        return _first(made, lambda t: torch.empty_like(like, dtype=t.dtype, device=_META))
    if name in _CONTIGUOUS or name in _FORMAT_OF:
        last = name in _FORMAT_OF and _is_channels_last(args[_FORMAT_OF[name]])
        memory_format = torch.channels_last if last else torch.contiguous_format
        return _first(made, lambda t: t.contiguous(memory_format=memory_format))
    if name == "aten::convolution" and _is_channels_last(args[0]):
        return made.contiguous(memory_format=torch.channels_last)
    return made


def _first(made: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What an op made, with its only or its first tensor changed."""
    if isinstance(made, torch.Tensor):
        return change(made)
    return (None if made[0] is None else change(made[0]), *made[1:])


def _is_channels_last(t: torch.Tensor) -> bool:
    return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
