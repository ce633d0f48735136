"""What is away and changes: in place, through views and `.data`, unseen, and in forwards that leave the plan (A2, A3, A5)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.runtime import Program
from tests.cpu.lib.stepped import Stepped, held, same

CHANGED = "modified by an inplace operation"
WIDTH = 64


class Branching(nn.Module):
    """Three layers; `f(h, x)`, if a test gives one, is called where the middle one's result has been saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2))
        self.f: Callable[[Tensor], Tensor | None] | None = None
        self.kept: list[Tensor] = []

    def forward(self) -> Tensor:
        h = torch.tanh(self.layers[0](self.x))
        h = torch.sigmoid(self.layers[1](h))
        y = h.sin()
        extra = self.f(h) if self.f is not None else None
        del h
        y = torch.relu(self.layers[2](y)).exp().square()
        return y.mean() if extra is None else y.mean() + extra.sum()


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    model = Branching()
    found = Stepped(model, model)
    yield found
    found.depot.close()


def programs(stepped: Stepped) -> list[Program]:
    return [stepped.away(least=1), stepped.away(held(stepped.graph, 2), least=1)]


def outcome(stepped: Stepped, program: Program | None) -> list[Tensor] | str:
    """What a step left, or the error of its backward."""
    loss = stepped.forward(program)
    stepped.model.kept.clear()  # type: ignore[operator]
    try:
        loss.backward()
    except RuntimeError as error:
        return CHANGED if CHANGED in str(error) else repr(error)
    return stepped.outcome(loss)


def alike(stepped: Stepped) -> list[Tensor] | str:
    """The step under plans is the plain one: same bits, or same error; and leaves nothing in the tier."""
    expected = outcome(stepped, None)
    for program in programs(stepped):
        for _ in range(2):
            found = outcome(stepped, program)
            if isinstance(expected, str) or isinstance(found, str):
                assert found == expected
            else:
                assert same(expected, found)
            assert stepped.used_nbytes() == 0
    return expected


def only(change: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    """The change, whatever it returns."""

    def changed(h: Tensor) -> None:
        change(h)

    return changed


def unseen(h: Tensor) -> None:
    """A change that counts a version and that no mode sees, as of an extension."""
    with _disable_current_modes(), torch.no_grad():
        h.mul_(0.5)


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda h: h.mul_(0.5),
    "view": lambda h: h[0].mul_(0.5),
    "no grad": lambda h: torch.no_grad()(lambda: h.zero_())(),
    "detached": lambda h: h.detach().add_(1),
    "foreach": lambda h: torch._foreach_mul_([h.detach()], 0.5),
    "unseen": unseen,
}


@pytest.mark.parametrize("how", IN_PLACE)
def test_c1_changed_in_place_is_refused_as_by_autograd(stepped: Stepped, how: str) -> None:
    """A3: sin has saved it; the version counter is that of what was saved, wherever its bytes are."""
    stepped.model.f = only(IN_PLACE[how])
    assert alike(stepped) == CHANGED


@pytest.mark.parametrize("how", IN_PLACE)
def test_c1_changed_between_forward_and_backward(stepped: Stepped, how: str) -> None:
    stepped.model.f = only(stepped.model.kept.append)  # type: ignore[union-attr]
    for program in (None, *programs(stepped)):
        loss = stepped.forward(program)
        IN_PLACE[how](stepped.model.kept.pop())  # type: ignore[operator]
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()
        del loss
        gc.collect()
        assert stepped.used_nbytes() == 0


DATA: dict[str, Callable[[Tensor], object]] = {
    "data": lambda h: h.data.mul_(0.5),
    "twice": lambda h: (h.data.mul_(0.5), h.data.add_(1)),
    "foreach": lambda h: torch._foreach_mul_([h.data], 0.5),
    "numpy": lambda h: h.detach().numpy().__imul__(0.5),
}


@pytest.mark.parametrize("how", DATA)
def test_c1_changed_where_no_version_counts(stepped: Stepped, how: str) -> None:
    """EXACT: autograd reads the new bytes without an error."""
    stepped.model.f = only(DATA[how])
    assert isinstance(alike(stepped), list)


def test_c4_a_rebuild_that_starts_from_what_was_changed(stepped: Stepped) -> None:
    """EXACT: what was overwritten after its copy began comes back as it was when the op read it."""

    class Halved(Branching):
        def forward(self) -> Tensor:
            h = torch.tanh(self.layers[0](self.x))
            y = (h * 2).exp()  # rebuilt from h, which autograd does not save for it
            z = h.sin()  # saves h
            if self.f is not None:
                self.f(h.data)
            del h
            return (y.sin() + self.layers[2](z)).mean()

    model = Halved()
    one = Stepped(model, model)
    for change in (None, lambda h: h.mul_(0.5), lambda h: h[0].zero_()):
        model.f = change
        expected = one.step()
        for every in (2, 3, 5):
            assert same(expected, one.step(one.away(held(one.graph, every), least=1)))
    one.depot.close()


