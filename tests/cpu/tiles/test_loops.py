"""Loops that train in tiles, and read logits in ways of their own: equal bits, and a plan in tiles or a line that says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_memopt.runtime.tiles import HELD
from tests.cpu.lib.engines import HAS_TILES, needs_tiles
from tests.cpu.tiles.language_model import BATCH, CLASSES, TOKENS, LanguageModel, Ran, batches, compare


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
    """Accuracy in every step, between forward and backward, and a view that has the bit of a negative."""
    for ids, labels in batches():
        logits, loss = model(ids, labels)
        log.note((logits.argmax(-1) == labels).sum().item())
        log.note(torch._neg_view(logits.detach()).amax(-1))
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


def shifted(model, optimizer, log, run):
    """Each token predicts the next one: logits without the last token are copied."""
    for ids, _ in batches():
        logits = model(ids)[0][..., :-1, :].contiguous()
        loss = F.cross_entropy(logits.view(-1, CLASSES), ids[..., 1:].reshape(-1))
        loss.backward()
        log.note(loss)
        _update(optimizer)


def last_token(model, optimizer, log, run):
    """Only the last token of each text is classified."""
    for ids, _ in batches():
        loss = F.cross_entropy(model(ids)[0][:, -1].float(), ids[:, 0])
        loss.backward()
        log.note(loss)
        _update(optimizer)


def z_loss(model, optimizer, log, run):
    """The square of the log of the sum of exponentials is a part of the loss."""
    for ids, labels in batches():
        logits = model(ids)[0].flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten()) + 1e-3 * logits.logsumexp(-1).square().mean()
        loss.backward()
        log.note(loss)
        _update(optimizer)


def preferred(model, optimizer, log, run):
    """A preference loss: log-probabilities of the labels, by gather."""
    for ids, labels in batches():
        scores = model(ids)[0].log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        chosen, rejected = (scores * (labels >= 0)).sum(-1).chunk(2)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        loss.backward()
        log.note(loss)
        _update(optimizer)


def policy(model, optimizer, log, run):
    """A policy loss: the ratio to old log-probabilities is clipped, and the entropy is logged and a part of the loss."""
    for ids, labels in batches():
        scores = torch.log_softmax(model(ids)[0].float() / 0.9, -1)
        of_labels = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        entropy = -(scores.exp() * scores).sum(-1)
        ratio = (of_labels - of_labels.detach()).exp()
        loss = -torch.minimum(ratio * 0.5, ratio.clamp(0.8, 1.2) * 0.5).mean() - 0.01 * entropy.mean()
        loss.backward()
        log.note(entropy.detach().mean())
        _update(optimizer)


def distilled(model, optimizer, log, run):
    """Distillation from scores of a teacher."""
    teacher = torch.randn(BATCH, TOKENS, CLASSES, generator=torch.Generator().manual_seed(5))
    for ids, _ in batches():
        student = F.log_softmax(model(ids)[0] / 2, -1)
        loss = F.kl_div(student.flatten(0, 1), F.softmax(teacher / 2, -1).flatten(0, 1), reduction="batchmean") * 4
        loss.backward()
        log.note(loss)
        _update(optimizer)


def soft_targets(model, optimizer, log, run):
    """The target is a distribution over classes, made by scattering."""
    for ids, _ in batches():
        target = torch.zeros(BATCH * TOKENS, CLASSES).scatter_(1, ids.view(-1, 1), 0.9)
        scores = F.log_softmax(model(ids)[0].view(-1, CLASSES), -1)
        loss = -(target * scores).sum(-1).mean()
        loss.backward()
        log.note(loss)
        _update(optimizer)


def class_weights(model, optimizer, log, run):
    """Classes have weights."""
    weights = torch.linspace(0.5, 1.5, CLASSES)
    for ids, labels in batches():
        loss = F.cross_entropy(model(ids)[0].flatten(0, 1), labels.flatten(), weights)
        loss.backward()
        log.note(loss)
        _update(optimizer)


def in_place(model, optimizer, log, run):
    """Logits are divided and masked in place."""
    mask = torch.arange(CLASSES) > CLASSES - 9
    for ids, labels in batches():
        logits = model(ids)[0]
        logits.div_(0.7)
        logits.masked_fill_(mask, -1e4)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        log.note(loss)
        log.note(logits[0, 0, :5])
        _update(optimizer)


def overwritten_logits(model, optimizer, log, run):
    """The gradient of the logits, and from the seventh step on the logits themselves, are overwritten in part."""
    for step, (ids, labels) in enumerate(batches(9)):
        logits = model(ids)[0]
        if step > 6:
            with torch.no_grad():
                logits[:, :3] = 0.5
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        log.note(loss)
        _update(optimizer)


def ranked(model, optimizer, log, run):
    """Metrics of every step: the best three classes, the confidence, and the norm of the logits."""
    for ids, labels in batches():
        logits, loss = model(ids, labels)
        best = logits.detach().topk(3, dim=-1).indices
        log.note((best == labels[..., None]).any(-1).sum())
        log.note(logits.softmax(-1).amax(-1).mean())
        log.note(logits.norm())
        loss.backward()
        _update(optimizer)


def masked(model, optimizer, log, run):
    """Only the tokens of a mask are classified."""
    for ids, labels in batches():
        mask = labels % 3 == 0
        loss = F.cross_entropy(model(ids)[0][mask], labels[mask])
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


def sparse(model, optimizer, log, run):
    """Each step prints, copies and adds up sparse tensors, which have no storage, between forward and backward."""
    for ids, labels in batches():
        loss = model(ids, labels)[1]
        total = torch.eye(4).to_sparse()
        total.add_(torch.eye(4).to_sparse())
        log.note(str(total))
        loss.backward()
        log.note(total.to_dense())
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
MORE_TILED = (weighted, overwritten, failing, compiled_loss, metric, smoothed, sparse)
LOSSES = (shifted, last_token, z_loss, preferred, policy, distilled, soft_targets, class_weights, in_place, penalty)
READERS = (overwritten_logits, ranked)


def as_it_can(ran: Ran) -> bool:
    """A plan in tiles was put in force; without the native engine, a line says that no head runs in tiles."""
    return ran.tiled if HAS_TILES else not ran.tiled and bool(ran.why_whole)


@pytest.mark.parametrize("loop", (*TILED, *MORE_TILED, *LOSSES, *READERS), ids=lambda loop: loop.__name__)
def test_a_loop_trains_in_tiles_with_equal_bits(loop):
    ran = compare(loop)
    assert as_it_can(ran), ran.lines


@pytest.mark.parametrize("loop", (autocast, retained, by_hand, masked), ids=lambda loop: loop.__name__)
def test_a_loop_trains_with_equal_bits_either_way(loop):
    ran = compare(loop)
    assert ran.tiled or ran.why_whole


@needs_tiles
def test_a_frozen_head_runs_in_tiles_of_rows_alone():
    torch.manual_seed(1)
    model = LanguageModel()
    model.head.weight.requires_grad_(False)
    ran = compare(inside, model)
    assert ran.tiled
    assert ran.status.plan.tiles[0].columns == 0


def test_early_updates_and_tiles():
    ran = compare(inside, optimizer_in_backward="auto")
    assert as_it_can(ran), ran.lines


def test_tied_weights():
    torch.manual_seed(1)
    model = LanguageModel()
    model.head.weight = model.embedding.weight
    assert as_it_can(compare(inside, model))


def test_soft_capping():
    class Capped(LanguageModel):
        def forward(self, ids, labels=None):
            logits = torch.tanh(self.head(self.hidden(ids)) / 5.0) * 5.0
            return logits, None if labels is None else F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))

    torch.manual_seed(1)
    assert as_it_can(compare(inside, Capped()))


@needs_tiles
def test_what_the_loop_holds_when_weights_change_is_made_of_tiles():
    ran = compare(held)
    assert HELD in ran.status.plan.tiles[0].assembled
    assert not [line for line in ran.lines if "still held" in line]


@needs_tiles
def test_what_the_loop_did_not_hold_before_is_made_and_said():
    def late(model, optimizer, log, run):
        for step, (ids, labels) in enumerate(batches(9)):
            logits, loss = model(ids, labels)
            if step < 7:
                del logits
            loss.backward()
            _update(optimizer)
            log.note(loss)
            if step > 6:
                log.note(logits.argmax(-1))

    ran = compare(late)
    assert [line for line in ran.lines if line.startswith("MemOpt: the loop still held logits when weights changed")]
