"""Loops that train in tiles, and read logits in ways of their own: equal bits, and a plan in tiles or a line that says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.tiles.language_model import CLASSES, LanguageModel, batches, compare


def _update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def inside(model, optimizer, log, run):
    """The loss is a part of the model; nothing holds the logits."""
    for ids, labels in batches():
        loss = model(ids, labels)[1]
        loss.backward()
        log.note(loss)
        _update(optimizer)


def outside(model, optimizer, log, run):
    """The loss is a part of the loop."""
    for ids, labels in batches():
        loss = F.cross_entropy(model(ids)[0].flatten(0, 1), labels.flatten())
        loss.backward()
        log.note(loss)
        _update(optimizer)


def held(model, optimizer, log, run):
    """The loop holds the logits, and reads them after the weights have changed."""
    for ids, labels in batches():
        logits, loss = model(ids, labels)
        loss.backward()
        _update(optimizer)
        log.note(loss)
        log.note(logits.argmax(-1))


def metric(model, optimizer, log, run):
    """Accuracy in every step, between forward and backward."""
    for ids, labels in batches():
        logits, loss = model(ids, labels)
        log.note((logits.argmax(-1) == labels).sum().item())
        loss.backward()
        _update(optimizer)


def now_and_then(model, optimizer, log, run):
    """Each step after the sixth reads the logits in another way."""
    for step, (ids, labels) in enumerate(batches(13)):
        logits, loss = model(ids, labels)
        ways = {
            6: lambda x: x.detach().numpy()[0, 0, :5].tolist(),
            7: lambda x: x.detach().tolist()[0][0][:5],
            8: lambda x: str(x),
            9: lambda x: x[0, 1, 2].item(),
            10: lambda x: x.detach().clone(),
            11: lambda x: x.data_ptr() != 0 and x.std().item(),
            12: lambda x: torch.topk(x.detach(), 3).values,
        }
        if step in ways:
            log.note(ways[step](logits))
        loss.backward()
        log.note(loss)
        _update(optimizer)


def hooked(model, optimizer, log, run):
    """A hook on the logits scales their gradient from the first step on, and another one reads it from the seventh on."""
    for step, (ids, labels) in enumerate(batches(9)):
        logits, loss = model(ids, labels)
        logits.register_hook(lambda g: g * 2)
        if step > 6:
            logits.register_hook(lambda g: log.note(g.abs().max()))
        loss.backward()
        log.note(loss)
        _update(optimizer)


def late_hook(model, optimizer, log, run):
    """A hook of the seventh step runs an op that was not compared: it runs on whole tensors."""
    for step, (ids, labels) in enumerate(batches(9)):
        logits, loss = model(ids, labels)
        if step > 6:
            logits.register_hook(lambda g: g.clamp(-1e-4, 1e-4))
        loss.backward()
        log.note(loss)
        _update(optimizer)


def twice(model, optimizer, log, run):
    """Two backwards of one graph."""
    for ids, labels in batches():
        loss = model(ids, labels)[1]
        loss.backward(retain_graph=True)
        loss.backward()
        log.note(loss)
        _update(optimizer)


def retained(model, optimizer, log, run):
    """The gradient of the logits is retained, and read."""
    for ids, labels in batches():
        logits, loss = model(ids, labels)
        logits.retain_grad()
        loss.backward()
        log.note(logits.grad.norm())
        _update(optimizer)


def penalty(model, optimizer, log, run):
    """A gradient of the loss is a part of the loss."""
    for ids, labels in batches():
        loss = model(ids, labels)[1]
        (g,) = torch.autograd.grad(loss, [model.norm.weight], create_graph=True)
        (loss + g.square().sum()).backward()
        log.note(loss)
        _update(optimizer)


def accumulated(model, optimizer, log, run):
    """Two forwards and backwards before each update."""
    for i, (ids, labels) in enumerate(batches(12)):
        loss = model(ids, labels)[1] / 2
        loss.backward()
        log.note(loss)
        if i % 2:
            _update(optimizer)


def both_first(model, optimizer, log, run):
    """Two forwards, one backward."""
    data = batches(12)
    for (a, b), (c, d) in zip(data[::2], data[1::2], strict=True):
        loss = model(a, b)[1] + model(c, d)[1]
        loss.backward()
        log.note(loss)
        _update(optimizer)


def autocast(model, optimizer, log, run):
    """Forward in bfloat16."""
    for ids, labels in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels)[1]
        loss.backward()
        log.note(loss)
        _update(optimizer)


def scaled(model, optimizer, log, run):
    """A gradient scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for ids, labels in batches():
        loss = model(ids, labels)[1]
        scaler.scale(loss).backward()
        log.note(loss)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def evaluated(model, optimizer, log, run):
    """Evaluation and generation between steps, and within one."""
    for step, (ids, labels) in enumerate(batches(9)):
        if step % 2:
            model.eval()
            with torch.no_grad():
                logits, loss = model(ids, labels)
                log.note(loss)
                log.note(logits[:, -1].argmax(-1))
            model.train()
        loss = model(ids, labels)[1]
        loss.backward()
        if step == 7:
            with torch.no_grad():
                log.note(model(ids)[0].sum())
        log.note(loss)
        _update(optimizer)


