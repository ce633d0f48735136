"""`memopt profile`: measure the card of this machine, for `memopt fit --card`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_memopt import jsonio
from lightning_memopt.errors import ConfigError
from lightning_memopt.units import format_nbytes


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    profile = commands.add_parser("profile", help="measure this machine's card, for `memopt fit --card card.json`")
    profile.add_argument("-o", "--output", default="card.json", help="the file of rates (default: card.json)")
    profile.add_argument("--device", default=None, help="cuda:1, cpu, ... (default: the accelerator if there is one)")
    profile.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    jsonio.check_target(args.output)
    import torch

    from lightning_memopt.device.places import best_here, is_here
    from lightning_memopt.fitting.profiling import measured

    try:
        device = best_here() if args.device is None else torch.device(args.device)
    except RuntimeError:
        raise ConfigError(f"--device {args.device!r} is no device; give cuda, cuda:1, cpu, ...") from None
    if not is_here(device):
        raise ConfigError(f"--device {args.device}: this torch finds no such device here; leave it out, or give cpu")
    rates = measured(device, Path(args.output).stem)
    rates.write(args.output)
    assert rates.device is not None
    tera = ", ".join(f"{dtype} {rate / 1e12:.2f}" for dtype, rate in rates.device.flops_per_second.items())
    reached = ", ".join(f"{kind} {share:.2f}" for kind, share in rates.device.efficiency.items())
    links = "; ".join(
        f"{tier} {link.out_bytes_per_second / 1e9:.2f} GB/s out, {link.in_bytes_per_second / 1e9:.2f} in"
        for tier, link in rates.links.items()
    )
    print(
        f"{args.output}: {rates.sources['machine']}, {format_nbytes(rates.device.nbytes)}\n"
        f"TFLOP/s: {tera}; memory {rates.device.bytes_per_second / 1e9:.1f} GB/s; an op starts in "
        f"{1e6 * rates.device.launch_seconds:.1f} us\nShare of these that is reached: {reached}\nLinks: {links}\n"
        f"Use it: memopt fit SOURCE --card {args.output}"
    )
    return 0
