"""Hazards of state that user code changes in forward: it runs once, so it changes once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lightning_memopt import optimize
from lightning_memopt.graph import resident_nbytes
from tests.cpu.lib.harness import dropping, same_bits
from tests.cpu.lib.models import Body, data, exact, made, same_error, squares, stock_is_wrong, train, trains, verified
from tests.cpu.lib.stepped import Stepped

X = data(8, 16)


class Norm(Body):
    """Batch norms that count: running statistics with and without momentum."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(16, momentum=momentum) for _ in range(3))

    def between(self, h, i):
        return self.norms[i](h).exp()


@pytest.mark.parametrize("momentum", [0.1, None], ids=["momentum", "cumulative"])
def test_b1_batch_norm_statistics_are_updated_once(momentum):
    """EXACT running mean, variance and number of batches."""

    def factory():
        return Norm(momentum)

    exact(factory, lambda m: squares(m, X))
    model = made(factory)
    verified(model, lambda m: squares(m, X))
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [1, 1, 1]
    trains(factory)


def test_b1_batch_norm_in_convolutions_in_place():
    """EXACT with the usual block: convolution, batch norm, ReLU in place."""

    def factory():
        blocks = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(6)]
        return nn.Sequential(*(layer for block in blocks for layer in block))

    exact(factory, lambda m: squares(m, data(2, 4, 8, 8)))
    trains(factory, [data(4, 4, 16, 16, seed=s) for s in range(3)])


def test_b1_batch_norm_in_evaluation_reads_its_statistics():
    """EXACT for a frozen norm inside a model in training."""

    class Frozen(Norm):
        def train(self, mode=True):
            super().train(mode)
            self.norms.eval()
            return self

    exact(Frozen, lambda m: squares(m.train(), X))
    trains(Frozen, loss=lambda m, x: squares(m.train(), x))


def test_b1_statistics_count_once():
    """Backward reads what the forward has updated in place: it is the buffer that was there, not bytes beside it."""
    model = Norm()
    model.add_module("again", model.norms[0])  # one norm under two names, and twice in a forward
    graph = Stepped(model, lambda: model.again(squares(model, X) + X).square().sum()).graph
    held = [*model.parameters(), *model.buffers(), X]
    beside = sum(t.nbytes for t in graph.tensors if t.name == "held outside of the step")  # by other tests
    assert resident_nbytes(graph) - beside == sum(t.nbytes for t in held)
    before = {t.name: t.id for t in graph.tensors if t.kind == "buffer"}
    read = {t for op in graph.ops if op.phase == "backward" for t in op.inputs}
    assert all(before[f"norms.{i}.running_mean"] in read for i in range(3))