def summed(model, optimizer, log, run):
    """A sum over tokens, divided by their number."""
    for ids, labels in batches():
        logits = model(ids)[0]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (labels != -100).sum()
        loss.backward()
        log.note(loss)
        _update(optimizer)


def weighted(model, optimizer, log, run):
    """A weight for each token."""
    weights = torch.linspace(0.5, 1.5, 256)
    for ids, labels in batches():
        losses = F.cross_entropy(model(ids)[0].flatten(0, 1), labels.flatten(), reduction="none")
        loss = (losses * weights).mean()
        loss.backward()
        log.note(loss)
        _update(optimizer)


def smoothed(model, optimizer, log, run):
    """Label smoothing reads all log-probabilities."""
    for ids, labels in batches():
        loss = F.cross_entropy(model(ids)[0].flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        loss.backward()
        log.note(loss)
        _update(optimizer)


def overwritten(model, optimizer, log, run):
    """The head is frozen, so autograd does not save what it reads; from the seventh step on, the loop overwrites that before
    backward.
    """
    model.head.weight.requires_grad_(False)
    for step, (ids, labels) in enumerate(batches(9)):
        hidden = model.hidden(ids)
        loss = F.cross_entropy(model(ids)[0].flatten(0, 1) if step < 3 else model.head(hidden).flatten(0, 1), labels.flatten())
        if step > 6:
            hidden.data.mul_(0.5)
        loss.backward()
        log.note(loss)
        _update(optimizer)


def by_hand(model, optimizer, log, run):
    """Weights are updated by hand while the loop holds the logits."""
    for ids, labels in batches(9):
        logits, loss = model(ids, labels)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        log.note(logits[0, 0, :9])
        optimizer.zero_grad()


def compiled_loss(model, optimizer, log, run):
    """The loss is compiled from the seventh step on."""
    compiled = torch.compile(F.cross_entropy, backend="aot_eager")
    for step, (ids, labels) in enumerate(batches(9)):
        loss_of = compiled if step > 6 else F.cross_entropy
        loss = loss_of(model(ids)[0].flatten(0, 1), labels.flatten())
        loss.backward()
        log.note(loss)
        _update(optimizer)


def failing(model, optimizer, log, run):
    """A step raises behind its loss, and the loop goes on."""
    for step, (ids, labels) in enumerate(batches(10)):
        try:
            loss = model(ids, labels)[1]
            if step in (3, 8):
                raise ValueError("of the user")
            loss.backward()
        except ValueError:
            optimizer.zero_grad()
            continue
        log.note(loss)
        _update(optimizer)


TILED = (inside, outside, held, now_and_then, hooked, late_hook, twice, accumulated, both_first, scaled, evaluated, summed)
MORE_TILED = (weighted, overwritten, failing, compiled_loss)
WHOLE = (metric, penalty, smoothed)


@pytest.mark.parametrize("loop", (*TILED, *MORE_TILED), ids=lambda loop: loop.__name__)
def test_a_loop_trains_in_tiles_with_equal_bits(loop):
    ran = compare(loop)
    assert ran.tiled, ran.lines


@pytest.mark.parametrize("loop", WHOLE, ids=lambda loop: loop.__name__)
def test_a_loop_whose_head_stays_whole_is_told_why(loop):
    ran = compare(loop)
    assert not ran.tiled
    assert ran.why_whole
    assert ran.status.plan is not None


@pytest.mark.parametrize("loop", (autocast, retained, by_hand), ids=lambda loop: loop.__name__)
def test_a_loop_trains_with_equal_bits_either_way(loop):
    ran = compare(loop)
    assert ran.tiled or ran.why_whole


def test_a_frozen_head_runs_in_tiles_of_rows_alone():
    torch.manual_seed(1)
    model = LanguageModel()
    model.head.weight.requires_grad_(False)
    ran = compare(inside, model)
    assert ran.tiled
    assert ran.status.plan.tiles[0].columns == 0


def test_early_updates_and_tiles():
    ran = compare(inside, optimizer_in_backward="auto")
    assert ran.tiled, ran.lines


def test_tied_weights():
    torch.manual_seed(1)
    model = LanguageModel()
    model.head.weight = model.embedding.weight
    assert compare(inside, model).tiled


def test_soft_capping():
    class Capped(LanguageModel):
        def forward(self, ids, labels=None):
            logits = torch.tanh(self.head(self.hidden(ids)) / 5.0) * 5.0
            return logits, None if labels is None else F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))

    torch.manual_seed(1)
    assert compare(inside, Capped()).tiled


def test_a_bias():
    torch.manual_seed(1)
    model = LanguageModel()
    model.head = torch.nn.Linear(32, CLASSES)
    ran = compare(inside, model)
    assert ran.tiled or ran.why_whole


def test_what_the_loop_holds_when_weights_change_is_made_and_said():
    assert [line for line in compare(held).lines if line.startswith("MemOpt: the loop still held logits when weights changed")]
