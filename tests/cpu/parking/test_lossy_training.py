"""Training with every eligible map really encoded: what is encoded, which gradients it reaches, where the loss goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.offload.lossy import counting, eligible, everything_away, observed, plan_of, summary, trained
from examples import chargpt, digits
from lightning_memopt import optimize
from lightning_memopt.errors import ConfigError
from lightning_memopt.plan import write_plan
from lightning_memopt.plan.forms import codec_of
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.stepped import Stepped

RESNET = digits.DigitsSettings(widths=(8, 16), blocks_per_stage=1, side=8, batch_size=64)


def test_errors_reach_the_weights_of_convolutions_and_linear_layers_alone() -> None:
    """One step of the ResNet, in-place ReLUs after batch norm: all other gradients, loss and buffers have the same bits."""
    workload = digits.build(0, RESNET)
    batch = next(iter(workload.train_loader))
    one = Stepped(workload.model, lambda: digits.loss_of(workload.model, batch))
    forms = eligible(one.graph, "block4")
    assert len(forms) == 5 and {form for form, _ in forms.values()} == {"block4", "gated4"}
    expected = one.step()
    names = ["loss", *(n for n, _ in workload.model.named_parameters())]
    found: list[Tensor] = one.step(one.away(form="gated4", only=lambda t: forms.get(t, ("",))[0] == "gated4"))
    changed = {n for n, a, b in zip(names, expected, found, strict=False) if not same_bits(a, b)}
    inputs_encoded = {n for n, p in workload.model.named_parameters() if p.dim() == 4 and n != "stem.0.weight"}
    assert changed == inputs_encoded
    assert all(same_bits(a, b) for a, b in zip(expected[len(names) :], found[len(names) :], strict=True))


def test_every_eligible_map_is_encoded_in_every_step() -> None:
    exact, lossy = (trained("digits", form, 0, 6, RESNET) for form in ("exact", "block4"))
    assert exact.encoded == 0 and lossy.maps == lossy.encoded == 5
    assert lossy.encoded_nbytes == lossy.map_nbytes == 8 * lossy.written_nbytes > 0.3 * lossy.saved_nbytes
    assert exact.loss != lossy.loss and abs(lossy.last_losses / exact.last_losses - 1) < 0.1
    short = summary([exact, lossy])
    assert [row["form"] for row in short] == ["exact", "block4"] and all(row["all_encoded"] for row in short)


@pytest.mark.parametrize("compress", ["none", "lossless"])
def test_errors_come_from_no_file_alone(compress: str, tmp_path: Path) -> None:
    """A file whose plan encodes with errors is refused before anything runs, where nobody asked for errors."""
    workload = digits.build(0, RESNET)
    graph = observed(digits, RESNET)
    path = tmp_path / "plan.json"
    write_plan(path, plan_of(graph, everything_away(graph, eligible(graph, "block4"))), graph)
    options = dict(budget="auto", plan=path, verbose=False)
    optimizer = workload.make_optimizer(workload.model)
    with pytest.raises(ConfigError, match="block4, gated4"), optimize(workload.model, optimizer, compress=compress, **options):
        pass
    with optimize(workload.model, optimizer, compress="block4", **options):
        pass


@pytest.mark.parametrize("name", ["block6", "int4"])
def test_what_is_eligible_in_a_transformer(name: str) -> None:
    """What linear layers alone save: results of layer norms and of GELU; not what attention reads too."""
    graph = observed(chargpt, chargpt.CharGPTSettings.quick())
    forms = eligible(graph, name)
    assert {codec_of(form) for form, _ in forms.values()} == {name}
    made = sorted(graph.producers[t].name for t in forms)
    assert made == ["aten::gelu"] * 2 + ["aten::native_layer_norm"] * 5
    lives = everything_away(graph, forms)
    assert {life.tensor for life in lives if life.how == "fetch"} == set(forms)
    with counting() as counts:
        assert counts == [0, 0, 0]
