"""Values that steer a step and that nobody computed, given by the user's function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_memopt
from benchmarks.lib.graphs import computed, different, peak_nbytes
from lightning_memopt.bench.subject import Training
from lightning_memopt.cli import main
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.operators import Reads
from lightning_memopt.fitting.recording import record
from lightning_memopt.fitting.unfilled import Unfilled
from lightning_memopt.fitting.values import Unknown
from tests.cpu.lib.trainings import training_of

TOKENS, WIDTH, EXPERTS = 96, 64, 4


class Experts(nn.Module):
    """A mixture of experts whose router sends every token to the same two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(EXPERTS))
        nn.init.zeros_(self.router.weight)
        self.router.bias.data.copy_(torch.tensor([0.0, 3.0, 1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            if token.numel():
                made.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return made


class Leaves(nn.Module):
    """Six layers, which it leaves as soon as it is sure; it is sure after the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.sure = nn.Parameter(torch.tensor([0.1, 0.9, 0.1, 0.1, 0.1, 0.1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, sure in zip(self.layers, self.sure, strict=True):
            x = layer(x).relu()
            if sure.detach() > 0.5:
                break
        return x * self.sure.sum()


def training(kind: type[nn.Module]) -> Training:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.randn(TOKENS, WIDTH)
    return training_of(model, optimizer, lambda: model(x).square().mean())


def to_two(asked: Unknown) -> Any:
    """The second expert and the last one."""
    return torch.tensor([1, 3]).expand(asked.size) if asked.op == "topk" and asked.choices == EXPERTS else None


class AfterTwo:
    """Is sure in each second layer that asks."""

    def __init__(self) -> None:
        self.asked: list[Unknown] = []

    def __call__(self, asked: Unknown) -> Any:
        self.asked.append(asked)
        return sum(a.op == "gt" for a in self.asked) % 2 == 0 if asked.op == "gt" else None


@pytest.mark.parametrize(("kind", "values"), [(Experts, to_two), (Leaves, AfterTwo())], ids=["experts", "early exit"])
def test_a_step_is_steered_as_by_its_real_values(kind: type[nn.Module], values: Any) -> None:
    def build() -> Training:
        return training(kind)

    given, real = record(build, values=values), computed(build)
    assert not different(given.graph, real) and peak_nbytes(given.graph) == peak_nbytes(real)
    assert different(record(build).graph, real), "what is assumed is another step"
    assert all(name.startswith("given ") for name in given.assumed) and not given.ran


def test_questions_say_what_is_asked_and_where() -> None:
    values = AfterTwo()
    record(lambda: training(Leaves), values=values)
    first = values.asked[0]
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "sure.detach() >" in text)
    assert first == Unknown("gt", torch.Size(), torch.bool, None, f"{__file__}:{line}")


def test_numbers_and_what_is_read_all_at_once() -> None:
    with Unfilled(lambda asked: 7 if asked.op == "item" and asked.dtype == torch.int64 else None) as mode, Reads(mode):
        whole, loss = torch.empty(3, dtype=torch.int64), torch.empty(())
        assert whole[1].item() == 7 and whole.tolist() == [7, 7, 7] and loss.item() == 1.0
    mode.close()
    assert mode.assumed == {"given aten::_local_scalar_dense": 2, "aten::_local_scalar_dense": 1}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            torch.zeros(TOKENS, 3, dtype=torch.int64),
            r"returned a torch.int64 tensor of size \(96, 3\). Make it return a number",
        ),
        (torch.zeros(TOKENS, 2), "returned a torch.float32 tensor"),
        (1.5, "returned 1.5. Make it return a number"),
        ("first", "returned 'first'. Make it return a number"),
        (4, "returned indices 4 to 4. Make it return some of 0 to 3"),
    ],
    ids=["size", "type", "number", "word", "index"],
)
def test_what_cannot_be_the_values_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"values\(Unknown\(op='topk', .*test_values.py:\d+'\)\) {said}"):
        record(lambda: training(Experts), values=lambda asked: given)


def test_an_error_of_the_function_is_told() -> None:
    with pytest.raises(ConfigError, match=r"raised ZeroDivisionError: .*test_values.py, line \d+"):
        record(lambda: training(Experts), values=lambda asked: 1 // 0)


MINE = """
import torch
from torch import nn

def sure(asked):
    return True if asked.op == "gt" else None

if __name__ == "__main__":
    model = nn.ModuleList(nn.Linear(512, 512) for _ in range(8)).cuda()
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model
        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
                if x.mean() > 0.5:
                    break
            return x
    model = Leaves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        model(torch.randn(4096, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "mine_to_steer.py"
    script.write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def needed(*words: str) -> int:
        assert main(["fit", "--card", "1GiB", "--json", *words, "--", "python", str(script)]) == 0
        return int(json.loads(capsys.readouterr().out)["steps"][0]["purposes"].get("feature maps", 0))

    layer_nbytes = 4096 * 512 * 4
    assert needed() - needed("--values", "mine_to_steer:sure") >= 6 * layer_nbytes
    answer = lightning_memopt.fit(["python", str(script)], ["1GiB"], values="mine_to_steer:sure")
    assert "Values that steer the step were given " in answer.table() and "Assumed" not in answer.table()
    with pytest.raises(ConfigError, match="values is 'sure'; give a function, or its name"):
        lightning_memopt.fit(["python", str(script)], values="sure")