# -- forwards that leave the plan ----------------------------------------------------------------------


def noise(h: Tensor) -> Tensor:
    return h * torch.rand_like(h)


OTHER: dict[str, Callable[[Tensor], Tensor | None]] = {
    "another reader": lambda h: h.cos(),
    "two readers": lambda h: h.cos() * h.exp(),
    "a view": lambda h: h.t()[3:].cos(),
    "other op": lambda h: F.gelu(h) * h,
    "random": noise,
    "smaller": lambda h: h[:5].exp(),
    "held": lambda h: h.square(),
}


@pytest.mark.parametrize("how", OTHER)
def test_e3_forwards_that_leave_the_plan(stepped: Stepped, how: str) -> None:
    stepped.model.f = OTHER[how]
    assert isinstance(alike(stepped), list)


def test_e3_a_forward_that_breaks_off(stepped: Stepped) -> None:
    """An exception in the middle: nothing stays in the tier, no recorder, no hook; the next step is exact."""
    expected = stepped.step()

    def fails(h: Tensor) -> Tensor:
        raise KeyError("in the user's code")

    for program in programs(stepped):
        stepped.model.f = fails
        with pytest.raises(KeyError):
            stepped.forward(program)
        gc.collect()
        assert stepped.used_nbytes() == 0
        stepped.model.f = None
        assert same(expected, stepped.step(program))


def test_e4_other_sizes(stepped: Stepped) -> None:
    """A batch of another size under the same plan is kept where it does not match."""
    all_programs = programs(stepped)
    for rows in (1, 7, 48):
        stepped.model.x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        expected = stepped.step()
        for program in all_programs:
            for sized in (True, False):
                assert same(expected, stepped.step(program, sized))
                assert same(expected, stepped.step(program, sized))
    assert stepped.used_nbytes() == 0


# -- forms without the very bits -----------------------------------------------------------------------


def relus(f: Callable[[Tensor], Tensor] | None = None, first: bool = False) -> tuple[nn.Module, Stepped]:
    """A net whose ReLU's result is read by its backward alone; then `f` reads it too, right after it or later."""

    class Net(Branching):
        def forward(self) -> Tensor:
            h = torch.relu(self.layers[0](self.x))
            more = self.f(h) if self.f is not None and first else None
            y = h + 1
            more = self.f(h) if self.f is not None and not first else more
            del h
            y = torch.sigmoid(self.layers[1](y)).sin()
            return y.mean() if more is None else y.mean() + more.mean()

    model = Net()
    return model, Stepped(model, model)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("form", ["positive", "positive@disk", "block8", "int8@disk"])
@pytest.mark.parametrize("how", OTHER)
def test_a5_who_reads_what_the_plan_does_not_know_reads_the_bits(how: str, form: str, first: bool) -> None:
    """A branch that saves the ReLU's result for its values, next to the mask that the plan has of it."""
    model, one = relus(first=first)
    program = one.away(form=form, least=1, only=one.made_by("relu"))
    expected = one.step()
    if form.startswith("positive"):
        assert same(expected, one.step(program)) and same(expected, one.step(program))
    else:
        one.step(program)
    model.f = OTHER[how]
    expected = one.step()
    for _ in range(2):
        found = one.step(program)
        if form.startswith("positive"):
            assert same(expected, found)
        else:  # ReLU's own mask may differ; what else reads it does not
            assert same(expected[3:], found[3:])
    assert one.used_nbytes() == 0
    one.depot.close()


def test_a5_what_is_read_outside_of_backward_has_its_bits() -> None:
    """E10: `grad_fn._saved_result` of what is away comes back, or is refused by name."""
    for form in ("disk", "positive", "block8"):
        _, one = relus()
        program = one.away(form=form, least=1, only=one.made_by("relu"))
        found = []
        for p in (None, program):
            loss = one.forward(p)
            nodes, seen = [loss.grad_fn], []
            while nodes:
                node = nodes.pop()
                if node is not None:
                    seen.append(node)
                    nodes += [n for n, _ in node.next_functions]
            relu = next(n for n in seen if n.name() == "ReluBackward0")
            if p is None or form == "disk":
                found.append(relu._saved_result.clone())
            else:
                with pytest.raises(UnsupportedError, match=form):
                    relu._saved_result  # noqa: B018
        assert len(found) < 2 or torch.equal(*found)
        one.depot.close()
