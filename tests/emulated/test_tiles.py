"""Loss heads in tiles, in bits mode: bits of planned steps, streams, and who reads logits on another device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.cpu.tiles import language_model
from tests.cpu.tiles.language_model import WIDTH, LanguageModel, Ran
from tests.emulated import device

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")


CLASSES = 16_384
"""Large enough for logits to have segments of their own. The plans are those of reserved bytes."""


class Model(LanguageModel):
    """A larger head. Its logits are cast, as those of transformers are, unless `casts` is off."""

    def __init__(self, casts: bool = True, wide: int = 0) -> None:
        super().__init__()
        self.casts = casts
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.blocks.extend(nn.Sequential(nn.Linear(WIDTH, 4096), nn.GELU(), nn.Linear(4096, WIDTH)) for _ in range(wide))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = self.head(self.hidden(ids))
        logits = logits.float() if self.casts else logits
        return logits, None if labels is None else F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def batches(steps: int = 7) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(ids.cuda(), labels.cuda()) for ids, labels in language_model.batches(steps)]


def update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def loop(dtype: torch.dtype | None = None, scale: float = 1.0, each: int = 1) -> language_model.Loop:
    """Autocast to `dtype`, a gradient scaler that begins with `scale`, and an update after `each` batches."""

    def train(model: Any, optimizer: Any, log: Any, run: Any) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=scale, enabled=scale != 1)
        for i, (ids, labels) in enumerate(batches(9 * each)):
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = model(ids, labels)[1]
            scaler.scale(loss).backward()
            log.note(loss)
            if i % each == each - 1:
                for p in filter(lambda p: p.grad is not None, model.parameters()):
                    log.note(p.grad)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    return train


def compare(train: language_model.Loop, model: LanguageModel, **options: Any) -> Ran:
    before = device.races()
    gc.collect()
    torch.cuda.empty_cache()  # segments that others left count as reserved
    torch.manual_seed(1)
    ran = language_model.compare(train, model.cuda(), **options)
    assert device.races() == before
    return ran


def in_tiles(ran: Ran) -> bool:
    """Whether a plan in tiles is in force."""
    return bool(ran.status.plan.tiles) and not ran.status.deviates


def made(dtype: torch.dtype = torch.float32, frozen: bool = False, casts: bool = True, wide: int = 0) -> LanguageModel:
    torch.manual_seed(1)
    model = Model(casts, wide).to(dtype)
    model.head.weight.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize(
    ("train", "options"),
    [
        (loop(), {}),
        (loop(scale=8.0), {}),
        (loop(each=2), {}),
        (loop(torch.bfloat16), {}),
        (loop(torch.float16, scale=8.0), {}),
        (loop(), {"optimizer_in_backward": "auto"}),
        (loop(), {"pool": "planned"}),
    ],
    ids=["plain", "scaler", "accumulated", "bfloat16", "float16", "early updates", "pool"],
)
def test_bits(train: language_model.Loop, options: dict[str, Any]) -> None:
    assert in_tiles(compare(train, made(), **options))


@pytest.mark.parametrize("casts", [True, False], ids=["cast", "as they are"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_a_frozen_head(dtype: torch.dtype | None, casts: bool) -> None:
    """Without a cast by the model, autocast computes the loss's softmax in 16 bits, and casts the gradient of its result."""
    assert in_tiles(compare(loop(dtype), made(frozen=True, casts=casts)))


def reading(*ways: Callable[[torch.Tensor], Any]) -> language_model.Loop:
    """Each step after the sixth reads the logits in one of these ways, between forward and backward."""

    def train(model: Any, optimizer: Any, log: Any, run: Any) -> None:
        for step, (ids, labels) in enumerate(batches(6 + len(ways))):
            logits, loss = model(ids, labels)
            if step >= 6:
                value = ways[step - 6](logits)
                log.note(str(getattr(value, "device", None)))
                log.note(value)
            loss.backward()
            log.note(loss)
            del logits, loss
            update(optimizer)

    return train


def on_another(logits: torch.Tensor) -> torch.Tensor:
    """Two streams read: the other one first, and this one without waiting for it."""
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        first = logits.detach().argmax(-1)
    second = logits.detach().max(-1).values
    torch.cuda.current_stream().wait_stream(other)
    return first + second


def late(logits: torch.Tensor) -> torch.Tensor:
    copy = logits.detach().to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    return copy


