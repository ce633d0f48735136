"""The user's gradient checkpointing is replaced by the plan (integrations/checkpointing.py), with the bits of the plain run."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from functorch.compile import default_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from benchmarks.robustness.front_models import Samples, built, collated
from lightning_memopt.integrations import transformers_private
from lightning_memopt.integrations.checkpointing import LayerCheckpointing
from lightning_memopt.native import counter
from lightning_memopt.plan import simulate
from lightning_memopt.session import RunStatus
from lightning_memopt.solvers.recompute.baselines import per_layer
from tests.cpu.lib.loops import counted_nbytes
from tests.cpu.lib.said import Said
from tests.cpu.lib.trainers import agrees, assert_same, callback, train

SAFE = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def functions(model: nn.Module) -> list[Any]:
    return [transformers_private.checkpointing_function(module) for module in model.modules()]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("model", ["gpt2", "t5", "lora_llama"])
def test_replaced(model: str, said: Said) -> None:
    """The bits of the checkpointed Trainer, dropout included; one line says what is replaced, the table what it cost."""
    if model == "lora_llama":
        pytest.importorskip("peft")
    mine = agrees(model, {"verbose": True}, bf16=model == "gpt2", **SAFE)
    printed = said.taken()
    assert printed.count("gradient checkpointing is replaced by the plan") == 1
    assert "It would take (predicted)" in printed
    assert len(mine.status().checkpointed) == {"gpt2": 3, "t5": 4, "lora_llama": 3}[model]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_the_model_is_as_it_was() -> None:
    """Afterwards the same functions checkpoint the same layers; a copy made in between has them, too."""
    model = built("gpt2")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before, said = functions(model), list[str]()
    replaced = LayerCheckpointing(model, said.append)
    assert len(replaced.layers) == 3 and len(said) == 1
    assert functions(model) != before and model.is_gradient_checkpointing
    assert LayerCheckpointing(model, said.append).layers == () and len(said) == 1, "replaced once"
    assert [repr(f) for f in functions(copy.deepcopy(model))] == [repr(f) for f in before]
    pickled = pickle.dumps(functions(model.transformer.h[0])[0])
    assert repr(pickle.loads(pickled)) in map(repr, before)
    replaced.look(lambda: RunStatus(phase="planned"))
    assert functions(model) != before
    replaced.look(lambda: RunStatus(phase="unplanned", reason="nothing is saved"))
    assert functions(model) == before and "is back" in said[-1]
    replaced.restore()
    assert functions(model) == before


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_reentrant_stays(said: Said) -> None:
    """The reentrant kind may add gradients up in another order: it stays, one line says why, and the bits are the same."""
    options: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    mine = callback(verbose=True)
    assert_same(train(**options), train([mine], **options))
    assert said.taken().count("gradient checkpointing stays as it is") == 1
    assert mine.status().checkpointed == () and mine.status().phase == "planned"


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_compiled_layers_stay() -> None:
    model = built("gpt2")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before, said = functions(model), list[str]()
    model.transformer.h[1].compile(backend="eager")
    LayerCheckpointing(model, said.append)
    assert functions(model) == before and "compiled one by one" in said[0]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("way", ["wrapper", "method"])
def test_in_compiled_code_it_stays_until_a_region_has_a_plan(way: str) -> None:
    """Traced code has the user's checkpointing, as marks on ops: without a plan its regions are split as without us."""
    model = built("gpt2")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    marks: list[bool] = []

    def split(module: Any, inputs: Any, **options: Any) -> Any:
        marks.append(any("recompute" in node.meta for node in module.graph.nodes))
        options.pop("compiler", None)
        return default_partition(module, inputs, **options)

    backend: Any = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=split)
    if way == "method":
        model.compile(backend=backend)
    call: Any = model if way == "method" else torch.compile(model, backend=backend)
    said: list[str] = []
    replaced = LayerCheckpointing(model.train(), said.append)
    batch = collated([Samples("gpt2", 2)[i] for i in range(2)])
    call(**batch).loss.backward()
    replaced.look(lambda: RunStatus(phase="observing"))
    replaced.restore()
    torch._dynamo.reset()
    assert any(marks)
    assert replaced.layers == ()
    assert "stays until" in said[-1]


def test_nothing_to_replace() -> None:
    said: list[str] = []
    assert LayerCheckpointing(nn.Linear(2, 2), said.append).layers == () and not said
    assert LayerCheckpointing(built("gpt2"), said.append).layers == () and not said


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_what_it_cost() -> None:
    """The peak that the table predicts for the user's checkpointing is the one that the plain, checkpointed run has."""
    before = counted_nbytes()
    mine = callback()
    train([mine], **SAFE)
    status = mine.status()
    graph = status.graph
    cost = simulate(graph, per_layer(graph, status.checkpointed)).predicted
    assert status.plan.predicted.peak_nbytes < cost.peak_nbytes < status.plan.unmodified_peak_nbytes
    assert 0 < cost.extra_flops < sum(op.flops for op in graph.forward)
    predicted = cost.peak_nbytes - before
    del mine, status, graph
    count = counter()
    if count is None:
        pytest.skip("no compiler: nothing counts the allocator's bytes")
    before = counted_nbytes()
    window = count.window()
    assert window is not None
    train(**SAFE)
    measured = window.peak_nbytes - before
    window.close()
    assert abs(measured / predicted - 1) < 0.05, (measured, predicted)
