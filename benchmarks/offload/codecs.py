"""Codecs on real feature maps, beside ZFP at the same rate: root mean square error and bytes.

    pip install zfpy
    python -m benchmarks codecs [--steps 10] [-o benchmarks/results/codecs.json]

Maps: the inputs of every convolution and linear layer of the two demo models after some steps of training: the digits ResNet,
also on larger images, whose maps are not multiples of 4 wide; the character GPT, also after ten times as many steps. ZFP (fixed
rate) sees each map as one to four dimensions, the outer ones flattened: its blocks would otherwise hold less of a map.
The bar: an error of at most 1.25 times that of the best of them, and no more bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import zfpy
from torch import Tensor, nn

from examples import chargpt, digits
from lightning_memopt.runtime.codecs import codec

RATES = (4, 6, 8, 10, 12, 16)


def trained(task: Any, settings: Any, steps: int) -> dict[str, Tensor]:
    """Inputs of convolutions and linear layers in the step after `steps` of training."""
    torch.manual_seed(0)
    workload = task.build(0, settings)
    model, optimizer = workload.model, workload.make_optimizer(workload.model)
    batches: Iterator[Any] = iter(workload.train_loader)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss_of(model, next(batches)).backward()
        optimizer.step()
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            found[name] = args[0].detach().clone()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_pre_hook(keep(name))
    task.loss_of(model, next(batches))
    return found


def ours(name: str, t: Tensor) -> tuple[float, int]:
    """RMSE and bytes."""
    c = codec(name)
    encoded = torch.empty(c.encoded_nbytes(tuple(t.shape), t.dtype), dtype=torch.uint8)
    out = torch.empty_like(t)
    c.encode(t, encoded)
    c.decode(encoded, out)
    return rmse(t, out), len(encoded)


def zfp(t: Tensor, dims: int, rate: int) -> tuple[float, int]:
    """RMSE and bytes, its header not counted."""
    sizes = [n for n in t.shape if n != 1]  # a dimension of 1 would be filled up to 4
    a = t.reshape(-1, *sizes[len(sizes) - dims + 1 :]).contiguous().numpy()
    data = zfpy.compress_numpy(a, rate=rate)
    return rmse(t, torch.from_numpy(zfpy.decompress_numpy(data)).view(t.shape)), len(
        zfpy.compress_numpy(a, rate=rate, write_header=False)
    )


def rmse(t: Tensor, out: Tensor) -> float:
    return math.sqrt(float((t.double() - out.double()).square().mean()))


def rows(model: str, maps: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    for name, t in maps.items():
        if t.numel() < 4096:
            continue
        scale = float(t.double().std())
        for rate in RATES:
            error, nbytes = ours(f"block{rate}", t)
            theirs = {d: zfp(t, d, rate) for d in range(1, sum(n > 1 for n in t.shape) + 1)}
            best = min(theirs.values())
            yield {
                "model": model,
                "map": name,
                "size": list(t.shape),
                "rate": rate,
                "nbytes": nbytes,
                "relative_rmse": error / scale,
                "zfp": {str(d): {"relative_rmse": e / scale, "nbytes": n} for d, (e, n) in theirs.items()},
                "to_zfp": error / best[0] if best[0] else 1.0,
                "to_zfp_2d": error / theirs[2][0] if theirs[2][0] else 1.0,
                "nbytes_to_zfp": nbytes / best[1],
                "larger": nbytes > min(n for _, n in theirs.values()),
            }
        for name_, bits in (("int4", 5), ("int8", 9)):
            error, nbytes = ours(name_, t)
            yield {"model": model, "map": name, "size": list(t.shape), "rate": bits, "codec": name_, "nbytes": nbytes,
                   "relative_rmse": error / scale}  # fmt: skip


def summary(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for model in dict.fromkeys(row["model"] for row in table):
        for rate in RATES:
            of = [row for row in table if row["model"] == model and row["rate"] == rate and "zfp" in row]
            found.append(
                {
                    "model": model,
                    "rate": rate,
                    "maps": len(of),
                    "relative_rmse": statistics.median(row["relative_rmse"] for row in of),
                    "to_zfp_mean": statistics.geometric_mean(row["to_zfp"] for row in of),
                    "to_zfp_worst": max(row["to_zfp"] for row in of),
                    "to_zfp_2d_mean": statistics.geometric_mean(row["to_zfp_2d"] for row in of),
                    "nbytes_to_zfp_mean": statistics.geometric_mean(row["nbytes_to_zfp"] for row in of),
                    "larger": sum(row["larger"] for row in of),
                }
            )
    return found


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def text(short: list[dict[str, Any]], table: list[dict[str, Any]]) -> str:
    """JSON, a row a line."""
    lines = {
        key: ",\n".join("  " + json.dumps(rounded(row)) for row in of) for key, of in (("summary", short), ("rows", table))
    }
    command = json.dumps("python -m benchmarks codecs -o benchmarks/results/codecs.json")
    return f'{{"command": {command},\n"summary": [\n{lines["summary"]}],\n"rows": [\n{lines["rows"]}]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    odd = dataclasses.replace(digits.FULL, side=28, batch_size=32)
    table = [
        *rows("digits ResNet", trained(digits, digits.FULL, options.steps)),
        *rows("digits ResNet, 28 to 7 pixels wide", trained(digits, odd, options.steps)),
        *rows("character GPT, early", trained(chargpt, chargpt.CharGPTSettings.quick(), options.steps)),
        *rows("character GPT", trained(chargpt, chargpt.FULL, 10 * options.steps)),
    ]
    short = summary(table)
    for line in short:
        print(" ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in line.items()))
    if options.out is not None:
        options.out.write_text(text(short, table))


if __name__ == "__main__":
    main()
