"""MachineRates of links, codecs and cards: their arithmetic, their files, and the profiles that come with the package."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_memopt.errors import ConfigError, PlanFileError
from lightning_memopt.plan.rates import OPERATORS, Coding, Device, Link, MachineRates, kind_of, profile, profiles

RATES = MachineRates(
    name="a machine",
    links={"disk": Link(out_bytes_per_second=2e9, in_bytes_per_second=4e9, out_latency_seconds=1e-3, in_latency_seconds=2e-3)},
    codecs={"block": Coding(encode_bytes_per_second=1e9, decode_bytes_per_second=2e9), "int4": Coding(**dict.fromkeys(
        ("encode_bytes_per_second", "decode_bytes_per_second"), 5e8))},
    device=Device(nbytes=1 << 30, flops_per_second={"float32": 1e12}, bytes_per_second=1e11, launch_seconds=1e-6),
    sources={"machine": "made up"},
)  # fmt: skip


def test_seconds_are_latency_and_bytes_over_rate() -> None:
    assert RATES.out_seconds("disk", 2_000_000) == pytest.approx(2e-3)
    assert RATES.in_seconds("disk", 2_000_000) == pytest.approx(2.5e-3)
    assert RATES.out_seconds("disk", 0) == RATES.in_seconds("disk", 0) == 0, "nothing is not copied"
    assert RATES.encode_seconds("block6", 1000) == RATES.encode_seconds("block", 1000) == pytest.approx(1e-6)
    assert RATES.decode_seconds("block16", 1000) == pytest.approx(5e-7)
    assert RATES.decode_seconds("int4", 1000) == pytest.approx(2e-6)
    assert RATES.knows("block9") and RATES.knows("int4") and not RATES.knows("int8") and not RATES.knows("bools")


def test_an_op_takes_what_limits_it() -> None:
    device = RATES.device
    assert device is not None
    assert device.op_seconds(2 * 10**9, 8) == pytest.approx(2e-3 + 1e-6), "arithmetic"
    assert device.op_seconds(8, 10**9) == pytest.approx(1e-2 + 1e-6), "memory"
    assert device.op_seconds(0, 0) == pytest.approx(1e-6), "its launch"
    slow = replace(device, efficiency={"attention": 0.5, "normalization": 2.0})
    flash = "aten::_scaled_dot_product_flash_attention"
    assert slow.op_seconds(2 * 10**9, 8, operator=flash) == pytest.approx(4e-3 + 1e-6)
    assert slow.op_seconds(2 * 10**9, 8, operator="aten::mm") == pytest.approx(2e-3 + 1e-6), "its efficiency is not known"


def test_kinds_of_operators() -> None:
    kinds = {
        "matmul": ("aten::mm", "aten::addmm", "aten::bmm.out", "aten::_grouped_mm"),
        "convolution": ("aten::convolution", "aten::convolution_backward", "aten::mkldnn_convolution"),
        "attention": ("aten::_scaled_dot_product_efficient_attention_backward", "aten::_flash_attention_forward"),
        "normalization": ("aten::native_layer_norm", "aten::_softmax", "aten::native_batch_norm_backward"),
        "elementwise": ("aten::gelu", "aten::digamma", "aten::upsample_bilinear2d", "aten::normal_", ""),
    }
    assert set(kinds) == set(OPERATORS)
    assert all(kind_of(name) == kind for kind, names in kinds.items() for name in names)


def test_what_has_no_rate_is_refused_by_name() -> None:
    for action, words in (
        (lambda: RATES.out_seconds("host", 1), "no link to the tier .host., only to: disk"),
        (lambda: RATES.in_seconds("host", 1), "no link to the tier .host."),
        (lambda: RATES.encode_seconds("bools", 1), "none for the codec bools, only for: block, int4"),
        (lambda: MachineRates(name="empty").decode_seconds("int8", 1), "only for: none"),
        (lambda: RATES.device and RATES.device.op_seconds(1, 1, "bfloat16"), "no FLOP rate for bfloat16; use one of float32"),
        (lambda: profile("pcie9"), "no profile 'pcie9'; use one of a100-40gb, "),
        (lambda: profile("../errors"), "no profile"),
    ):
        with pytest.raises(ConfigError, match=words):
            action()


def test_a_file_gives_back_the_same_rates(tmp_path: Path) -> None:
    for rates in (RATES, MachineRates(name="nothing is known")):
        rates.write(tmp_path / "rates.json")
        assert MachineRates.read(tmp_path / "rates.json") == rates


def broken() -> Iterator[tuple[dict[str, Any], str]]:
    def changed(*path: str, value: Any) -> dict[str, Any]:
        obj = json.loads(json.dumps(RATES.to_json()))
        inner = obj
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return obj

    yield {"schema": 1}, "not a file of rates"
    yield changed("schema", value=2), "schema"
    yield changed("name", value=3), "rates.name: 3 is not text"
    yield changed("more", value=3), "unknown"
    yield changed("links", value=[1]), "rates.links: not an object"
    yield changed("links", "disk", value={"out_bytes_per_second": 1}), "rates.links.disk: missing"
    yield changed("links", "disk", "out_bytes_per_second", value=0), "rates.links.disk.out_bytes_per_second: 0"
    yield changed("links", "disk", "in_latency_seconds", value=-1), "in_latency_seconds: -1 is not a finite number"
    yield changed("codecs", "block", "decode_bytes_per_second", value="fast"), "decode_bytes_per_second: 'fast' is not"
    yield changed("codecs", "block", "encode_bytes_per_second", value=0), "0, which would take forever"
    yield changed("device", "nbytes", value=0), "rates.device.nbytes: 0 is not a whole number"
    yield changed("device", "flops_per_second", value={"float32": 0}), "flops_per_second.float32: 0"
    yield changed("device", "efficiency", value={"attention": 0}), "efficiency.attention: 0"
    yield changed("device", "bytes_per_second", value=0.0), "rates.device.bytes_per_second: 0"
    yield changed("device", value=7), "rates.device is 7"
    yield changed("sources", "machine", value=None), "rates.sources.machine: None is not text"


@pytest.mark.parametrize("obj, words", [pytest.param(*case, id=case[1]) for case in broken()])
def test_a_file_that_is_wrong_is_refused_with_the_field(tmp_path: Path, obj: dict[str, Any], words: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(obj))
    with pytest.raises(PlanFileError, match=words) as error:
        MachineRates.read(path)
    assert "rates.json" in str(error.value)


def test_what_cannot_be_read_is_not_written(tmp_path: Path) -> None:
    for rate in (math.nan, 0.0):
        codec = Coding(encode_bytes_per_second=rate, decode_bytes_per_second=1)
        with pytest.raises(PlanFileError):
            MachineRates(name="x", codecs={"c": codec}).write(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def leaves(value: Any, at: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{at}.{key}" if at else key)
    else:
        yield at


def test_every_number_of_a_profile_has_a_source() -> None:
    assert {"pcie3-11gb", "pcie3-12gb", "pcie5-141gb"} <= set(profiles())
    for name in profiles():
        rates = profile(name)
        assert rates.name == name and rates.device is not None
        numbers = rates.to_json()
        numbers = {key: numbers[key] for key in ("links", "codecs", "device")}
        assert set(rates.sources) == {"machine", *leaves(numbers)} and all(rates.sources.values())
        assert all(rates.knows(codec) for codec in ("bools", "positive", "block4", "block16", "int8", "int4"))
        host = rates.links["host"]
        assert rates.device.bytes_per_second > 10 * host.out_bytes_per_second, "or offloading would be free"
