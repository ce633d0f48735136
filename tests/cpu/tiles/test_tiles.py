"""Recipes, hollow tensors, proofs, and what becomes of tiles in plans and files."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from lightning_memopt import MemOptConfig, optimize
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.native.engine import loaded
from lightning_memopt.plan import TiledHead, tiles_text
from lightning_memopt.plan.logits import head_of
from lightning_memopt.runtime.tiles import HELD, Proof, Sizes, TileMode
from lightning_memopt.runtime.tiles.exits import Product
from lightning_memopt.runtime.tiles.kinds import LogSoftmax
from lightning_memopt.session.tiling import Tiling
from lightning_memopt.torch_private import storage_id
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.tiles import test_loops
from tests.cpu.tiles.language_model import CLASSES, LanguageModel, Picking, batches, compare, picking

pytestmark = needs_tiles
_ROWS, _WIDTH = 96, 48


def _head(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(_ROWS, _WIDTH, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()
    w = (torch.randn(CLASSES, _WIDTH, generator=generator) * 0.2).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (_ROWS,), generator=generator)
    target[::7] = -100
    return x, w, target


def _run(mode, x, w, target, reduction="mean", before_backward=lambda logits: None):
    """The loss and the gradients under a mode; without one where it is None."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    if mode is not None:
        mode.inside = True
        mode.enter()
    try:
        logits = F.linear(x, w)
        loss = F.cross_entropy(logits.float(), target, reduction=reduction)
        before_backward(logits)
        loss.sum().backward()
    finally:
        if mode is not None:
            mode.end()
            mode.leave()
    return loss.detach(), x.grad, w.grad


def _mode(work):
    return TileMode(CLASSES, work, notes=True)


def _proven(x, w, target, rows, columns, reduction="mean"):
    proof = Proof(tuple(sorted(rows)), tuple(sorted(columns)))
    _run(_mode(proof), x, w, target, reduction)
    return proof


def _least(proof, x, w, target):
    """The smallest tiles, after as many proofs as it takes."""
    while (larger := proof.again()) is not None:
        proof = larger
        _run(_mode(proof), x, w, target)
    return proof.results(_ROWS)[-1]


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_sizes_that_are_proven_give_the_bits_of_whole_ops_on_other_values(dtype, reduction):
    x, w, target = _head(dtype)
    proof = _proven(x, w, target, (48, 32, 16), (1024, 512, 256, 128), reduction)
    assert proof.exits == 3
    ways = proof.results(_ROWS)
    assert ways or dtype is not torch.float32
    for sizes in ways:
        for seed in (1, 2):
            other = _head(dtype, seed)
            whole = _run(None, *other, reduction)
            assert all(map(torch.equal, whole, _run(_mode(sizes), *other, reduction)))


def test_a_proof_drops_sizes_that_give_other_bits(monkeypatch):
    into = Product.into

    def wrong(self, out, span):
        into(self, out, span)
        if span.n in wrong_sizes:
            out.view(torch.int32)[0, 0] ^= 1

    monkeypatch.setattr(Product, "into", wrong)
    wrong_sizes = {16, 256}
    proof = _proven(*_head(), (48, 16), (512, 256))
    sizes = _least(proof, *_head())
    assert (sizes.rows, sizes.columns, sizes.assembled) == (48, 512, {HELD})
    assert proof.wrong == "aten::mm by rows"
    wrong_sizes = {16, 48}
    sizes = _least(_proven(*_head(), (48, 16), (512, 256)), *_head())
    assert (sizes.rows, sizes.columns) == (16, 0)
    assert sizes.assembled == {"aten::mm by rows", "aten::mm by columns", HELD}


def test_an_exit_whose_comparison_is_interrupted_is_as_if_it_had_not_been(monkeypatch):
    into = Product.into

    def interrupted(self, out, span):
        if self.columns:
            raise KeyboardInterrupt
        into(self, out, span)

    proof = Proof((48,), (512,))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Product, "into", interrupted)
        _run(_mode(proof), *_head())
    assert proof.again() is None
    assert not any(sizes.columns for sizes in proof.results(_ROWS))


