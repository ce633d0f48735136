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

EXACT: dict[str, str] = {
    "native_batch_norm_backward": "subtracts the saved mean: with a large mean, the error is all that is left",
    "cudnn_batch_norm_backward": "as native_batch_norm_backward",
    "native_layer_norm_backward": "as native_batch_norm_backward, of every row",
    "native_group_norm_backward": "as native_batch_norm_backward, of every group",
    "_fused_rms_norm_backward": "divides by a saved norm that fits the exact values only",
    "_softmax_backward_data": "subtracts a weighted sum: rows that do not sum to 1 do not cancel",
    "_log_softmax_backward_data": "takes the exponential: absolute errors become relative ones",
    "_scaled_dot_product_flash_attention_backward": "makes the softmax again from q and k, under the saved logarithm",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "as _scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward": "as _scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward": "as _scaled_dot_product_flash_attention_backward",
    "nll_loss_backward": "reads indices",
    "mse_loss_backward": "a loss: its gradient enters every layer",
    "smooth_l1_loss_backward": "a loss",
    "huber_loss_backward": "a loss",
    "binary_cross_entropy_backward": "a loss, and it divides by what was saved",
    "kl_div": "a loss",
    "embedding_dense_backward": "reads indices",
    "native_dropout_backward": "reads a mask",
    "max_pool2d_with_indices_backward": "reads indices",
    "max_pool3d_with_indices_backward": "reads indices",
    "index_put": "reads indices",
    "index_add": "reads indices",
    "scatter_add": "reads indices",
    "masked_fill": "reads a mask",
    "where": "reads a mask",
    "threshold_backward": "an error near 0 opens or closes a gate",
    "hardtanh_backward": "as threshold_backward, at both ends",
    "leaky_relu_backward": "as threshold_backward",
    "gelu_backward": "its result goes on to every layer below",
    "silu_backward": "as gelu_backward",
    "tanh_backward": "as gelu_backward, of 1 - y^2 where y is near 1",
    "sigmoid_backward": "as tanh_backward",
    "mul": "its result goes on to every layer below",
    "div": "as mul, and divides by what was saved",
    "pow": "as mul",
    "_thnn_fused_lstm_cell_backward": "errors add up from step to step",
    "_cudnn_rnn_backward": "errors add up from step to step",
    "mkldnn_rnn_layer_backward": "errors add up from step to step",
}
"""Ops that one might expect in `LOSSY`, and why they are not."""


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
