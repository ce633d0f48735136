"""Hazards of what users do around autograd: several forwards, several backwards, hooks, copies, threads, checkpoints."""

import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.record import Recorder
from lightning_memopt.runtime import ObservingEngine, PlannedEngine
from lightning_memopt.session.round import Recording
from tests.cpu.harness import dropping, outcome, same_bits
from tests.cpu.models import Body, data, exact, made, squares, train, trains

torch.set_num_threads(1)
X = data(8, 16)
BATCHES = [data(128, 16, seed=s) for s in range(4)]


def attached(model, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    return optimize(model, optimizer, **{"budget": "min", "profile_steps": 1, "verbose": False} | options)


def grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(a, b):
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def both(use, factory=Body):
    """`use(model, recording)` plainly and with everything dropped gives the same tensors."""
    results = [list(use(made(factory), recording)) for recording in (warnings.catch_warnings, dropping)]
    assert same(*results)


def planned(use, factory=Body):
    """`use(model)` plainly and in a planned step (after one observed step) gives the same tensors."""
    results = []
    for attach in (False, True):
        model = made(factory)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if attach:
            with attached(model, optimizer) as run:
                train(model, BATCHES[:2], optimizer=optimizer)
                assert run.plan is not None and any(life.how == "replay" for life in run.plan.lives)
                model.zero_grad()
                results.append(list(use(model)))
        else:
            train(model, BATCHES[:2], optimizer=optimizer)
            model.zero_grad()
            results.append(list(use(model)))
    assert same(*results)


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


def test_e6_several_forwards_then_one_backward():
    """EXACT, dropped and in planned steps, backwards in any order."""

    def together(model):
        losses = [squares(model, b) for b in BATCHES]
        torch.stack(losses).sum().backward()
        return grads(model)

    def reversed_(model):
        losses = [squares(model, b) for b in BATCHES]
        for loss in losses[::-1]:
            loss.backward()
        return grads(model)

    for use in (together, reversed_):
        planned(use)

    def engines(model, recording):
        losses = []
        for b in BATCHES:
            with recording():
                losses.append(squares(model, b))
        losses[2].backward()
        losses[0].backward()
        (losses[1] * losses[3]).backward()
        return grads(model)

    both(engines)
    trains(Body, loss=lambda m, x: squares(m, x) + squares(m, x + 1))  # contrastive, also while observing


class Noisy(Body):
    """Saves results of random ops, and results that are made from them."""

    def between(self, h, i):
        return (F.dropout(h, 0.3) + torch.randn_like(h)).exp()


@pytest.mark.parametrize("factory", [Body, Noisy])
def test_e7_two_backwards_with_retain_graph(factory):
    """EXACT: the second backward gives what the first gave, also where the plan has let everything go."""

    def twice(model, recording=None):
        torch.manual_seed(0)
        with recording() if recording else warnings.catch_warnings():
            loss = squares(model, data(128, 16))
        loss.backward(retain_graph=True)
        first = grads(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return first + grads(model) + [torch.rand(3)]

    both(twice, factory)
    planned(twice, factory)
    trains(factory, backward=lambda loss: (loss.backward(retain_graph=True), loss.backward()), drops=False)


def test_e7_random_results_whose_state_was_not_noted():
    """EXACT: without the generator's state a random op is never run again; what is made from it is kept."""

    class Stateless(ObservingEngine):
        def wants_state(self):
            return False

    plain = made(Noisy)
    torch.manual_seed(0)
    squares(plain, X).backward()
    model = made(Noisy)
    torch.manual_seed(0)
    engine = Stateless(pressure=lambda: 1 << 62)
    with Recording(engine, engine.make_recorder(), own_mode=True):
        loss = squares(model, X)
    loss.backward()
    assert same(grads(model), grads(plain)) and engine.evictions > 0


def test_e7_third_access_after_the_graph_was_freed():
    """The error of plain autograd."""
    with dropping():
        loss = squares(made(Body), X)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def second_order(model, recording=warnings.catch_warnings):
    """A gradient penalty: double backward through `create_graph`."""
    x = data(128, 16).requires_grad_()
    with recording():
        loss = squares(model, x)
    (gx,) = torch.autograd.grad(loss, x, create_graph=True)
    gx.square().sum().backward()
    return [*grads(model), x.grad]


def test_e8_double_backward():
    """EXACT: create_graph, a gradient penalty, third order."""
    both(second_order)
    planned(second_order)

    def third(model, recording=warnings.catch_warnings):
        x = data(128, 16).requires_grad_()
        with recording():
            y = model(x).exp().sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = g.sin().sum()
        y.backward()
        return [*grads(model), x.grad]

    both(third)
    planned(third)
    penalty = lambda m, x: second_order_loss(m, x)  # noqa: E731
    trains(Body, loss=penalty, drops=False)


def second_order_loss(model, x):
    x = x.clone().requires_grad_()
    loss = squares(model, x)
    (gx,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gx.square().sum()


def test_e8_autograd_grad_and_jvp():
    """EXACT: autograd.grad of some inputs only, forward-mode differentiation around the model."""

    def some(model, recording=warnings.catch_warnings):
        with recording():
            loss = squares(model, data(128, 16))
        return torch.autograd.grad(loss, [model.layers[1].weight, model.layers[2].bias])

    both(some)
    planned(some)

    def tangents(model):
        forward_ad = torch.autograd.forward_ad
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(X, torch.ones_like(X)))
            primal, tangent = forward_ad.unpack_dual(out)
            return (primal * tangent).sum()

    exact(Body, tangents)


class Physics(Body):
    """Differentiates with respect to its input inside its forward."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).exp().sum(-1)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force.sin().exp() + energy[:, None]


def test_e9_backward_inside_forward():
    """EXACT, once and nested."""
    exact(Physics, lambda m: squares(m, X))
    trains(Physics, drops=False)

    def nested(model):
        x = X.clone().requires_grad_()
        y = model(x).sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = y + g.sin().square().sum()
        return y

    exact(Body, nested)


def test_e10_saved_attributes_are_read_outside_of_backward():
    """EXACT: `grad_fn._saved_*` before and after, any number of times, does not disturb backward."""
    plain = outcome(made(Body), lambda m: squares(m, X), drop=False)
    model = made(Body)
    with dropping():
        y = (model.layers[0](X)).tanh().exp()
        loss = squares(model, X) + y.sum()
    first, second = y.grad_fn._saved_result, y.grad_fn._saved_result
    assert same_bits(first, y) and same_bits(second, y)
    node, seen = loss.grad_fn, 0
    while node is not None:
        seen += sum(1 for n in dir(node) if n.startswith("_saved_") and getattr(node, n) is not None)
        node = node.next_functions[0][0] if node.next_functions else None
    assert seen
    loss.backward()
    assert plain.loss is not None and all(p.grad is not None for p in model.parameters())
    both(lambda m, recording: read_saved(m, recording))


def read_saved(model, recording):
    with recording():
        y = model(X).exp()
    values = [y.grad_fn._saved_result.clone(), y.grad_fn.next_functions[0][0]._saved_self.clone()]
    y.sum().backward()
    return values + grads(model)


class Twice(torch.autograd.Function):
    """Reads its saved tensors twice, saves an input and an output, and stashes one on the context."""

    @staticmethod
    def forward(ctx, x, scale):
        y = x.exp() * scale
        ctx.save_for_backward(x, y)
        ctx.stash = x.sin()
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        return grad * (y + again * 0 + x.cos() * 0) + ctx.stash * 0.1 * grad, None


class Dirty(torch.autograd.Function):
    """Works in place."""

    @staticmethod
    def forward(ctx, x):
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


class Custom(Body):
    def between(self, h, i):
        return Dirty.apply(Twice.apply(h, 0.5).sin() + 1).exp()


def test_e11_e12_custom_functions():
    """EXACT: saved tensors read twice, outputs saved, tensors stashed on the context, in-place with mark_dirty."""
    exact(Custom, lambda m: squares(m, X))
    trains(Custom, drops=False)
    both(lambda m, r: [*read_twice(m, r)], Custom)


def read_twice(model, recording):
    with recording():
        loss = squares(model, X)
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)


class Checkpoints(Body):
    """Checkpoints its own layers."""

    reentrant = False

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = checkpoint(self.block, layer, x, i, use_reentrant=self.reentrant)
        return x.exp()

    def block(self, layer, x, i):
        return F.dropout(torch.tanh(layer(x)).exp().sin().exp(), 0.2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_e13_model_that_checkpoints_itself(reentrant):
    """EXACT: its own checkpointing works as without us."""

    class Model(Checkpoints):
        pass

    Model.reentrant = reentrant
    exact(Model, lambda m: squares(m, X.clone().requires_grad_()))
    trains(Model, loss=lambda m, x: squares(m, x.clone().requires_grad_()), drops=False)


def held_nbytes(model, recording):
    """Bytes of the storages made in forward that are alive after it."""
    storages = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    s = t.untyped_storage()
                    storages.append((weakref.ref(s), s.nbytes()))
            return out

    gc.collect()
    with recording(), Watch():
        loss = squares(model, data(64, 16).requires_grad_())
    found = {id(ref()): nbytes for ref, nbytes in storages if ref() is not None}
    loss.backward()
    return sum(found.values())


def test_e13_checkpointed_memory_does_not_rise():
    """Rule 9: what the model's own checkpoint lets go is not held by us."""
    plain = held_nbytes(made(Checkpoints), warnings.catch_warnings)

    def keeping():
        engine = ObservingEngine()
        return Recording(engine, engine.make_recorder(), own_mode=True)

    assert held_nbytes(made(Body), warnings.catch_warnings) > plain  # the fixture frees something
    assert held_nbytes(made(Checkpoints), keeping) <= plain
    assert held_nbytes(made(Checkpoints), dropping) <= plain


def test_e13_transformers_gradient_checkpointing():
    """EXACT with gradient_checkpointing_enable()."""
    transformers = pytest.importorskip("transformers")

    def factory():
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False)
        model = transformers.GPT2LMHeadModel(config)
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        else:
            model.gradient_checkpointing_enable()
        return model.train()

    ids = torch.arange(16).view(2, 8)
    exact(factory, lambda m: m(ids, labels=ids).loss)


def test_e14_users_own_hooks():
    """EXACT: inside, the user's pair wins and sees what it would see; around the loop, it is there again afterwards."""

    class Hooked(Body):
        def __init__(self):
            super().__init__()
            self.packed = []

        def between(self, h, i):
            def pack(t):
                self.packed.append(tuple(t.shape))
                return t.clone()

            with saved_tensors_hooks(pack, lambda t: t), save_on_cpu() if i == 1 else warnings.catch_warnings():
                return h.exp().sin()

    plain, replayed = made(Hooked), made(Hooked)
    outcome(plain, lambda m: squares(m, X), drop=False)
    outcome(replayed, lambda m: squares(m, X), drop=True)
    assert plain.packed == replayed.packed and plain.packed
    exact(Hooked, lambda m: squares(m, X))
    trains(Hooked)
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        trains(Body)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def test_e15_functional_transforms_inside():
    """EXACT: torch.func.grad, vmap and jvp inside of the forward, which forbid hooks."""

    class Functional(Body):
        def between(self, h, i):
            slope = torch.func.grad(lambda z: (z.sin() * self.layers[0].weight.sum()).sum())(h)
            rows = torch.vmap(lambda r: r.tanh().exp())(h)
            _, tangent = torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))
            return rows + 0.1 * slope + tangent

    exact(Functional, lambda m: squares(m, X))
    trains(Functional)