def test_tiles_that_differ_by_rounding_are_taken_only_if_they_may():
    x, w, target = _head()
    into = Product.into

    def rounded(self, out, span):
        into(self, out, span)
        out *= 1 + 2 * torch.finfo(out.dtype).eps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Product, "into", rounded)
        exact = _least(_proven(x, w, target, (48, 16), (512,)), x, w, target)
        assert exact.assembled == {"aten::mm by rows", "aten::mm by columns", HELD}
        proof = Proof((16, 48), (512,), rounding=True)
        _run(_mode(proof), x, w, target)
        sizes = _least(proof, x, w, target)
        assert (sizes.rows, sizes.columns, sizes.assembled) == (16, 512, {HELD})
        assert sizes.rounded == {"aten::mm by rows", "aten::mm by columns"}


def test_an_op_that_was_not_compared_runs_whole():
    x, w, target = _head()
    whole = _run(None, x, w, target)
    mode = _mode(Sizes(48, 512, _ROWS, frozenset({f"aten::mm float32 of {_WIDTH}", "aten::_log_softmax float32"})))
    assert all(map(torch.equal, whole, _run(mode, x, w, target)))
    assert mode.outcome.read["aten::nll_loss_forward"] == _ROWS * CLASSES * 4


def test_a_hollow_tensor_looks_like_the_whole_one_and_has_no_bytes():
    x, w, target = _head()
    sizes = _proven(x, w, target, (48,), (512,)).results(_ROWS)[-1]
    seen = []

    def look(logits):
        seen.append((logits.shape, logits.stride(), logits.dtype, logits.device, logits.untyped_storage().nbytes()))

    _run(_mode(sizes), x, w, target, before_backward=look)
    _run(None, x, w, target, before_backward=look)
    assert seen[0][:-1] == seen[1][:-1]
    assert seen[0][-1] == 0


def test_memory_that_is_read_unseen_raises_instead_of_giving_other_numbers():
    x, w, target = _head()
    sizes = _proven(x, w, target, (48,), (512,)).results(_ROWS)[-1]

    def read(logits):
        with pytest.raises(RuntimeError, match="MemOpt computes this tensor tile by tile"):
            torch.frombuffer(memoryview(logits.detach().numpy()), dtype=torch.float32)  # no run: nobody watches numpy()

    _run(_mode(sizes), x, w, target, before_backward=read)


def test_an_op_that_reads_logits_and_writes_to_what_they_are_made_of():
    x, w, target = _head()
    sizes = _proven(x, w, target, (48,), (512,)).results(_ROWS)[-1]
    sizes = dataclasses.replace(sizes, ops=sizes.ops | {"aten::add"})

    def run(mode):
        hidden = x.detach().clone()

        def write(logits):
            hidden.data.add_(logits.detach()[:, :_WIDTH])

        return (*_run(mode, hidden, w, target, before_backward=write), hidden)

    assert all(map(torch.equal, run(None), run(_mode(sizes))))


def test_memory_that_has_an_address_of_freed_memory_may_be_written_to():
    x, w, target = _head()
    sizes = _proven(x, w, target, (48,), (512,)).results(_ROWS)[-1]
    mode = _mode(sizes)

    def write(logits):
        other = torch.zeros(4)
        mode._sources.add(storage_id(other))  # as if it had the address of what freed recipes read
        other.add_(1)

    _run(mode, x, w, target, before_backward=write)
    assert not mode.outcome.read


def test_memory_that_has_an_address_of_memory_that_was_handed_out_is_not_taken_for_it():
    mode = _mode(None)
    other = torch.zeros(4)
    mode.exposed(other, address=False)
    address = storage_id(other)
    del other
    others = [torch.zeros(4) for _ in range(64)]
    assert address not in map(storage_id, others)


def test_recipes_are_freed_with_their_tensors():
    x, w, target = _head()
    sizes = _proven(x, w, target, (48,), (512,)).results(_ROWS)[-1]
    mode = _mode(sizes)
    _run(mode, x, w, target)
    assert not list(mode._recipes)