class Average(Body):
    """Divides by a moving average that every forward moves (as codebooks and observers do)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.ones(16))

    def between(self, h, i):
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h / self.average.clone()  # autograd saves the clone


def test_b3_p3_buffer_moved_in_forward():
    """EXACT gradients and buffer; every use sees the version it saw."""
    stock_is_wrong(Average, lambda m, call: call(m, X).square().sum())
    exact(Average, lambda m: squares(m, X))
    trains(Average)


def test_b3_p3_buffer_replaced_in_forward():
    """EXACT where the buffer is bound anew instead of written to."""

    class Rebound(Average):
        def between(self, h, i):
            self.average = 0.9 * self.average + 0.1 * h.mean(0).detach()
            return h / self.average

    exact(Rebound, lambda m: squares(m, X))
    trains(Rebound)


@pytest.mark.parametrize("parametrization", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_b4_p3_parametrized_modules(parametrization):
    """EXACT: the power iteration of spectral_norm moves its vectors once; weight_norm."""

    def factory():
        model = Body()
        for layer in model.layers:
            parametrization(layer)
        return model

    exact(factory, lambda m: squares(m, X))
    trains(factory)


def test_b4_p3_old_spectral_norm():
    """EXACT for the hook that writes its vectors in place before every forward."""

    def factory():
        model = Body()
        for layer in model.layers:
            nn.utils.spectral_norm(layer)
        return model

    exact(factory, lambda m: squares(m, X))


class Hidden(Body):
    """Keeps its hidden state on itself, as truncated backpropagation through time does."""

    state = None

    def between(self, h, i):
        if self.state is not None:
            h = h * self.state.exp()
        self.state = h.mean(0).detach()
        return h


def test_b5_p3_hidden_state_on_the_module():
    """EXACT gradients, and the state ends where it would."""
    stock_is_wrong(Hidden, lambda m, call: call(m, X).square().sum())
    exact(Hidden, lambda m: squares(m, X))
    trains(Hidden)


class Cache(Body):
    """Appends to a cache that it is given."""

    def forward(self, x, cache):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            cache.append(x)
            x = torch.stack(cache).mean(0).exp().sin()
        return x


def test_b6_p3_cache_argument_grows_once():
    """EXACT, with one entry a layer."""
    stock_is_wrong(Cache, lambda m, call: call(m, X, []).square().sum())
    lengths = []

    def step(model):
        cache = []
        out = model(X, cache).square().sum()
        lengths.append(len(cache))
        return out

    exact(Cache, step)
    assert set(lengths) == {3}
    trains(Cache, loss=lambda m, x: m(x, []).square().sum())


def test_b6_p3_transformers_with_use_cache():
    """EXACT for a decoder that fills its key-value cache in training."""
    transformers = pytest.importorskip("transformers")

    def factory():
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=True)
        return transformers.GPT2LMHeadModel(config)

    ids = torch.arange(16).view(2, 8)
    entries = []

    def step(model):
        out = model(ids, labels=ids, use_cache=True)
        entries.append(out.past_key_values.get_seq_length())
        return out.loss

    exact(factory, step)
    trains(factory, [ids, ids, ids], loss=lambda m, x: step(m))
    assert set(entries) == {8}


class WritesList(Body):
    def forward(self, xs):
        for layer in self.layers:
            xs[0] = torch.tanh(layer(xs[0])).exp().sin()  # as HRNet does
        return xs[0]


def test_b7_p3_list_argument_written_in_forward():
    """EXACT where stock checkpoint silently computes another gradient."""
    stock_is_wrong(WritesList, lambda m, call: call(m, [X]).square().sum())
    exact(WritesList, lambda m: m([X]).square().sum())
    trains(WritesList, loss=lambda m, x: m([x]).square().sum())


class Consumes(Body):
    def forward(self, x, scales):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * next(scales, 7.0)
        return x.exp()


def test_b8_p3_iterator_argument_is_consumed_once():
    """EXACT."""
    stock_is_wrong(Consumes, lambda m, call: call(m, X, iter([1.0, 2.0, 3.0])).square().sum())
    exact(Consumes, lambda m: m(X, iter([1.0, 2.0, 3.0])).square().sum())
    trains(Consumes, loss=lambda m, x: m(x, iter([1.0, 2.0, 3.0])).square().sum())


class Scaled(Body):
    alpha = 1.0

    def between(self, h, i):
        return (h * self.alpha).exp()


def test_b9_p3_attribute_changed_before_backward():
    """EXACT: the attribute was read once."""

    def step(model, call):
        loss = call(model, X).square().sum()
        model.alpha = 2.0
        return loss

    stock_is_wrong(Scaled, step)
    exact(Scaled, lambda m: step(m, lambda model, x: model(x)))


def test_b9_p3_closure_tensor_changed_before_backward():
    """The error of plain autograd where it would raise; where it would not, EXACT or the same class of error."""
    mask = torch.ones(16)
    layer = made(lambda: nn.Linear(16, 16))

    def saved():
        mask.fill_(1.0)
        loss = (torch.tanh(layer(X)) * mask).exp().sum()
        mask.zero_()
        return loss

    same_error(saved, match="modified by an inplace operation")
    unsaved = torch.ones(16)

    class Shifted(Body):
        def between(self, h, i):
            return (h + unsaved).exp()  # autograd saves the result, not what was added

    def step(model, call):
        unsaved.fill_(1.0)
        loss = call(model, X).square().sum()
        unsaved.zero_()
        return loss

    stock_is_wrong(Shifted, step)
    with dropping() as engine:
        loss = squares(made(Shifted), X)
    unsaved.zero_()
    assert engine.evictions > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_b10_mode_changed_before_backward():
    """EXACT: train and eval are read once."""

    class Both(Norm):
        def between(self, h, i):
            return F.dropout(super().between(h, i), 0.3, self.training)

    def step(model):
        loss = squares(model.train(), X)
        model.eval()
        return loss

    exact(Both, step)


def test_b11_p23_hooks_prints_and_counters_run_once(capsys):
    """User code runs exactly once a step: forward hooks, prints, counters, logged values."""

    class Counting(Body):
        calls = 0

        def between(self, h, i):
            self.calls += 1
            print("between")
            return h.exp()

    def run(planned):
        model, seen = made(Counting), []
        for layer in model.layers:
            layer.register_forward_hook(lambda m, a, out: seen.append(float(out.sum())))
            layer.register_full_backward_hook(lambda m, gi, go: seen.append(float(go[0].sum())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = [data(8, 16, seed=s) for s in range(4)]
        if planned:
            with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False) as run:
                train(model, batches, optimizer=optimizer)
            assert run.plan is not None
        else:
            train(model, batches, optimizer=optimizer)
        return model.calls, seen, capsys.readouterr().out

    assert run(False) == run(True)


def test_b12_observers_and_fake_quantization():
    """EXACT ranges of an observer that watches in forward."""
    quantization = pytest.importorskip("torch.ao.quantization")

    class Observed(Body):
        def __init__(self):
            super().__init__()
            self.fakes = nn.ModuleList(
                quantization.FakeQuantize(quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
                for _ in range(3)
            )

        def between(self, h, i):
            return self.fakes[i](h).exp()

    exact(Observed, lambda m: squares(m, X))
    trains(Observed)


def test_b14_observing_leaves_no_trace():
    """A run that stops after the observed steps is the plain run: weights, buffers, optimizer, stream, attributes, hooks."""

    class All(Norm):
        def between(self, h, i):
            return F.dropout(super().between(h, i), 0.2)

    plain, observed = made(All), made(All)
    before = set(vars(observed)), {n: set(vars(m)) for n, m in observed.named_modules()}, type(observed)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (plain, observed)]
    batches = [data(8, 16, seed=s) for s in range(2)]
    draw = train(plain, batches, optimizer=optimizers[0])
    with optimize(observed, optimizers[1], budget="min", profile_steps=3, verbose=False) as run:
        assert same_bits(train(observed, batches, optimizer=optimizers[1]), draw)
        assert run.plan is None
    after = set(vars(observed)), {n: set(vars(m)) for n, m in observed.named_modules()}, type(observed)
    assert before == after
    states = [copy.deepcopy(o.state_dict()) for o in optimizers]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for a, b in zip(states[0]["state"].values(), states[1]["state"].values(), strict=True):
        assert all(same_bits(a[k], b[k]) for k in a)
    for name, value in plain.state_dict().items():
        assert same_bits(observed.state_dict()[name], value), name
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
