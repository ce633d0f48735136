"""Who may borrow whose plan, and how many states and plans there may be: by shapes alone, nothing is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt.config import MemOptConfig
from lightning_memopt.session.budget import device_of
from lightning_memopt.session.cache.plan_cache import PLANS, PlanCache
from lightning_memopt.session.cache.solves import Solves
from lightning_memopt.session.forward.shapes import alike, serves, signature_of
from lightning_memopt.session.observe.observing import Observing, Waiting
from lightning_memopt.session.parameters import Parameters


def signature(*shape: int) -> Any:
    return signature_of(0, (True,), (torch.empty(shape, device="meta"), torch.empty(shape[:1], dtype=torch.long)))


def test_which_parameters_are_trained() -> None:
    """The parameters are those of torch's own walk through them, except that a shared one is listed for each module."""
    inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.PReLU())
    model = nn.ModuleDict({"first": inner, "again": inner, "last": nn.Linear(3, 1, bias=False)})
    parameters = Parameters(model)
    assert parameters.trained() == tuple(p.requires_grad for p in model.parameters()) == (True,) * 6
    inner[1].requires_grad_(False)
    assert parameters.trained() == (True, True, False, False, True, True)
    model["tied"] = nn.Linear(3, 1, bias=False)
    model["tied"].weight = model["last"].weight
    assert len(parameters.trained()) == 7 and len(list(model.parameters())) == 6
    assert Parameters(torch.jit.script(nn.Linear(2, 2))).trained() == (True, True)


@pytest.mark.parametrize("change", ["replaced", "taken out", "one more deep within", "registered", "none"])
def test_a_changed_model_has_other_parameters(change: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)), nn.Linear(3, 1))
    parameters = Parameters(model)
    assert parameters.trained() == (True,) * 6
    if change == "replaced":
        model[0] = nn.Linear(2, 3, bias=False).requires_grad_(False)
        assert parameters.trained() == (False, *(True,) * 4)
    elif change == "taken out":
        del model[2]
        assert parameters.trained() == (True,) * 4
    elif change == "one more deep within":
        model[1].append(nn.PReLU())
        model[1][2].requires_grad_(False)
        assert parameters.trained() == (*(True,) * 4, False, True, True)
    elif change == "registered":  # by a module that had no parameter
        model[1][0].register_parameter("slope", nn.Parameter(torch.ones(1)))
        assert parameters.trained() == (True,) * 7
    else:
        model[0].bias = None
        assert parameters.trained() == (True,) * 5


def test_a_table_that_is_replaced_as_a_whole_is_seen_in_the_end() -> None:
    """The table that was replaced does not show the change."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    parameters = Parameters(model)
    assert parameters.trained() == (True,) * 4
    model._modules = {"0": nn.Linear(2, 3, bias=False), "1": model[1]}
    assert any(len(parameters.trained()) == 3 for _ in range(64))


def test_to_ask_for_the_device_walks_no_further_than_the_first_tensor() -> None:
    """Each step asks for it: to walk through all modules took 0.7 ms for a ResNet-50."""
    asked = []

    class Counted(nn.Sequential):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            for name, module in super().named_modules(*args, **kwargs):
                asked.append(name)
                yield name, module

    model = Counted(*(nn.Linear(1, 1) for _ in range(10)))
    assert device_of(model) == torch.device("cpu") and len(asked) == 2
    assert device_of(nn.Sequential(nn.ReLU())) == torch.device("cpu")
    assert device_of(nn.BatchNorm1d(1, affine=False).to("meta")) == torch.device("meta")


def test_serves() -> None:
    """Who may borrow from whom."""
    assert serves(signature(8, 64), signature(8, 64)) and serves(signature(8, 64), signature(8, 63))
    assert serves(signature(8, 64), signature(7, 64)) and serves(signature(8, 64), signature(15, 32))
    assert not serves(signature(8, 64), signature(8, 65)) and not serves(signature(8, 64), signature(7, 65))
    assert not serves(signature(8, 64), signature(17, 32)) and not serves(signature(8, 64), signature(8, 64, 1))
    other = signature_of(1, (True,), (torch.empty(8, 64), torch.empty(8, dtype=torch.long)))
    assert not serves(signature(8, 64), other)


def pictures(*sizes: tuple[int, int]) -> Any:
    return signature_of(0, (True,), ([torch.empty(3, h, w, device="meta") for h, w in sizes],))


def test_serves_lists_of_samples() -> None:
    """Of a list of samples the order does not matter, and one may be larger where another is smaller: not the largest, not all
    of them, not the two largest. A pair (inputs, targets) is not such a list.
    """
    lender = pictures((6, 6), (4, 4), (2, 2), (2, 2))
    assert serves(lender, pictures((2, 2), (3, 3), (6, 6), (2, 3)))
    assert not serves(lender, pictures((6, 6), (6, 4), (1, 1), (1, 1)))  # the two largest
    assert not serves(lender, pictures((7, 5), (4, 4), (2, 2), (2, 2)))  # padded in height
    assert not serves(lender, pictures((4, 4), (4, 4), (4, 4), (4, 4)))  # all of them
    assert not serves(lender, pictures((6, 6), (4, 4), (2, 2)))  # other ops
    pair = [signature_of(0, (True,), [torch.empty(4, n), torch.empty(4, m)]) for n, m in ((9, 5), (5, 9))]
    assert not serves(*pair)


def test_states_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever longer batches, of which all may be planned for: no more states than `PLANS`, and as many that wait; the oldest make
    room, and planning becomes rare.
    """
    found = PlanCache(MemOptConfig())
    monkeypatch.setattr(Solves, "allows", lambda *_: True)
    waiting = 0
    for n in range(1, 501):
        state = found.enter(signature(4, n), 1)
        assert isinstance(state, Observing | Waiting)
        waiting += isinstance(state, Waiting)
        assert len(found) <= 2 * PLANS and found.solves.count <= PLANS + n // 50
    assert waiting == 500 - found.solves.count and found.solves.count == PLANS + 500 // 50
    assert not {s for s, state in found.items() if isinstance(state, Waiting)} & {signature(4, n) for n in range(1, 400)}  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_serves_nested_tensors(layout: torch.layout) -> None:
    """Their lengths are not part of their shape: elements count."""

    def nested(*lengths: int) -> Any:
        samples = [torch.zeros(length, 4) for length in lengths]
        return signature_of(0, (True,), (torch.nested.nested_tensor(samples, layout=layout),))

    assert serves(nested(3, 5), nested(4, 4)) and serves(nested(3, 5), nested(2, 5))
    assert not serves(nested(3, 5), nested(4, 5))


def test_a_batch_that_requires_a_gradient_is_another_one() -> None:
    """If the batch needs a gradient, the forward saves other tensors and backward takes another path."""
    x = torch.randn(4, 8)
    plain, slopes = (signature_of(0, (True,), t) for t in (x, x.detach().requires_grad_()))
    assert plain != slopes and not alike(plain, slopes) and not serves(plain, slopes)
