"""Echo's four models at the source's own widths and depths, and one training step of them recorded on this CPU.

Hyperparameters: Echo (ISCA 2020), VI-A, takes those of Zhu et al.'s benchmark suite (TBD: its Sockeye script for IWSLT15
English-Vietnamese, its deepspeech.cfg). What is below the source's is said in `below`: sequences are shorter, because
every moment of a loop over cells is some hundred ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.lib.priced import Step, counting_moved
from benchmarks.models import recurrent
from lightning_memopt.session.observe.observation import Observation

Batch = dict[str, Tensor]
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model of the source's. `batch`: what its budget is defined by, the batch that the unmodified step just holds there;
    None: the whole card.
    """

    title: str
    build: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: int | None
    sizes: tuple[int, int] = (2, 4)
    below: str = ""


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3, fused=True)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9, fused=True)


def _words(count: int, time: int) -> Callable[[int], Batch]:
    def batch(size: int) -> Batch:
        return {
            "source": torch.randint(0, count, (size, time)),
            "target": torch.randint(0, count, (size, time + 1)),
        }

    return batch


def _sound(frames: int, bands: int) -> Callable[[int], Batch]:
    return lambda size: {"sound": torch.randn(size, 1, bands, frames), "text": torch.randint(1, 29, (size, 12))}


def _images(size: int) -> Batch:
    return {"pixel_values": torch.randn(size, 3, 224, 224), "labels": torch.randint(0, 10, (size,))}


def _nmt(time: int, below: str = "") -> Setup:
    return Setup(
        title=f"NMT, 2 + 2 LSTM layers of 512, {time} words",
        build=lambda: recurrent.Translator(7709, 512, 0.2, fused=False),
        data=_words(7709, time),
        optimizer=_adam,
        batch=128,
        below=below,
    )


SETUPS = {
    "nmt": _nmt(50, "50 words a sentence (Sockeye's buckets go to 100)"),
    "nmt_100": _nmt(100),
    "deepspeech2": Setup(
        title="DeepSpeech2, 7 GRU layers of 1760, both ways",
        build=lambda: recurrent.Speech(160, 32, 1760, 7, 29, fused=False),
        data=_sound(64, 160),
        optimizer=_sgd,
        batch=24,
        below="64 frames a sample (the source's buckets: 200 to 1600), one output layer, 160 bands (161)",
    ),
    "transformer": Setup(
        title="Transformer, 6 + 6 layers of 512",
        build=lambda: recurrent.Seq2Seq(32000, 512, 6, 64, heads=8),
        data=_words(32000, 64),
        optimizer=_adam,
        batch=None,
    ),
    "resnet152": Setup(
        title="ResNet-152, 224 pixels",
        build=lambda: recurrent.resnet(width=256, batch=1)[0],
        data=_images,
        optimizer=_sgd,
        batch=None,
        below="10 classes (1,000)",
    ),
}


def observe(setup: Setup, size: int) -> Step:
    """One real training step at this batch size, update included, in the steady state."""
    torch.manual_seed(0)
    model = setup.build().train()
    optimizer = setup.optimizer(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # makes its state
    optimizer.zero_grad()
    batch = setup.data(size)
    observation = Observation(model, [optimizer], _CPU, None, verify=False, meter=False)
    with counting_moved() as moved:
        with observation.begin_round(batch):
            loss = model(**batch).loss
        observation.forward_ended()
        loss.backward()
        del loss
        observation.update_begins()
        optimizer.step()
        optimizer.zero_grad()
        graph = observation.finish()
    assert graph is not None and len(graph.ops) == len(moved)
    return Step(graph, tuple(moved))