def pinned(logits: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True).copy_(logits.detach(), non_blocking=True)
    torch.cuda.synchronize()
    return copy


def hooked(logits: torch.Tensor) -> None:
    """Runs in the device's own thread."""
    logits.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a metric": lambda x: (x.argmax(-1) == 3).float().mean().item(),
    "print": str,
    "cpu": lambda x: x.cpu(),
    "another dtype on the host": lambda x: x.detach().to("cpu", torch.bfloat16),
    "late": late,
    "pinned": pinned,
    "data_ptr": lambda x: x.data_ptr() != 0 and x.std().item(),
    "data_ptr of the storage": lambda x: x.untyped_storage().data_ptr() != 0 and x.std().item(),
    "dlpack": lambda x: torch.from_dlpack(x.detach()).clone(),
    "array interface": lambda x: x.detach().__cuda_array_interface__["data"][0] != 0 and x.std().item(),
    "streams": on_another,
    "record_stream": lambda x: x.record_stream(torch.cuda.Stream()) or x.std().item(),
    "hook": hooked,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_readers(dtype: torch.dtype) -> None:
    """In bfloat16 the head's logits are cast, and so the ops that were compared include casts."""
    ran = compare(reading(*WAYS.values()), made(dtype, frozen=True))
    assert ran.tiled


def test_numpy_is_refused_as_without_tiles() -> None:
    def refused(logits: torch.Tensor) -> str:
        with pytest.raises(TypeError) as error:
            logits.detach().numpy()
        return str(error.value)

    assert compare(reading(refused), made()).tiled


NO_TILES = "no loss reads the logits in a way that can run on tiles"


def test_a_loss_on_the_host_reads_whole_logits() -> None:
    def train(model: Any, optimizer: Any, log: Any, run: Any) -> None:
        for ids, labels in batches():
            loss = F.cross_entropy(model(ids)[0].cpu().flatten(0, 1), labels.flatten().cpu())
            loss.backward()
            log.note(loss)
            update(optimizer)

    (why,) = compare(train, made(casts=False)).why_whole
    assert NO_TILES in why


@pytest.mark.parametrize("first", [0, 6], ids=["always", "later"])
def test_a_loss_on_another_stream_reads_whole_logits(first: int) -> None:
    """Autograd hands gradients from stream to stream by the memory that they have. What is always whole is not in tiles."""

    def train(model: Any, optimizer: Any, log: Any, run: Any) -> None:
        other, usual = torch.cuda.Stream(), torch.cuda.current_stream()
        for step, (ids, labels) in enumerate(batches(8)):
            logits = model(ids)[0]
            other.wait_stream(usual)
            with torch.cuda.stream(other if step >= first else usual):
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            usual.wait_stream(other)
            logits.record_stream(other) if step >= first else None
            loss.backward()
            log.note(loss)
            del logits
            update(optimizer)

    ran = compare(train, made(casts=False))
    assert ran.tiled == bool(first)
    assert first or NO_TILES in ran.why_whole[0]


def test_a_loop_on_a_stream_of_its_own() -> None:
    def train(model: Any, optimizer: Any, log: Any, run: Any) -> None:
        own = torch.cuda.Stream()
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            loop()(model, optimizer, log, run)
        torch.cuda.current_stream().wait_stream(own)

    assert compare(train, made()).tiled


@pytest.mark.parametrize("options", [{}, {"offload": "host"}], ids=["min", "offload"])
def test_what_is_whole_for_a_while_is_predicted(options: dict[str, Any]) -> None:
    """No tiles of columns give the bits of the product for the head's weight, so the gradient of the logits is whole."""

    def train(model: Any, optimizer: Any, log: Any, run: Any) -> None:
        for ids, labels in batches(10):
            loss = model(ids, labels)[1]
            loss.backward()
            log.note(loss.item())
            update(optimizer)

    status = compare(train, made(wide=6), **options).status
    (head,) = status.plan.tiles
    assert {"aten::mm by rows", "aten::mm by columns"} <= set(head.assembled)
    assert not status.replans
    # state and gradients that come and go cut segments in other places: two small ones, of 2 MiB each, more than predicted
    more = 4 << 20 if options else 0
    assert status.plan.predicted.needed_nbytes <= status.measured_peak_nbytes <= status.plan.predicted.needed_nbytes + more