def test_e15_model_inside_functional_transforms():
    """The region is run unmodified: functional_call under grad and vmap, in an attached run."""

    def use(model):
        weights = dict(model.named_parameters())
        out = torch.func.grad(lambda w: torch.func.functional_call(model, w, (X,)).sum())(weights)
        rows = torch.vmap(lambda x: model(x))(X)
        return [*out.values(), rows.detach()]

    planned(use)


def test_e15_hooks_disabled_around_and_inside():
    """EXACT: a scope that disables saved-tensor hooks works, and the user's own hooks inside of it still raise."""

    class Disables(Body):
        def between(self, h, i):
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                h = h.exp().sin()
                if i == 0:
                    with pytest.raises(RuntimeError, match="not here"), save_on_cpu():
                        pass
            return h.exp()

    exact(Disables, lambda m: squares(m, X))
    trains(Disables)

    def around(model):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            loss = squares(model, data(128, 16))
        loss.backward()
        return grads(model)

    planned(around)

    class Hooked(Body):
        def between(self, h, i):
            with save_on_cpu(), torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                return h

    for recording in (warnings.catch_warnings, dropping):
        with pytest.raises(RuntimeError, match="not here"), recording():
            made(Hooked)(X)


class Threaded(Body):
    """Runs a part of itself in a worker thread."""

    def between(self, h, i):
        out = []
        thread = threading.Thread(target=lambda: out.append(h.exp().sin() * 2))
        thread.start()
        thread.join()
        return h.tanh() + out[0].exp()


