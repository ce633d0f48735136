"""Logits are a purpose of their own: which tensors of a step they are, and the bytes that are said to be theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memopt.graph import Graph
from lightning_memopt.plan.logits import logits
from lightning_memopt.plan.peak import at_peak, stacks
from lightning_memopt.solvers.recompute.baselines import recompute_everything
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib.observed_graph import graph_of

WORDS, TOKENS, WIDTH = 500, 64, 32
Loss = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A body with attention, and scores for `WORDS` words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        h = self.embed(words)[None]
        scores: Tensor = self.head(self.attend(h, h, h, need_weights=True)[0]).flatten(0, 1)
        return scores


def graph(loss: Loss, dtype: torch.dtype = torch.float32) -> Graph:
    model, words = Head().to(dtype), torch.arange(TOKENS)
    return graph_of(model, (words,), lambda: loss(model(words), words), verify=False)


def capped(scores: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy((scores / 30).tanh() * 30, words)


def shifted(scores: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(scores.float()[:-1].contiguous(), words[1:])


def distilled(scores: Tensor, _: Tensor) -> Tensor:
    return F.kl_div(scores.log_softmax(-1), torch.full_like(scores, 1 / WORDS), reduction="batchmean")


def tagged(scores: Tensor, _: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))


PLAIN = ["mm", "_log_softmax", "nll_loss_backward", "_log_softmax_backward_data"]
LOSSES: dict[str, tuple[Loss, torch.dtype, list[str]]] = {
    "cross entropy": (F.cross_entropy, torch.float32, PLAIN),
    "half precision": (lambda s, w: F.cross_entropy(s.float(), w), torch.bfloat16, [*PLAIN, "_to_copy", "_to_copy"]),
    "soft capping": (capped, torch.float32, [*PLAIN, "div", "tanh", "mul", "mul", "tanh_backward", "div"]),
    "shifted": (shifted, torch.bfloat16, [*PLAIN, "_to_copy", "slice_backward", "_to_copy"]),
    "distillation": (distilled, torch.float32, ["mm", "_log_softmax", "_log_softmax_backward_data"]),
    "tags": (tagged, torch.float32, ["mm", "sigmoid", "sub", "mul"]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_counts_as_logits(name: str) -> None:
    """From the product that makes them to the one that reads their gradient; neither attention's scores nor the body."""
    loss, dtype, ops = LOSSES[name]
    step = graph(loss, dtype)
    found = logits(step)
    made = Counter(step.producers[t].name.split("::")[1].split(".")[0] for t in found)
    assert not Counter(ops) - made, "targets of the same size may be among them, too"
    assert all(max(step.tensors[t].size) == WORDS for t in found)


def test_steps_without_a_loss_over_classes_have_none() -> None:
    assert not logits(graph(lambda scores, _: scores.square().mean()))


@pytest.mark.parametrize("policy", [keep_all, recompute_everything], ids=["kept", "dropped"])
def test_their_bytes_are_theirs_whoever_holds_them(policy: Any) -> None:
    """Held for autograd, rebuilt or passing by: the scores, their logarithm and a gradient are there at the same time."""
    step = graph(F.cross_entropy)
    lives = policy(step)
    assert at_peak(step, lives).by(1)["logits"] >= 2 * TOKENS * WORDS * 4
    assert max(stacks(step, lives)["logits"]) >= 2 * TOKENS * WORDS * 4
