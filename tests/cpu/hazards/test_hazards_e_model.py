"""Hazards of what users give to a model and do with it: structures, branches, sizes, evaluation, copies, names, hooks."""

import contextlib
import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from lightning_memopt.session.forward import recording
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.inside import states_of
from tests.cpu.lib.models import (
    BATCHES,
    Body,
    X,
    attached,
    data,
    exact,
    in_plan,
    made,
    same,
    sgd,
    squares,
    train,
    trains,
)


class Structured(Body):
    def forward(self, x, *, scale, table=None, nothing=None):
        y = super().forward(x)
        table["calls"] = table.get("calls", 0) + 1
        return {"out": [y * scale, None, (y.exp(), "text")], "scale": scale}


def test_e1_e2_structures_and_keyword_arguments():
    """EXACT: nested outputs with None and text, keyword arguments, mutable arguments: user code ran once."""
    tables = []

    def step(model, x=X):
        tables.append({})
        out = model(x, scale=torch.tensor(2.0), table=tables[-1])
        assert out["out"][1] is None and out["out"][2][1] == "text"
        return (out["out"][0] * out["out"][2][0]).sum()

    exact(Structured, step)
    trains(Structured, loss=step)
    assert all(table == {"calls": 1} for table in tables)


class Branches(Body):
    """Takes another path, with other ops, by the data."""

    def between(self, h, i):
        if float(h.detach().sum()) > 16 * len(h) * (1.0 + 0.1 * i):
            return h.exp().sin()
        return h.cos() if i else h.sigmoid().exp().tanh()


