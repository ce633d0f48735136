"""`memopt fit`: what fits, on which card, by which batch."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_memopt
from benchmarks.lib.graphs import computed, peak_nbytes
from lightning_memopt.bench.subject import Training
from lightning_memopt.cli import main
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.answer import Fit, OnCard, answered
from lightning_memopt.fitting.cards import CARDS, CONTEXT_NBYTES, Card, cards_of
from lightning_memopt.fitting.operators import CudaOperators, update_together
from lightning_memopt.fitting.options import Options
from lightning_memopt.fitting.recording import record
from lightning_memopt.fitting.sources import of_training, source_of
from lightning_memopt.fitting.unfilled import Unfilled
from lightning_memopt.session.solve.foresight import unmodified_peak
from tests.cpu.lib.trainings import training_of

WIDTH = 256


def chain(batch: int) -> Training:
    """Twelve layers whose activations outweigh their weights."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(batch, WIDTH)
    return training_of(model, optimizer, lambda: model(x).square().mean())


CHAIN = of_training("chain", chain, 4096)


def card(nbytes: int) -> Card:
    """A card with so many bytes for torch."""
    (known,) = cards_of(["h100-80gb"])
    beside_nbytes = CONTEXT_NBYTES + known.device.workspace_nbytes
    return Card(f"{nbytes}", replace(known.device, nbytes=nbytes + beside_nbytes))


@pytest.fixture(scope="module")
def asked() -> Fit:
    """About a card on which the step fits, one where it needs a plan, and one where no plan is small enough."""
    at_ease = answered(CHAIN, [card(1 << 40)])
    middle = (at_ease.peak_nbytes + at_ease.smallest_nbytes) // 2
    return answered(CHAIN, [card(at_ease.peak_nbytes), card(middle), card(at_ease.smallest_nbytes - 1)])


def test_verdicts(asked: Fit) -> None:
    fits, by_plan, too_small = asked.cards
    assert [c.verdict for c in asked.cards] == ["fits", "plan", "no"] and not asked.fits
    assert fits.peak_nbytes == asked.peak_nbytes and fits.slowdown == 1 and fits.missing_nbytes == 0
    assert by_plan.peak_nbytes <= by_plan.usable_nbytes and 1 < by_plan.slowdown < 2
    assert too_small.missing_nbytes == 1, "the smallest plan needs one byte more"
    assert sum(asked.purposes.values()) == asked.allocated_nbytes <= asked.peak_nbytes


def test_the_largest_batch_fits_and_a_slightly_larger_one_does_not(asked: Fit) -> None:
    """Asked of steps that are recorded at those sizes."""

    def peak(batch: int) -> int:
        return unmodified_peak(record(lambda: chain(batch), cuda=True).graph)

    for on in asked.cards:
        assert on.largest_batch is not None and on.largest_planned_batch is not None
        assert peak(on.largest_batch) <= on.usable_nbytes < peak(ceil(1.03 * on.largest_batch))
        assert on.largest_planned_batch > on.largest_batch
    assert asked.cards[0].largest_batch >= CHAIN.batch


def test_the_peak_is_that_of_the_step_that_runs() -> None:
    """By torch's allocator, with the optimizer that updates all parameters together."""

    def together() -> Training:
        training = chain(512)
        update_together([training.optimizer])  # type: ignore[list-item]
        return training

    assert answered(of_training("chain", chain, None), [card(1 << 40)]).cards[0].largest_batch is None
    recorded = record(lambda: chain(512), cuda=True).graph
    blocks_nbytes = 512 * len(recorded.tensors)  # what a block of CUDA's allocator may have beyond its tensor
    assert 0 <= peak_nbytes(recorded) - peak_nbytes(computed(together)) < blocks_nbytes


def test_the_table_and_json(asked: Fit) -> None:
    text = asked.table()
    assert "fits as it is" in text and "fits by a plan" in text and "no: 1 B missing" in text
    assert "would reserve for a step that was recorded, not computed" in text and "; reserved beyond these: " in text
    parsed = json.loads(json.dumps(asked.to_json()))
    assert [c["verdict"] for c in parsed["cards"]] == ["fits", "plan", "no"] and parsed["cards"][2]["missing_nbytes"] == 1


