"""Hazards of what is around a forward (E), and of parameters that hooks see (N2), while tensors are away: EXACT or REFUSE."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.runtime import Program
from tests.cpu.hazards.test_hazards_e_away import Body, Use, exact_while_parked, programs, stepped
from tests.cpu.lib.models import sgd
from tests.cpu.lib.stepped import Stepped, same

# -- what is around it -------------------------------------------------------------------------------------


def anomaly(one: Stepped, program: Program | None) -> list[Tensor]:
    with torch.autograd.detect_anomaly():
        return one.step(program)


def twice(one: Stepped, program: Program | None) -> list[Tensor]:
    """E7."""
    loss = one.forward(program)
    loss.backward(retain_graph=True)
    first = one.outcome(loss)
    loss.backward(retain_graph=True)
    loss.backward()
    return first + one.outcome(loss)


def second_order(one: Stepped, program: Program | None) -> list[Tensor]:
    """E8: a gradient penalty."""
    loss = one.forward(program)
    gradients = torch.autograd.grad(loss, list(one.model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
    return one.outcome(loss)


def some_gradients(one: Stepped, program: Program | None) -> list[Tensor]:
    """E8."""
    loss = one.forward(program)
    some = torch.autograd.grad(loss, [list(one.model.parameters())[2]], retain_graph=True)
    batched = torch.autograd.grad(loss, list(one.model.parameters())[:2], grad_outputs=torch.arange(3.0), is_grads_batched=True)
    return [*some, *batched]


def other_thread(one: Stepped, program: Program | None) -> list[Tensor]:
    """E16."""
    loss = one.forward(program)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return one.outcome(loss)


def several(one: Stepped, program: Program | None) -> list[Tensor]:
    """E6: three forwards, their backwards in another order, two of them as one."""
    losses = [one.forward(program) for _ in range(3)]
    losses[1].backward()
    (losses[2] * losses[0]).backward()
    return one.outcome(losses[0])


def in_the_middle_of_a_backward(one: Stepped, program: Program | None) -> list[Tensor]:
    """E9: another step's backward runs in a hook of this one's."""
    inner = one.forward(program)
    loss = one.forward(program)
    found: list[Tensor] = []
    loss.register_hook(lambda g: found.extend(torch.autograd.grad(inner, list(one.model.parameters()))))
    loss.backward()
    return [*one.outcome(loss), *found]


USES: dict[str, Use] = {
    "E6 several": several,
    "E7 twice": twice,
    "E8 second order": second_order,
    "E8 some gradients": some_gradients,
    "E9 inside of another": in_the_middle_of_a_backward,
    "E16 other thread": other_thread,
    "anomaly": anomaly,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", USES)
def test_what_is_around_a_forward(name: str) -> None:
    """EXACT."""
    exact_while_parked(stepped(Body()), USES[name], times=1)


def test_anomaly_mode_names_the_forward_op_of_a_nan() -> None:
    """The error of plain autograd, with the line of the user's forward."""

    class Model(Body):
        bad = False

        def between(self, h: Tensor, i: int) -> Tensor:
            return (h * 0).sqrt() * 0 + h if self.bad and i == 1 else h.sqrt()

    model = Model()
    one = stepped(model)
    found = list(programs(one))[:2]
    model.bad = True
    for program in (None, *found):
        with torch.autograd.detect_anomaly(check_nan=True), pytest.warns(UserWarning, match="(?s)SqrtBackward0.*self.bad"):
            loss = one.forward(program)
            with pytest.raises(RuntimeError, match="SqrtBackward0.*nan"):
                loss.backward()
        del loss
        gc.collect()
        assert one.used_nbytes() == 0
    one.depot.close()


@pytest.mark.parametrize("form", ["block8", "block8@disk"])
def test_e8_j12_lossy_refuses_what_would_differentiate_its_errors(form: str) -> None:
    """REFUSE with `create_graph`, and outside of backward; an ordinary backward afterwards is what it would have been."""
    model = Body()
    one = stepped(model)
    read = {t for op in one.graph.forward if "addmm" in op.name for t in op.inputs}
    program = one.away(form=form, least=1, only=lambda t: t in read)
    expected = one.step(program)
    loss = one.forward(program)
    with pytest.raises(UnsupportedError, match="create_graph=True would differentiate its errors"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss.backward()
    assert same(one.outcome(loss), expected)
    one.depot.close()


# -- sharded -----------------------------------------------------------------------------------------------


def test_n2_gathered_parameters_never_leave() -> None:
    """Hooks see the whole weight that FSDP gathers. A session REFUSES to park tensors of such models, before anything runs."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or distributed.is_initialized():
        pytest.skip("no process group of one's own")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = Body()
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for attached in (model, nn.Sequential(nn.Tanh(), model)):
            with pytest.raises(UnsupportedError, match="is sharded"), optimize(attached, sgd(model), offload="disk"):
                raise AssertionError("the block was entered")
    finally:
        distributed.destroy_process_group()