def test_the_peak_of_a_step_is_predicted_and_measured_without_logits():
    ran = compare(test_loops.inside)
    (head,) = ran.status.plan.tiles
    assert head.module == "head"
    assert head.classes == CLASSES
    assert head.unmade_nbytes == 256 * CLASSES * 4
    whole = compare(test_loops.inside, tile="off").status
    assert ran.status.measured_peak_nbytes < whole.measured_peak_nbytes - 2 * head.unmade_nbytes
    assert abs(ran.status.measured_peak_nbytes - ran.status.plan.predicted.needed_nbytes) <= 4096
    assert ran.status.plan.unmodified_peak_nbytes > ran.status.measured_peak_nbytes + 2 * head.unmade_nbytes


def test_a_budget_that_no_plan_keeps_without_tiles():
    whole = compare(test_loops.inside, tile="off").status.plan.predicted.needed_nbytes
    ran = compare(test_loops.inside, budget=whole - 3 * (1 << 20))
    assert ran.tiled
    assert ran.status.measured_peak_nbytes <= whole - 3 * (1 << 20)


def _refusal(budget):
    """What is said of the budget, and the one that is named. The exception, whose frames hold tensors, is gone."""
    with pytest.raises(InfeasibleError) as refused:
        compare(test_loops.inside, budget=budget)
    return str(refused.value), refused.value.smallest_nbytes


def test_a_refusal_says_from_which_budget_on_tiles_are_tried():
    gc.collect()
    at_once, without_tiles = _refusal(600_000)
    assert "Nothing was updated" in at_once
    (least,) = re.findall(r"From (\d+) on .* a few steps find out whether less is enough", at_once)
    gc.collect()
    later, with_tiles = _refusal(int(least))
    assert "none fits with its loss head in tiles" in later
    gc.collect()
    ran = compare(test_loops.inside, budget=with_tiles)
    assert ran.tiled
    assert ran.status.measured_peak_nbytes <= with_tiles < without_tiles