def test_e3_data_dependent_branches():
    """EXACT: a planned step that takes another branch keeps what the plan does not know, and says so once."""
    exact(Branches, lambda m: squares(m, X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "the forward left the plan"
        trains(Branches, [data(32, 16, seed=s) * (s % 3) for s in range(8)], drops=False)


def test_e4_smaller_last_batch_and_variable_length():
    """EXACT: every size has its plan; sizes come and go."""
    sizes = [32, 32, 32, 7, 32, 1, 64, 7]
    trains(Body, [data(n, 16, seed=s) for s, n in enumerate(sizes)])


def test_e5_same_module_twice_and_recursion():
    """EXACT: each call is its own."""

    class Shared(Body):
        def forward(self, x, depth=2):
            for layer in (*self.layers, *self.layers):
                x = torch.tanh(layer(x)).exp().sin()
            return self(x, depth - 1) if depth else x

    exact(Shared, lambda m: squares(m, X))
    trains(Shared)


def test_e17_p24_evaluation_packs_nothing(monkeypatch):
    """Zero packs and no state in eval, no_grad and inference_mode, in the middle of training."""
    packs, original = [], recording.hooks_of

    def hooks_of(engine):
        pack, unpack = original(engine)

        def counted(t):
            packs.append(1)
            return pack(t)

        counted.free = pack.free
        return counted, unpack

    monkeypatch.setattr(recording, "hooks_of", hooks_of)
    model = made(Body)
    optimizer = sgd(model)
    with attached(model, optimizer) as run:
        for _ in range(2):
            train(model, BATCHES[:2], optimizer=optimizer)
            assert packs
            packs.clear()
            buckets = len(states_of(run))
            with torch.no_grad():
                model(data(5, 16))
            with torch.inference_mode():
                model(data(6, 16))
            model.eval()
            model(data(7, 16)).sum().backward()
            model.train()
            assert not packs and len(states_of(run)) == buckets


def test_e17_p24_evaluation_in_the_middle_changes_nothing():
    """EXACT: validation between steps, also between observed ones."""

    def loss(model, x):
        model.eval()
        with torch.no_grad():
            model(data(3, 16))
        model.train()
        return squares(model, x)

    trains(Body, loss=loss)


def test_e18_p22_copies_and_pickles_of_an_attached_model():
    """A copy made while attached computes with its own weights, and there is nothing of ours in it."""
    with in_plan() as (model, optimizer):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert b"lightning_memopt" not in pickle.dumps(model)
        for other in copies:
            with torch.no_grad():
                for p in other.parameters():
                    p.zero_()
            assert same_bits(other(X), torch.zeros_like(X) + torch.ones(()).sin()) and not same_bits(model(X), other(X))
            assert type(other) is Body and vars(other).keys() <= vars(made(Body)).keys()
        train(model, BATCHES[2:], optimizer=optimizer)


def test_e18_p22_averaged_model():
    """EXACT average of weights (EMA) kept with deepcopy while attached."""

    def run(attach):
        model = made(Body)
        optimizer = sgd(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        with attached(model, optimizer) if attach else contextlib.nullcontext():
            for batch in BATCHES:
                train(model, [batch], optimizer=optimizer)
                average.update_parameters(model)
        return [p.detach() for p in average.parameters()]

    assert same(run(False), run(True))


def test_e19_p20_names_and_state_unchanged_while_attached():
    """Names, module tree, state_dict keys, types and optimizer state are those of the plain model."""

    def names(model):
        return (
            [n for n, _ in model.named_parameters()],
            [(n, type(m)) for n, m in model.named_modules()],
            list(model.state_dict()),
            repr(model),
            {n: [len(getattr(m, a)) for a in vars(m) if a.endswith("_hooks")] for n, m in model.named_modules()},
        )

    model = made(Body)
    optimizer = torch.optim.AdamW(model.parameters())
    before = names(model)
    with attached(model, optimizer):
        assert names(model) == before
        train(model, BATCHES, optimizer=optimizer)
        assert names(model) == before
        keys = optimizer.state_dict()["state"][0].keys()
    assert names(model) == before
    other = torch.optim.AdamW(made(Body).parameters())
    train(made(Body), BATCHES[:1], optimizer=other)
    plain = made(Body)
    fresh = torch.optim.AdamW(plain.parameters())
    train(plain, BATCHES[:1], optimizer=fresh)
    assert fresh.state_dict()["state"][0].keys() == keys


def test_e20_p23_hooks_in_order_and_once():
    """Forward, pre-forward, always_call, full backward and tensor hooks: same order, same count."""

    def run(attach):
        model, seen = made(Body), []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, a, n=name: seen.append(("pre", n)))
            module.register_forward_hook(lambda m, a, o, n=name: seen.append(("post", n)))
            module.register_forward_hook(lambda m, a, o, n=name: seen.append(("always", n)), always_call=True)
            module.register_full_backward_pre_hook(lambda m, g, n=name: seen.append(("backward pre", n)))
            module.register_full_backward_hook(lambda m, gi, go, n=name: seen.append(("backward", n)))
        for i, p in enumerate(model.parameters()):
            p.register_hook(lambda g, i=i: seen.append(("grad", i)))
            p.register_post_accumulate_grad_hook(lambda p, i=i: seen.append(("accumulated", i)))
        optimizer = sgd(model)
        with attached(model, optimizer) if attach else contextlib.nullcontext():
            train(model, [b.clone().requires_grad_() for b in BATCHES], optimizer=optimizer)
        return seen

    plain = run(False)
    assert plain and plain == run(True)


def test_e20_exception_in_forward_with_always_call():
    """An exception in the forward: hooks with always_call run, nothing of ours stays entered, the retry is EXACT."""

    class Fails(Body):
        fails = False

        def between(self, h, i):
            if self.fails and i == 1:
                raise KeyError("of the user")
            return h

    model, plain = made(Fails), made(Fails)
    optimizer = sgd(model)
    called = []
    model.register_forward_hook(lambda *_: called.append(1), always_call=True)
    with attached(model, optimizer):
        for attempt in range(2):  # while observing, then while a plan is in force
            model.fails = True
            with pytest.raises(KeyError, match="of the user"):
                model(data(128, 16))
            assert len(called) == 1 + 3 * attempt
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
            model.fails = False
            train(model, BATCHES[:2], optimizer=optimizer)
    for _ in range(2):
        train(plain, BATCHES[:2])
    assert same(list(model.parameters()), list(plain.parameters()))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(16, 16, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(
            x.view(-1, 5, 16), [5, 4, 3, 1] if len(x) == 20 else [5] * 13 + [4, 3, 1], batch_first=True
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(out.tanh().exp()).sin()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_e21_recurrent_networks_and_packed_sequences(kind):
    """EXACT: LSTM, GRU and RNN with dropout between layers, packed sequences."""
    x = data(20, 16)
    exact(lambda: Recurrent(kind), lambda m: squares(m, x))
    trains(lambda: Recurrent(kind), [data(80, 16, seed=s) for s in range(3)])
