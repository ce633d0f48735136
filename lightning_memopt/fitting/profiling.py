"""Measure a card: how fast it multiplies, moves its memory, starts an op, and copies to the host and to a disk.

The result is a file of rates like those in `profiles/`, for `memopt fit --card mycard.json`. Rates of arithmetic and memory are
the best of large ops. The efficiency of a kind of operator is the share of these rates that an op of a usual size reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_memopt.clocks import perf_counter
from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.places import on_host
from lightning_memopt.plan.rates import Device, MachineRates
from lightning_memopt.runtime.codecs import codec
from lightning_memopt.runtime.tiers.base import Tier
from lightning_memopt.runtime.tiers.disk import DiskTier
from lightning_memopt.runtime.tiers.host import HostTier
from lightning_memopt.trace.link import measure, seconds_of

DTYPES = ("float32", "bfloat16", "float16")
_CODECS = {"bools": "bools", "positive": "positive", "int": "int8", "block": "block8"}
"""Codec, or family of codecs, in a file of rates -> the codec that is measured."""
_LAUNCHES = 1000
_ROUNDS = 5
_LEAST_SECONDS = 0.02
"""Matrices grow until a product takes this long, or until they have `_LARGEST_SIDE` rows."""
_SMALLEST_SIDE, _LARGEST_SIDE = 256, 8192
_MOVED_NBYTES = {True: 64 << 20, False: 1 << 30}
"""Bytes of the tensor that is copied, on the host, and on a card."""
_TIER_NBYTES = 64 << 20


class _Card:
    """A card that is measured.

    device: where it is.
    clock: counts seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        self._device = device
        self._clock = clock

    def seconds(self, action: Callable[[], object], times: int = 1) -> float:
        """Seconds of an action: the median of a few rounds, after one that does not count."""

        def repeated() -> None:
            for _ in range(times):
                action()

        taken = [seconds_of(repeated, self._device, self._clock) for _ in range(1 + _ROUNDS)]
        return max(median(taken[1:]) / times, 1e-9)

    def launch_seconds(self) -> float:
        """Of an op that has nothing to do."""
        x = torch.zeros(1, device=self._device)
        return self.seconds(lambda: x.add_(1.0), _LAUNCHES)

    def bytes_per_second(self) -> float:
        """Of a copy within the card's memory: bytes read and written."""
        nbytes = _MOVED_NBYTES[on_host(self._device)]
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        out = torch.empty_like(source)
        return 2 * nbytes / self.seconds(lambda: out.copy_(source))

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """Of a product of large matrices."""
        side = _SMALLEST_SIDE
        while True:
            a, b = (torch.randn(side, side, device=self._device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            seconds = self.seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
            if seconds >= _LEAST_SECONDS or side >= _LARGEST_SIDE:
                return 2.0 * side**3 / seconds
            side *= 2

    def device(self) -> Device:
        rates = {dtype: self.flops_per_second(getattr(torch, dtype)) for dtype in DTYPES}
        plain = Device(
            nbytes=backend_of(self._device).total_nbytes(),
            flops_per_second=rates,
            bytes_per_second=self.bytes_per_second(),
            launch_seconds=self.launch_seconds(),
        )
        return replace(plain, efficiency={kind: self._efficiency(plain, *of) for kind, of in self._usual().items()})

    def _efficiency(self, plain: Device, dtype: str, inputs: list[Tensor], run: Callable[[], Tensor]) -> float:
        """The time that an op would take at the card's rates, as a share of what it takes."""
        with FlopCounterMode(display=False) as counted:
            made = run()
        nbytes = sum(t.nbytes for t in (*inputs, made))
        ideal = plain.op_seconds(counted.get_total_flops(), nbytes, dtype) - plain.launch_seconds
        return ideal / max(self.seconds(run) - plain.launch_seconds, 1e-9)

    def _usual(self) -> dict[str, tuple[str, list[Tensor], Callable[[], Tensor]]]:
        """Kind of operator -> (dtype, inputs, an op of a usual size)."""
        host = on_host(self._device)
        dtype, batch = ("float32", 2) if host else ("bfloat16", 32)

        def made(*size: int) -> Tensor:
            return torch.randn(size, device=self._device).to(getattr(torch, dtype))

        images = made(batch, 64, 56, 56)
        kernels = made(64, 64, 3, 3)
        query = made(batch, 12, 512, 64)
        tokens = made(batch * 512, 1024)
        weight = made(1024)
        functional = torch.nn.functional
        return {
            "convolution": (dtype, [images, kernels], lambda: functional.conv2d(images, kernels, padding=1)),
            "attention": (dtype, [query, query, query], lambda: functional.scaled_dot_product_attention(query, query, query)),
            "normalization": (dtype, [tokens], lambda: functional.layer_norm(tokens, (1024,), weight)),
            "elementwise": (dtype, [tokens], lambda: functional.gelu(tokens)),
        }


@torch.no_grad()
def measured(device: torch.device, name: str, clock: Callable[[], float] = perf_counter) -> MachineRates:
    """The rates of the card that this device is, measured in less than a minute. `name`: what answers call it.

    Raises OffloadError if there is no room for a file on the disk.
    """
    card = _Card(device, clock).device()
    tiers: list[Tier] = [DiskTier(_TIER_NBYTES, None, device)]
    if not on_host(device):
        tiers.append(HostTier(_TIER_NBYTES, device))
    try:
        rates = measure(tiers, device, [codec(named) for named in _CODECS.values()], seconds=3.0, clock=clock)
    finally:
        for tier in tiers:
            tier.close()
    said = f"measured by memopt profile on {backend_of(device).name}, torch {torch.__version__}"
    return MachineRates(
        name=name,
        links=rates.links,
        codecs={family: rates.codecs[named] for family, named in _CODECS.items() if named in rates.codecs},
        device=card,
        sources={"machine": backend_of(device).name, "links": said, "codecs": said, "device": said},
    )
