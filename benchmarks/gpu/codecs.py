"""Codecs on a device beside the link: GB/s of decoded bytes, for one large feature map, and whether each keeps its promise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.runtime.codecs import NAMES, Codec, block, codec, quantise
from lightning_memopt.runtime.codecs.base import chunks, flat
from lightning_memopt.runtime.codecs.block_device import SCALE, constants
from lightning_memopt.runtime.codecs.block_tables import VALUES
from lightning_memopt.runtime.tiers import DiskTier, HostTier
from lightning_memopt.units import ceil_div

LARGE, SMALL = (32, 256, 56, 56), (4, 16, 16, 16)
COLUMNS = {"out": "out_gb_per_s", "in": "in_gb_per_s", "bytes": "bytes_ratio", "error": "error_share"}


def seconds(action: Callable[[], Any], device: torch.device) -> float:
    """What an action takes on the device: between events, or on the host's clock."""
    if device.type == "cpu":
        began = time.perf_counter()
        action()
        return time.perf_counter() - began
    events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    events[0].record()
    action()
    events[1].record()
    torch.cuda.synchronize(device)
    return 1e-3 * events[0].elapsed_time(events[1])


_GAIN = (15 / 4) ** 2
"""Maximum factor by which the inverse transform of `block` enlarges errors: errors of 1 in all coefficients give this error."""


def error_bound(c: Codec, t: Tensor) -> float:
    """The largest possible difference between a finite value of `t` and its decoded value; 0 if the codec is exact."""
    if isinstance(c, block.Block):
        return _bound_of_blocks(c, t)
    return _bound_of_groups(c, t) if isinstance(c, quantise.Groups) else 0.0


def _bound_of_blocks(c: block.Block, t: Tensor) -> float:
    """A step of the coarsest block in every coefficient, plus the rounding of float32 and of the dtype."""
    const = constants(c.rate, t.device, c.header)
    step = lost = 0.0
    for _, tile in block._tiles(t):
        number, _, bad = block._chosen(block._transformed(tile, c.gated), const)
        step = max(step, float(const.step.index_select(0, number.where(~bad, 0)).amax()))
        if bool(bad.any()):
            lost = max(lost, _largest_finite(tile.permute(1, 3, 0, 2).reshape(VALUES, -1)[:, bad].contiguous()))
    limits = torch.finfo(t.dtype)
    rounding = _largest_finite(t) * (limits.eps + 2.0**-20) + limits.smallest_normal * (1 if c.gated else limits.eps)
    if c.gated and t.numel():
        lost = max(lost, _largest_finite(flat(t).clamp(max=0)))
    return max(lost, _GAIN * step / SCALE + rounding)


def _bound_of_groups(c: quantise.Groups, t: Tensor) -> float:
    """Half a step of the coarsest group, plus the rounding of float32 and of the dtype."""
    values, worst = flat(t), 0.0
    for begin, end in chunks(ceil_div(len(values), quantise.GROUP), quantise.CHUNK):
        worst = max(worst, float(c._ranges(quantise._groups(values, begin, end))[1].amax()))
    limits = torch.finfo(t.dtype)
    rounding = _largest_finite(t) * (limits.eps + 2.0**-21) + limits.smallest_normal * limits.eps
    return worst / quantise._SCALE / 2 * (1 + 2.0**-10) + rounding + 2.0**-115


def _largest_finite(t: Tensor) -> float:
    """The largest magnitude of a finite value; 0 if there is none."""
    return max(
        (float(part.where(part.isfinite(), 0).abs().amax()) for part in flat(t).split(1 << 20) if part.numel()), default=0.0
    )


def keeps(c: Codec, t: Tensor, decoded: Tensor) -> tuple[bool, float]:
    """Whether what came back is within the codec's promise, and its largest error as a share of the bound (0 where exact)."""
    if t.dtype is torch.bool:
        return torch.equal(t, decoded), 0.0
    if c.exact:  # asked only whether a value is `<= 0`
        return torch.equal(t <= 0, decoded <= 0), 0.0
    bound = error_bound(c, t)
    share = float((t - decoded).abs().max()) / bound
    return share <= 1, share


def codecs(device: torch.device, size: tuple[int, ...], rounds: int = 5) -> dict[str, dict[str, Any]]:
    """Medians over interleaved rounds, of every codec and of the copies of the same bytes."""
    values = torch.randn(size, generator=torch.Generator(device).manual_seed(1), device=device)
    nbytes = values.numel() * values.element_size()
    tier = HostTier(2 * nbytes, device) if device.type == "cuda" else DiskTier(2 * nbytes, device=device)
    flat, back = values.view(torch.uint8).flatten(), torch.empty(nbytes, dtype=torch.uint8, device=device)
    taken: dict[str, list[tuple[float, float]]] = {f"copies, {tier.name}": []}
    rows: dict[str, dict[str, Any]] = {f"copies, {tier.name}": {"equal": True, "bytes_ratio": 1.0}}
    work: dict[str, tuple[Codec, Tensor, Tensor, Tensor]] = {}
    for name in NAMES:
        c = codec(name)
        rectified = c.exact or name.startswith("gated")  # codecs for results of ReLU
        t = values > 0 if name == "bools" else values.relu() if rectified else values
        encoded = torch.empty(c.encoded_nbytes(size, t.dtype), dtype=torch.uint8, device=device)
        work[name], taken[name] = (c, t, encoded, torch.empty_like(t)), []
        rows[name] = {"bytes_ratio": t.numel() * t.element_size() / encoded.numel()}
    try:
        for _ in range(rounds + 1):
            parked: list[Any] = []
            out = seconds(lambda p=parked: (p.append(tier.store(flat, "a map")), p[0].wait_stored()), device)
            into = seconds(lambda p=parked: (p[0].fetch(back), p[0].wait_fetched()), device)
            parked[0].release()
            taken[f"copies, {tier.name}"].append((out, into))
            for name, (c, t, encoded, decoded) in work.items():
                encode = seconds(lambda c=c, t=t, e=encoded: c.encode(t, e), device)
                taken[name].append((encode, seconds(lambda c=c, d=decoded, e=encoded: c.decode(e, d), device)))
        rows[f"copies, {tier.name}"]["equal"] = torch.equal(flat, back)
    finally:
        tier.close()
    for name, pairs in taken.items():
        size_of = nbytes if name not in work else work[name][1].numel() * work[name][1].element_size()
        for key, way in (("out_gb_per_s", 0), ("in_gb_per_s", 1)):
            rows[name][key] = size_of / statistics.median(pair[way] for pair in pairs[1:]) / 1e9
        if name in work:
            rows[name]["equal"], rows[name]["error_share"] = keeps(work[name][0], work[name][1], work[name][3])
    return rows
