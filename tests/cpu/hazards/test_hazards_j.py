"""Hazards of compression (J), as seen from a training step; the codecs by themselves are in tests/cpu/parking/test_codecs.py.

J2 to J4, J6 to J8: `test_lossy_codecs_keep_their_bound_and_what_is_not_finite`, `test_what_is_not_finite_stays_in_its_block`,
`test_a_constant_comes_back`, `test_accepts_only_what_it_makes_smaller` there. J5: plan/readers.py names who may be given
lossy values, with the reason. J9 and J10 are measured (benchmarks).
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memopt.plan import LoweringError, simulate
from lightning_memopt.plan.forms import codec_of
from lightning_memopt.runtime.codecs import NAMES, codec
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.stepped import Masked, Stepped, held, same, stepped

SPECIAL = [0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 1.0, -1.0, 3e38]
LOSSY = [name for name in NAMES if not codec(name).exact and not name.startswith("gated")]  # those are for ReLU's results


class Convs(nn.Module):
    """Convolutions whose inputs nobody else saves, between ReLUs whose results only they and pooling read."""

    def __init__(self, special: bool = False, dropout: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.x = torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(2))
        if special:
            self.x.view(-1)[::97][: len(SPECIAL)] = torch.tensor(SPECIAL)
        self.dropout = dropout

    def forward(self) -> Tensor:
        h = self.x
        for conv in self.convs:
            h = conv(h) * 0.5
            h = torch.relu(h) + 0.25
            if self.dropout:
                h = F.dropout(h, 0.3) + 0.5
        return h.square().mean()


class Relus(nn.Module):
    """Results of ReLU that nobody else saves, on values that are not finite too."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(SPECIAL * 12))
        self.v = nn.Parameter(torch.randn(len(SPECIAL) * 12, generator=torch.Generator().manual_seed(2)))

    def forward(self) -> Tensor:
        return (torch.relu(self.w * 1) + torch.relu(self.v * 2) + torch.relu(-self.w)).clone().sum()


@pytest.mark.parametrize("form", ["positive", "positive@disk"])
def test_j1_a_mask_gives_the_gradient_of_relu(form: str) -> None:
    """EXACT: NaN passes its gradient, -0.0 and 0.0 do not; a bit an element is all that is kept."""
    with stepped(Relus()) as one:
        program = one.away(form=form, least=1, only=one.made_by("relu"))
        assert len(program.parked) == 3 and all(life.parked_nbytes == 17 for life in program.lives if life.how == "fetch")
        assert one.step()[0].isnan().any()
        one.agrees(program)


def test_j6_bools_are_bits() -> None:
    """EXACT: masks of dropout, 8 in a byte; rebuilds may start from them."""

    for form in ("bools", "bools@disk"):
        with stepped(Masked(depth=3, dropout=0.5)) as one:
            for base in (keep_all(one.graph), held(one.graph, 1)):
                program = one.away(base, form=form, least=1)
                assert all(one.graph.tensors[t].dtype == "bool" for t in program.parked)
                one.agrees(program)


def lossy_step(one: Stepped, form: str) -> tuple[list[Tensor], list[Tensor]]:
    """Plain and planned outcomes, where what convolutions read is away in the form."""
    read = {t for op in one.graph.forward if "conv" in op.name for t in op.inputs}
    program = one.away(form=form, least=1, only=lambda t: t in read)
    found = one.step(program)
    assert same(found, one.step(program)), "the same values give the same bits"
    predicted = simulate(one.graph, program.lives).predicted.peak_nbytes
    workspace = max(codec(codec_of(form)).workspace_nbytes(one.graph.tensors[t].size, torch.float32) for t in program.parked)
    assert one.peak_nbytes(program) <= 1.01 * predicted + workspace
    return one.step(), found


@pytest.mark.parametrize("tier", ["", "@disk"])
@pytest.mark.parametrize("name", LOSSY)
def test_j9_errors_stay_in_the_gradients_of_weights(name: str, tier: str) -> None:
    """P17, P18: loss, biases and every gradient that is not of a weight are exact; those of weights are close."""
    with stepped(Convs(dropout=True)) as one:
        plain, found = lossy_step(one, name + tier)
    weights = {1 + 2 * i for i in range(1, 3)}  # loss, then weight and bias of each; the first reads the input
    for i, (a, b) in enumerate(zip(plain, found, strict=True)):
        if i in weights:
            assert not torch.equal(a, b) and F.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.97, (i, name)
        else:
            assert same_bits(a, b), i


@pytest.mark.parametrize("name", LOSSY)
def test_j2_what_is_not_finite_stays_where_it_was(name: str) -> None:
    """A gradient that is finite plainly is finite with compression, and one that is not is not."""
    with stepped(Convs(special=True)) as one:
        plain, found = lossy_step(one, name)
    for a, b in zip(plain[:-1], found[:-1], strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())


def test_j11_no_rebuild_starts_from_lossy_values() -> None:
    """P18: a plan whose rebuilds would is refused, or they start elsewhere; checksums compare what they made."""
    ran = refused = 0
    for form in ("block8", "int4@disk"):
        with stepped(Convs()) as one:
            for every in (2, 3, 4, 5):
                try:
                    program = one.away(held(one.graph, every), form=form, least=1)
                except LoweringError:
                    refused += 1
                    continue
                lossy = {t for t in program.parked if any(t in one.graph.ops[op].inputs for op in program.schedule.rebuilt)}
                one.step(program)
                ran += bool(lossy)
    assert ran + refused > 2, (ran, refused)


def test_c9_what_backward_changes_in_place_is_refused() -> None:
    """A backward that writes into what it was given: whoever reads the same tensor next raises, as in plain autograd."""

    class Rude(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rude):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            ctx.rude = rude
            return x * 2

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            (x,) = ctx.saved_tensors
            if ctx.rude:
                x.detach().zero_()
            return g, None

    class Net(Convs):
        rude = False

        def forward(self) -> Tensor:
            h = torch.relu(self.convs[0](self.x)) + 0.25
            a = self.convs[1](h)
            b = Rude.apply(h, self.rude)
            del h
            return (a.sin() + b).mean()

    for form in ("disk", "block8", "block8@disk"):
        model = Net()
        with stepped(model) as one:
            model.rude = True
            read = {t for op in one.graph.forward if "conv" in op.name for t in op.inputs}
            program = one.away(form=form, least=1, only=lambda t, read=read: t in read)  # type: ignore[misc]
            for p in (None, program):
                loss = one.forward(p)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
                del loss
                gc.collect()
                assert one.used_nbytes() == 0
