"""The ops of random programs: each takes two values of shape (rows, WIDTH) and gives another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS = 16, 4


class Parts(nn.Module):
    """The layers that programs are made of. `shared`: two of the linear layers are the same parameter."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        if shared:
            self.linear[LAYERS - 1].weight = self.linear[0].weight
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.embedding = nn.Embedding(WIDTH, WIDTH, max_norm=4.0)
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH))


Op = Callable[[Parts, Tensor, Tensor, int], Tensor]
OPS: dict[str, Op] = {}


def _op(run: Op) -> Op:
    OPS[run.__name__.strip("_")] = run
    return run


def _each(**functions: Callable[[Tensor], Tensor]) -> None:
    for name, function in functions.items():
        OPS[name] = _alone(function)


def _alone(function: Callable[[Tensor], Tensor]) -> Op:
    return lambda parts, a, b, k: function(a)


_each(
    sin=torch.sin,
    tanh=torch.tanh,
    relu=torch.relu,
    gelu=F.gelu,
    sigmoid=torch.sigmoid,
    square=lambda a: a.square().clamp(max=9),
    exp=lambda a: a.clamp(max=2).exp().tanh(),
    double=lambda a: a * 2,
    turned=lambda a: a.t().contiguous().t(),
    leaky=lambda a: torch.where(a > 0, a, a * 0.1),
    softmax=lambda a: a.softmax(1),
    cumsum=lambda a: a.cumsum(0).tanh(),
    reversed=lambda a: a[:, torch.arange(a.shape[1] - 1, -1, -1)],
    flat=lambda a: a.reshape(-1).view_as(a).tanh(),
    ordered=lambda a: a.sort(1).values,
    half=lambda a: a.to(torch.bfloat16).sin().to(a.dtype),
    spectrum=lambda a: torch.fft.irfft(torch.fft.rfft(a), n=a.shape[1]),
    normed=lambda a: F.normalize(a, dim=1),
    glu=lambda a: F.glu(torch.cat([a, a.flip(1)], 1)),
)


