"""What a backward op needs of the tensors that were saved for it: all values, only their sign, or only a size; and which
backward ops may be given lossy values.

Keys are (name of the backward op, name of its argument), as in torch's schemas. The tests run every claim of `NEEDS` against
torch, with decoded and with garbage values (tests/cpu/parking/test_codecs_readers.py). An argument that is not listed needs all
its values, exactly.
"""

from __future__ import annotations

from typing import Literal

Need = Literal["value", "sign", "shape"]

_SHAPE = (
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
    "nll_loss_backward",
    "nll_loss2d_backward",
    # gather, take and index ask the saved tensor for zeros like it
    "new_zeros",
    "zeros_like",
)

NEEDS: dict[tuple[str, str], Need] = {
    # grad where not (self <= threshold): the sign, where the threshold is 0 (ReLU's always is; threshold's may not be)
    ("threshold_backward", "self"): "sign",
    **dict.fromkeys(((op, "self") for op in _SHAPE), "shape"),
}

LOSSY: dict[tuple[str, str], str] = {
    ("convolution_backward", "input"): "only the gradient of the weight reads it, linearly; that of the input reads the weight",
    ("mkldnn_linear_backward", "input"): "as mm",
    ("mm", "self"): "the gradient of a linear layer's weight: a sum over the batch, linear in what was saved",
    ("mm", "mat2"): "the same, transposed",
    ("bmm", "self"): "the same, for weights of several experts or groups",
    ("bmm", "mat2"): "the same, transposed",
}
"""Where an error stays within the gradient of one weight: it enters linearly, is averaged over the batch, and no other layer
sees it. This holds if the product is the gradient of a parameter and the other factor is an incoming gradient. A product of two
activations (attention without the fused kernel) passes the error on, so the caller must know that one factor of the *forward*
op was a parameter.
"""


def short(op: str) -> str:
    """`aten::add.Tensor`, `aten.add.Tensor`, `add.Tensor` or `add` -> `add`."""
    name = op.replace("::", ".")
    return name.removeprefix("aten.").partition(".")[0]


def need(op: str, argument: str, *, threshold: float = 0.0) -> Need:
    """What a backward op needs of a saved tensor that it gets as `argument`. `threshold`: the one of `threshold_backward`."""
    needed = NEEDS.get((short(op), argument), "value")
    return "value" if needed == "sign" and threshold != 0.0 else needed


def lossy(op: str, argument: str) -> bool:
    """Whether a backward op may get lossy values as `argument` if its result is the gradient of a parameter (`LOSSY`)."""
    return (short(op), argument) in LOSSY