def test_a_budget_chooses_between_a_whole_gradient_and_none(monkeypatch):
    chosen = {}

    def timed(self, graph, limit_nbytes, machine):
        return cost(self, dataclasses.replace(graph, step_seconds=next(seconds)), limit_nbytes, machine)

    seconds = itertools.cycle((1.0, 1.1, 1.5))  # of the step as it is, with a whole gradient, and with none
    cost = Tiling._cost
    monkeypatch.setattr(Tiling, "_cost", timed)
    least = compare(test_loops.inside).status.plan.predicted.needed_nbytes
    gradient = 256 * CLASSES * 4
    for budget in (least + gradient // 2, least + gradient + (1 << 18)):
        ran = compare(test_loops.inside, budget=budget)
        assert ran.status.measured_peak_nbytes <= budget
        chosen[budget] = ran.status.plan.tiles[0].assembled
    assert list(chosen.values()) == [(), ("aten::mm by columns", "aten::mm by rows")]


def test_a_budget_that_the_step_keeps_as_it_is_needs_no_tiles():
    ran = compare(test_loops.inside, budget=1 << 30)
    assert not ran.tiled
    assert not ran.why_whole


def test_another_number_of_threads_leaves_the_head_whole():
    threads = torch.get_num_threads()

    def changing(model, optimizer, log, run):
        try:
            for step, (ids, labels) in enumerate(batches(9)):
                torch.set_num_threads(threads + (step > 6))
                loss = model(ids, labels)[1]
                loss.backward()
                log.note(loss)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_num_threads(threads)

    ran = compare(changing)
    assert [line for line in ran.why_whole if "threads" in line]


@pytest.mark.parametrize(("classes", "tokens"), [(4096, 256), (16, 8)])
def test_large_scores_that_are_no_loss_head_are_told(classes: int, tokens: int) -> None:
    from torch import nn

    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines: list[str] = []
    with optimize(model, optimizer, budget="min", verbose=False) as run:
        run.session._tiling._say = lines.append
        for _ in range(4):
            torch.nn.functional.binary_cross_entropy_with_logits(
                model(torch.randn(tokens, 16)), torch.ones(tokens, classes)
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [line for line in lines if "no product of matrices was found" in line]
    assert len(told) == (classes == 4096)  # few scores are not worth a line


def test_steps_that_do_not_come_to_the_head_are_not_observed_for_ever(monkeypatch):
    monkeypatch.setattr(Tiling, "_enter", lambda self, mode: None)
    ran = compare(test_loops.now_and_then)
    assert ran.status.plan is not None
    assert [line for line in ran.why_whole if "does not run where it was seen" in line]


def test_the_head_of_a_step_is_found_wherever_the_loss_is():
    graphs = []

    def looking(loop):
        def looked(model, optimizer, log, run):
            loop(model, optimizer, log, run)
            if run() is not None:
                graphs.append(run().status().graph)

        return looked

    for loop in (test_loops.inside, test_loops.outside):
        compare(looking(loop), tile="off")
    for graph in graphs:
        op = head_of(graph)
        assert op is not None
        assert op.scope.partition("#")[0] == "head"
        assert graph.tensors[op.outputs[0]].size == (256, CLASSES)


def test_options():
    with pytest.raises(ConfigError, match="tile is 'all'"):
        MemOptConfig(tile="all")
    head = TiledHead(module="head", classes=2048, tokens=256, rows=64, columns=512, unmade_nbytes=1 << 20)
    assert tiles_text([head]) == (
        "the loss head of head runs in tiles of 64 rows and 512 columns; 1.00 MiB of logits are never whole"
    )
    assert "columns" not in tiles_text([dataclasses.replace(head, columns=0)])


def test_a_run_without_a_native_engine_is_told_so(monkeypatch):
    monkeypatch.setattr("lightning_memopt.session.tiling.loaded", lambda: None)
    ran = compare(test_loops.inside)
    assert [line for line in ran.why_whole if "the native engine is not there" in line]
    assert loaded() is not None


def test_a_proof_takes_fewer_rows_where_memory_is_in_pieces(monkeypatch):
    """The allocator refuses what should fit."""
    x, w, target = _head()
    whole = _run(None, x, w, target)
    proof = Proof((16, 48), (512,), room=lambda: 1 << 40)
    computed = LogSoftmax.computed

    def refused(self, made):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(LogSoftmax, "computed", refused, raising=False)
    assert all(map(torch.equal, whole, _run(_mode(proof), x, w, target)))
    assert proof.compared == 48
    monkeypatch.setattr(LogSoftmax, "computed", computed)
    (least,) = proof.results(_ROWS)[-1:]
    assert all(map(torch.equal, whole, _run(_mode(least), x, w, target)))


def test_a_model_is_left_as_it_was():
    model = LanguageModel()
    compare(test_loops.inside, model)
    assert not model.head._forward_pre_hooks
    assert "_compiled_call_impl" not in vars(model.head)


def test_another_number_of_tokens_leaves_the_head_whole():
    torch.manual_seed(1)
    ran = compare(picking(lambda step: 256 if step < 6 else 33), Picking())  # not a part of the batch's shape
    assert ran.tiled
    assert [line for line in ran.why_whole if "256 tokens" in line]


def test_a_head_that_owns_no_weight():
    class Tied(LanguageModel):
        def forward(self, ids, labels=None):
            logits = F.linear(self.hidden(ids), self.embedding.weight)
            return logits, F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))

    torch.manual_seed(1)
    model = Tied()
    del model.head
    assert compare(test_loops.inside, model).tiled


def test_settings_that_change_after_the_proof_leave_the_head_whole():
    def setting(model, optimizer, log, run):
        try:
            for step, (ids, labels) in enumerate(batches(9)):
                torch.use_deterministic_algorithms(step > 6, warn_only=True)
                loss = model(ids, labels)[1]
                loss.backward()
                log.note(loss)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.use_deterministic_algorithms(False)

    ran = compare(setting)
    assert ran.tiled
    assert [line for line in ran.why_whole if "numeric settings" in line]


def test_methods_of_tensors_are_wrapped_once():
    def depth():
        method, wrappers = torch.Tensor.numpy, 0
        while hasattr(method, "__wrapped__"):
            method, wrappers = method.__wrapped__, wrappers + 1
        return wrappers

    most = []

    def counting(model, optimizer, log, run):
        test_loops.inside(model, optimizer, log, run)
        most.append(depth())

    compare(counting)
    assert max(most) <= 1
    assert depth() == 0