def test_e16_forward_in_worker_threads():
    """EXACT: hooks and modes belong to a thread, so what other threads make is opaque; whole forwards there are plain."""
    exact(Threaded, lambda m: squares(m, X))
    trains(Threaded, drops=False)

    def elsewhere(model):
        losses = []
        threads = [threading.Thread(target=lambda b=b: losses.append((b, squares(model, BATCHES[b])))) for b in range(3)]
        for thread in threads:
            thread.start()
            thread.join()
        for _, loss in sorted(losses):
            loss.backward()
        return grads(model)

    planned(elsewhere)


def test_e16_backward_in_another_thread():
    """EXACT: unpacked on a thread that never saw the forward."""

    def use(model, recording=warnings.catch_warnings):
        with recording():
            loss = squares(model, data(128, 16))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return grads(model)

    both(use)
    planned(use)


def test_e17_evaluation_packs_nothing(monkeypatch):
    """Zero packs and no state in eval, no_grad and inference_mode, in the middle of training."""
    packs = []
    for engine in (ObservingEngine, PlannedEngine):
        original = engine.pack
        monkeypatch.setattr(engine, "pack", lambda self, t, original=original: packs.append(1) or original(self, t))
    model = made(Body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as run:
        for _ in range(2):
            train(model, BATCHES[:2], optimizer=optimizer)
            assert packs
            packs.clear()
            buckets = len(run.session.buckets)
            with torch.no_grad():
                model(data(5, 16))
            with torch.inference_mode():
                model(data(6, 16))
            model.eval()
            model(data(7, 16)).sum().backward()
            model.train()
            assert not packs and len(run.session.buckets) == buckets


def test_e17_evaluation_in_the_middle_changes_nothing():
    """EXACT: validation between steps, also between observed ones."""

    def loss(model, x):
        model.eval()
        with torch.no_grad():
            model(data(3, 16))
        model.train()
        return squares(model, x)

    trains(Body, loss=loss)


def test_e18_copies_and_pickles_of_an_attached_model():
    """A copy made while attached computes with its own weights, and there is nothing of ours in it."""
    model = made(Body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as run:
        train(model, BATCHES[:2], optimizer=optimizer)
        assert run.plan is not None
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert b"lightning_memopt" not in pickle.dumps(model)
        for other in copies:
            with torch.no_grad():
                for p in other.parameters():
                    p.zero_()
            assert same_bits(other(X), torch.zeros_like(X) + torch.ones(()).sin()) and not same_bits(model(X), other(X))
            assert type(other) is Body and vars(other).keys() <= vars(made(Body)).keys()
        train(model, BATCHES[2:], optimizer=optimizer)


def test_e18_averaged_model():
    """EXACT average of weights (EMA) kept with deepcopy while attached."""

    def run(attach):
        model = made(Body)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        average = torch.optim.swa_utils.AveragedModel(model)
        with attached(model, optimizer) if attach else warnings.catch_warnings():
            for batch in BATCHES:
                train(model, [batch], optimizer=optimizer)
                average.update_parameters(model)
        return [p.detach() for p in average.parameters()]

    assert same(run(False), run(True))


def test_e19_names_and_state_unchanged_while_attached():
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


def test_e20_hooks_in_order_and_once():
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
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with attached(model, optimizer) if attach else warnings.catch_warnings():
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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


# -- no reference cycles ---------------------------------------------------------------------------


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("recording", ["dropping", "keeping"])
def test_nothing_outlives_a_step(recording, no_collector):
    """Engine, tape, slots and recorder die with the loss, without the garbage collector; backward done or not."""
    for backward in (True, False):
        model = made(Noisy)
        engine = ObservingEngine(pressure=(lambda: 1 << 62) if recording == "dropping" else None)
        recorder = Recorder(engine.tape, engine)
        with Recording(engine, recorder, own_mode=True):
            loss = squares(model, X.clone())
        refs = [weakref.ref(o) for o in (engine, engine.tape, recorder)]
        refs += [weakref.ref(s.alive()) for s in engine.tape.slots.values() if s.alive() is not None and not s.external]
        if backward:
            loss.backward()
        model.zero_grad()
        del engine, recorder, loss
        assert [r() for r in refs if r() is not None] == []


def test_nothing_outlives_a_planned_step(no_collector, monkeypatch):
    """At the front: engines, tapes and slots of observed and planned steps are dead after the step."""
    refs = []
    for kind in (ObservingEngine, PlannedEngine):
        original = kind.__init__

        def init(self, *args, original=original, **kwargs):
            original(self, *args, **kwargs)
            refs.append(weakref.ref(self))
            refs.append(weakref.ref(self.tape))

        monkeypatch.setattr(kind, "__init__", init)
    model = made(Noisy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as run:
        for batch in BATCHES:
            train(model, [batch], optimizer=optimizer)
            alive = [type(r()).__name__ for r in refs if r() is not None]
            assert alive == [], f"alive after a step {'planned' if run.plan else 'observed'}"
    assert len(refs) == 2 * len(BATCHES)