def config(folder: Path, **more: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0} | more
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"], **sizes).save_pretrained(folder)
    return folder


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config(tmp_path)
    words = ["fit", str(folder), "--length", "32", "--batch", "2"]
    assert main([*words, "--card", "1GiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [c["verdict"] for c in answer["cards"]] == ["fits"] and answer["cards"][0]["largest_batch"] >= 2
    assert main([*words, "--card", str(CONTEXT_NBYTES + 1000)]) == 3
    assert "missing" in capsys.readouterr().out
    assert main(["fit", str(folder / "config.json"), "--length", "32", "--card", "24GiB"]) == 0, "the file, too"
    assert main([*words, "--dtype", "fp64"]) == 2
    assert "dtype is 'fp64'; give one of fp32" in capsys.readouterr().err


def test_a_plan_for_larger_batches_on_a_card_that_the_update_fills() -> None:
    """The unmodified step just fits; its peak is the update, which no plan makes smaller. Larger batches have another peak."""

    def build(batch: int) -> Training:
        model = chain(1).model
        optimizer = torch.optim.Adam(model.parameters())
        return training_of(model, optimizer, lambda: model(torch.randn(batch, WIDTH)).square().mean())

    source = of_training("chain", build, 64)
    nbytes = answered(source, [card(1 << 40)]).peak_nbytes
    on = answered(source, [card(nbytes)]).cards[0]
    assert on.largest_batch is not None and on.largest_planned_batch is not None
    assert on.largest_planned_batch > 1.5 * on.largest_batch


def test_the_longest_sample_fits_and_a_slightly_longer_one_does_not(tmp_path: Path) -> None:
    """Asked of steps that are recorded at those lengths."""
    folder = config(tmp_path)
    (on,) = answered(source_of(str(folder), Options(batch=2, length=48), ("card", 0)), [card(40 << 20)]).cards

    def peak(length: int) -> int:
        return unmodified_peak(source_of(str(folder), Options(batch=2), ("card", 0)).record(2, length).graph)

    assert on.longest is not None and on.longest_planned is not None and on.longest < on.longest_planned
    assert peak(on.longest) <= on.usable_nbytes < peak(ceil(1.03 * on.longest))


def test_attention_and_dropout_within_torchs_own_attention_are_those_of_cuda() -> None:
    layer = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(2, 8, 32, dtype=torch.bfloat16)
    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Unfilled() as mode, Names(), CudaOperators(mode):
        layer(x, x, x, need_weights=False)
        layer(x, x, x, need_weights=True)
    assert "aten::_scaled_dot_product_flash_attention" in seen and "aten::native_dropout" in seen


def test_names_of_cards(tmp_path: Path) -> None:
    assert [c.name for c in cards_of([])] == list(CARDS)
    assert cards_of(["24GiB"])[0].usable_nbytes == (24 << 30) - CONTEXT_NBYTES - (64 << 20), "as if it was an H100"
    with pytest.raises(ConfigError, match="'h1000' is no card: give bytes"):
        cards_of(["h1000"])


@pytest.mark.parametrize("wrong", [{"task": "lm"}, {"optimizer": "lion"}, {"batch": 0}, {"length": -1}, {"lora": 0}])
def test_options_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is"):
        Options(**wrong)


def test_a_config_without_a_task(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="names no task; give --task"):
        lightning_memopt.fit(str(tmp_path))


def test_a_source_that_is_not_there() -> None:
    with pytest.raises(ConfigError):
        lightning_memopt.fit("nowhere.to.be:found")


def test_adapters_take_less(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = str(config(tmp_path, n_embd=64, n_layer=4))
    options: dict[str, Any] = {"cards": ["1GiB"], "length": 32, "batch": 2, "dtype": "fp32"}
    plain = lightning_memopt.fit(folder, **options)
    adapted = lightning_memopt.fit(folder, lora=4, **options)
    assert adapted.purposes["optimizer state"] < plain.purposes["optimizer state"] / 4


# -- the operators of CUDA -----------------------------------------------------------------------


def saved_nbytes(function: Any, *tensors: torch.Tensor) -> list[int]:
    """The sizes of what autograd saves."""
    found: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.untyped_storage().nbytes()), lambda t: t):
        function(*tensors)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_dropout_saves_no_probabilities(dtype: torch.dtype, masked: bool) -> None:
    length, shape = 512, (2, 4, 512, 64)
    with Unfilled() as mode, CudaOperators(mode):
        q, k, v = (torch.empty(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = torch.ones(length, length, dtype=torch.bool).tril() if masked else None

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, dropout_p=0.1)

        out = attend(q, k, v)
        assert out.shape == shape and out.dtype == dtype
        out.sum().backward()
        assert q.grad is not None and q.grad.shape == shape
        probabilities = 2 * 4 * length * length * q.element_size()
        assert max(saved_nbytes(attend, q, k, v)) < probabilities
    mode.close()


def test_attention_of_grouped_heads_and_of_odd_ones() -> None:
    with Unfilled() as mode, CudaOperators(mode):
        q = torch.empty(1, 8, 16, 60, dtype=torch.bfloat16, requires_grad=True)
        k = torch.empty(1, 2, 16, 60, dtype=torch.bfloat16, requires_grad=True)
        out = nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        out.sum().backward()
        assert out.shape == q.shape and k.grad is not None and k.grad.shape == k.shape
    mode.close()


def test_dropout_saves_a_mask() -> None:
    with Unfilled() as mode, CudaOperators(mode):
        x = torch.empty(1000, requires_grad=True)
        assert saved_nbytes(lambda t: nn.functional.dropout(t, 0.1), x) == [1000]
        assert saved_nbytes(lambda t: nn.functional.dropout(t, 0.1, training=False), x) == []
    mode.close()


def test_what_is_moved_to_cuda_stays_here() -> None:
    with Unfilled() as mode, CudaOperators(mode):
        model = nn.Linear(4, 4, device="cuda").cuda().to("cuda:0")
        x = torch.ones(2, 4).to(torch.device("cuda"), torch.float64).to(device="cuda", dtype=torch.float32).cuda(0)
        assert model(x).device == model.weight.device == x.device == torch.device("cuda", 0) and x.dtype == torch.float32
        with torch.device("cuda"):
            assert torch.zeros(3).device.type == "cpu"
    mode.close()


def test_optimizers_update_together_unless_they_were_told() -> None:
    p = [nn.Parameter(torch.zeros(2))]
    adam = torch.optim.Adam(p)
    told = torch.optim.AdamW(p, foreach=False)
    factored = torch.optim.Adafactor(p)
    update_together([adam, told, factored])
    assert [o.param_groups[0]["foreach"] for o in (adam, told, factored)] == [True, False, None]


def test_the_verdict_has_its_missing_bytes() -> None:
    assert OnCard("a", 10, "no", 12, 1.5, None, None, None, None).missing_nbytes == 2


MODULE = """
import torch
from torch import nn

def build(device="meta"):
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
"""


def test_a_users_function_with_a_model_on_meta(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_to_fit.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["fit", "mine_to_fit:build", "--card", "1GiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    weights = 4 * (64 * 64 * 4 + 512)  # a bias takes a block of the allocator
    purposes = answer["steps"][0]["purposes"]
    assert purposes["weights"] == weights and purposes["optimizer state"] >= 2 * weights
    assert answer["cards"][0]["largest_batch"] is None, "only the function knows its batch"
    assert main(["plan", "mine_to_fit:build", "--budget", "min", "-o", str(tmp_path / "plan.json")]) == 2
    assert "the model is on `meta` and cannot take a step. Use `memopt fit mine_to_fit:build`" in capsys.readouterr().err