@_op
def linear(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return parts.linear[k % LAYERS](a)


@_op
def gated(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return torch.tanh(parts.linear[k % LAYERS](a)) * b


@_op
def residual(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a + F.dropout(parts.linear[k % LAYERS](F.gelu(parts.layer_norm(b))), 0.2, parts.training)


@_op
def product(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return torch.tanh(a * b)


@_op
def transposed(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return torch.tanh(a @ parts.linear[k % LAYERS].weight.t())


@_op
def dropout(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return F.dropout(a, 0.1 + 0.05 * k, parts.training)


@_op
def layer_norm(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return parts.layer_norm(a)


@_op
def batch_norm(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return parts.batch_norm(a)


@_op
def embedded(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return b + parts.embedding(a.detach().argmax(1))


@_op
def convolved(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return F.relu(parts.convolution(a[:, None]), inplace=bool(k % 2)).sum(1)


@_op
def attended(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    mixed = parts.attention(a[None], b[None], b[None], need_weights=bool(k % 2))[0]
    return a + mixed[0]


@_op
def scaled_attention(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    heads = [t.reshape(1, -1, 2, WIDTH // 2).transpose(1, 2) for t in (a, b, a)]
    return F.scaled_dot_product_attention(*heads, is_causal=bool(k % 2)).transpose(1, 2).reshape(a.shape)


@_op
def celled(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return parts.cell(a, b)


@_op
def recurred(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return parts.recurrent(a.reshape(-1, WIDTH // 4, 4))[0].reshape(a.shape)


@_op
def routed(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    chosen = (a.detach().sum(1) > 0).long()
    out = torch.zeros_like(a)
    for i, expert in enumerate(parts.experts):
        rows = torch.where(chosen == i)[0]
        if len(rows):
            out = out.index_add(0, rows, expert(a[rows]))
    return out


@_op
def spectral(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return parts.spectral(a)


@_op
def scaled(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a * parts.scale + parts.mask * b


@_op
def averaged(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    """A buffer is updated in place and read: a running mean."""
    if parts.training:
        with torch.no_grad():
            parts.mean.mul_(0.9).add_(a.detach().float().mean(0), alpha=0.1)
    return a - parts.mean


@_op
def copied(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a.clone().mul_(1.5)


@_op
def added(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return (a * 0.5).add_(b).tanh()


@_op
def windowed(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    """Halves of a buffer are written in place."""
    out = torch.empty_like(a)
    out[:, ::2] = a[:, ::2].sin()
    out[:, 1::2] = b[:, 1::2]
    return out


@_op
def split(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    left, right = a.chunk(2, 1)
    return torch.cat([left.tanh() * right, b[:, : WIDTH // 2]], 1)


@_op
def noisy(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a + 0.1 * torch.randn_like(a)


@_op
def checkpointed(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    layer = parts.linear[k % LAYERS]
    if not torch.is_grad_enabled():
        return F.dropout(layer(a).sin(), 0.1, parts.training)
    run: Any = lambda t: F.dropout(layer(t).sin(), 0.1, parts.training)  # noqa: E731
    return checkpoint(run, a, use_reentrant=False)


class _Sign(torch.autograd.Function):
    """A function of the user's: its backward is straight through, and reads what it saved."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return grad * (a.abs() < 1)


@_op
def straight(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return _Sign.apply(a) + a


@_op
def penalised(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    """A gradient taken inside of the forward."""
    if not (torch.is_grad_enabled() and a.requires_grad):
        return a.tanh()
    energy = parts.linear[k % LAYERS](a).square().sum()
    (slope,) = torch.autograd.grad(energy, a, create_graph=bool(k % 2), retain_graph=True)
    return a - 0.01 * slope


@_op
def mapped(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return torch.func.vmap(lambda x, y: torch.tanh(x) * y)(a, b)


@_op
def differentiated(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return torch.func.grad(lambda x: parts.linear[k % LAYERS](x).sin().sum())(a.detach()) + b


@_op
def stopped(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        c = parts.linear[k % LAYERS](a).softmax(1)
    return b * c


@_op
def scattered(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return a.scatter_add(1, b.detach().argsort(1), b.tanh().to(a.dtype))


@_op
def pooled(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return F.max_pool1d(a[:, None], 2).repeat_interleave(2, 2)[:, 0]


@_op
def multiplied(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    return torch.tanh(a @ b.t() @ a / a.shape[0])


class _Scratch(torch.autograd.Function):
    """A loss in tiles: what is large is written by `out=` into a buffer that forward and backward each take for themselves."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            tile = _tile(a, weight)
            total = tile.exp().sum(1, keepdim=True)
        ctx.save_for_backward(a, weight, total)
        return total.log().expand_as(a) + a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, weight, total = ctx.saved_tensors
        with torch.no_grad():
            shares = _tile(a, weight).exp_().div_(total)
        scores = shares * grad.sum(1, keepdim=True)
        return scores @ weight + grad, scores.t() @ a


def _tile(a: Tensor, weight: Tensor) -> Tensor:
    """`a @ weight.t()` in the first columns of a buffer that has more of them."""
    buffer = torch.empty(a.shape[0], 8 * WIDTH).zero_()  # what nothing has written differs from run to run
    tile = buffer[:, :WIDTH]
    return torch.mm(a, weight.t(), out=tile)


@_op
def scratch(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(_Scratch.apply(a.float(), parts.linear[k % LAYERS].weight))


class _Emptied(torch.autograd.Function):
    """An invertible layer: it empties its input's storage, and backward fills that again from the output."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            left, right = a.chunk(2, 1)
            out = torch.cat([left + _mixed(right, weight), right], 1)
        a.untyped_storage().resize_(0)
        ctx.input = a
        ctx.save_for_backward(out, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        out, weight = ctx.saved_tensors
        a = ctx.input.detach()
        with torch.no_grad():
            left, right = out.chunk(2, 1)
            a.untyped_storage().resize_(out.nbytes)
            a.copy_(torch.cat([left - _mixed(right, weight), right], 1))
        with torch.enable_grad():
            leaves = a.clone().requires_grad_(), weight.detach().requires_grad_()
            left, right = leaves[0].chunk(2, 1)
            again = torch.cat([left + _mixed(right, leaves[1]), right], 1)
        a.untyped_storage().resize_(0)
        found: tuple[Tensor, Tensor] = torch.autograd.grad(again, leaves, grad.detach())  # type: ignore[assignment]
        return found


def _mixed(half: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(half @ weight[: WIDTH // 2, : WIDTH // 2])


@_op
def emptied(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    with torch.autocast("cpu", enabled=False):  # its input is the layer's own, for it is gone afterwards
        return _Emptied.apply(a.float() * 0.5, parts.linear[k % LAYERS].weight)


@_op
def iterated(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    """A loop without gradients: each round forgets what the one before made."""
    h = a
    with torch.no_grad():
        for _ in range(4 * (k + 1)):
            h = torch.tanh(h @ parts.linear[k % LAYERS].weight + h)
    return b * h


@_op
def resized(parts: Parts, a: Tensor, b: Tensor, k: int) -> Tensor:
    """A buffer that is made larger, written by `out=`, and made smaller: its storage keeps the size, and autograd saves it."""
    with torch.no_grad():
        buffer = torch.empty(0, dtype=a.dtype).resize_(a.shape[0], 4 * WIDTH)
        torch.cat([a] * 4, 1, out=buffer)
        buffer.resize_(a.shape).tanh_()
    return b * buffer
