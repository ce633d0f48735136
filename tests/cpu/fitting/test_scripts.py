"""`memopt fit -- python train.py`: training scripts, run up to their fourth update without computing a tensor."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt.cli import main
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.answer import Fit, fit
from lightning_memopt.fitting.scripts import script_of

IMPORTS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""
MODEL = """
batch = int(sys.argv[1]) if len(sys.argv) > 1 else 256
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))).to(device)
"""
LOOP = """
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler(device)
for epoch in range(6):
    for (x,) in DataLoader(TensorDataset(torch.randn(2 * batch, 256)), batch_size=batch, shuffle=True):
        with torch.autocast(device, torch.float16):
            loss = model(x.to(device)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert len(model) == 8 and (epoch, loss.item()) < (4, 0.0), "the script runs on after its updates were recorded"
"""


def asked(folder: Path, text: str, *words: str, card: str = "1GiB", **options: Any) -> Fit:
    script = folder / "train.py"
    script.write_text(IMPORTS + text)
    return fit(["python", str(script), *words], [card], **options)


def test_a_script_is_asked_about_without_a_change(tmp_path: Path) -> None:
    answer = asked(tmp_path, MODEL + LOOP, "{batch}", batch=1024, card="680MiB")
    assert answer.purposes["weights"] == 8 * (256 * 256 + 256) * 4
    on = answer.cards[0]
    assert on.largest_batch is not None and on.largest_planned_batch is not None
    assert 1024 < on.largest_batch < on.largest_planned_batch
    assert not torch.cuda.is_available() and torch.autocast("cpu").fast_dtype == torch.bfloat16


def test_what_a_script_keeps_on_the_host_is_not_on_the_card(tmp_path: Path) -> None:
    plain = asked(tmp_path, MODEL + LOOP)
    large = asked(tmp_path, "data = torch.zeros(1 << 24)\n" + MODEL + LOOP)
    moved = asked(tmp_path, "data = torch.zeros(1 << 24).to('cuda')\n" + MODEL + LOOP)
    copied = asked(tmp_path, MODEL + "import copy\nteacher = [copy.deepcopy(model) for _ in range(4)]\n" + LOOP)
    assert large.allocated_nbytes == plain.allocated_nbytes
    assert moved.allocated_nbytes == plain.allocated_nbytes + (1 << 26)
    assert copied.allocated_nbytes == plain.allocated_nbytes + 4 * 8 * (256 * 256 + 256) * 4


def test_a_script_that_checkpoints_is_asked_about_without(tmp_path: Path) -> None:
    wrapped = """
from torch.utils.checkpoint import checkpoint
class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant={})
    def __len__(self):
        return 8
model = Outer(model)
"""
    plain = asked(tmp_path, MODEL + LOOP)
    for reentrant in ("False", "True"):
        answer = asked(tmp_path, MODEL + wrapped.format(reentrant) + LOOP)
        assert answer.peak_nbytes == plain.peak_nbytes
        assert "gradient checkpointing is off, since a plan replaces it" in answer.table()


def test_two_optimizers_and_two_models(tmp_path: Path) -> None:
    text = """
one, two = nn.Linear(64, 64), nn.Linear(64, 64)
first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
for _ in range(20):
    first.zero_grad(); second.zero_grad()
    two(one(torch.randn(32, 64))).sum().backward()
    first.step(); second.step()
"""
    assert asked(tmp_path, text).purposes["weights"] == 2 * (64 * 64 * 4 + 512)


def test_an_optimizer_that_steps_seldom(tmp_path: Path) -> None:
    text = """
one, two = nn.Linear(64, 64), nn.Linear(64, 64)
first, second = torch.optim.Adam(one.parameters()), torch.optim.Adam(two.parameters())
unused = torch.optim.SGD(one.parameters(), lr=0.1)
for n in range(90):
    first.zero_grad(); second.zero_grad()
    two(one(torch.randn(32, 64))).sum().backward()
    first.step()
    if n % 3 == 2:
        second.step()
"""
    weights = 2 * (64 * 64 + 64) * 4
    assert asked(tmp_path, text).purposes["optimizer state"] >= 2 * weights
    assert (
        asked(tmp_path, text.replace("if n % 3", "if False and n % 3").replace("90", "200")).purposes["weights"] >= weights // 2
    )


@pytest.mark.parametrize(
    "moving",
    [
        "with torch.device('cuda'):\n    x = torch.ones(64, 256)",
        "torch.set_default_device('cuda'); x = torch.ones(64, 256); torch.set_default_device(None)",
        "x = torch.randn(1 << 22, 256)[:64].to('cuda')",
        "x = torch.randn(1 << 22, 256)[:64].cuda(0)",
        "torch.cuda.synchronize(); torch.cuda.current_stream().synchronize(); x = torch.randn(64, 256, device='cuda')",
        "with torch.cuda.device(0):\n    x = torch.randn(64, 256).cuda(); x.record_stream(torch.cuda.current_stream())",
    ],
)
def test_what_is_on_the_device(tmp_path: Path, moving: str) -> None:
    """Of a data set on the host, the part that was moved."""
    text = (
        f"{moving}\nmodel = nn.Linear(256, 256).cuda()\no = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        + """
for _ in range(9):
    loss = model(x).square().mean()
    if not torch.isfinite(loss) or torch.isnan(loss):
        sys.exit("infinite")
    o.zero_grad(); loss.backward(); o.step()
"""
    )
    assert asked(tmp_path, text).allocated_nbytes < 1 << 21


SMALL = """
model = nn.Linear(256, 256)
x = torch.randn(64, 256)
{}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    optimizer.zero_grad(); loss = model(x).square().mean(); loss.backward(); optimizer.step()
"""


@pytest.mark.parametrize(
    "text",
    [
        "g = torch.Generator('cuda').manual_seed(1); torch.Generator(device=torch.device('cuda', 0))\n"
        "x = torch.randn(64, 256, generator=g, device='cuda'); model.cuda()\n"
        "assert isinstance(g, torch.Generator) and isinstance(torch.default_generator, torch.Generator)",
        "model.to(0); model.to(device=0); x = x.to(0); x = torch.zeros(64, 256, device=0); assert x.is_cuda",
        "x = torch.cuda.FloatTensor(64, 256).normal_(); y = torch.ones(3).type(torch.cuda.LongTensor); model.cuda()\n"
        "assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(torch.ones(3), torch.cuda.FloatTensor)\n"
        "assert y.is_cuda and y.tolist() == [1, 1, 1]",
        "torch.set_default_tensor_type(torch.cuda.FloatTensor); model = nn.Linear(256, 256); x = torch.randn(64, 256)\n"
        "assert x.is_cuda and model.weight.is_cuda",
        "import io; file = io.BytesIO(); torch.save(model.state_dict(), file)\n"
        "for where in ('cuda', torch.device('cuda:0'), {'cpu': 'cuda:0'}, lambda storage, place: storage.cuda(0)):\n"
        "    file.seek(0); model.load_state_dict(torch.load(file, map_location=where))\n"
        "file.seek(0); assert torch.load(file, map_location='cuda')['bias'].is_cuda; model.cuda(); x = x.cuda()",
    ],
    ids=["generator", "numbers", "types", "default type", "load"],
)
def test_names_of_the_device(tmp_path: Path, text: str) -> None:
    answer = asked(tmp_path, SMALL.format(text))
    assert answer.purposes["weights"] == (256 * 256 + 256) * 4 and answer.allocated_nbytes < 1 << 20
    assert torch.default_generator.device.type == "cpu" and torch.zeros(1).device.type == "cpu"


def test_a_script_is_told_where_tensors_are(tmp_path: Path) -> None:
    text = """
assert not x.is_cuda and x.device.type == "cpu"
model.cuda(); x = x.cuda()
assert x.is_cuda and x.device == torch.device("cuda", 0) and x.get_device() == 0
assert next(model.parameters()).is_cuda and torch.zeros(3, device=x.device).is_cuda and torch.ones(3).to(x).is_cuda
assert model(x).is_cuda and torch.zeros_like(x).is_cuda
with torch.autocast("cuda", torch.bfloat16):
    assert torch.is_autocast_enabled() and torch.get_autocast_dtype(x.device.type) == torch.bfloat16
assert not torch.is_autocast_enabled()
"""
    assert asked(tmp_path, SMALL.format(text)).purposes["weights"] == (256 * 256 + 256) * 4


@pytest.mark.parametrize("back", ["cpu()", "to('cpu')", "to(device='cpu')", "detach().cpu().clone()"])
def test_what_goes_back_to_the_host_does_not_count(tmp_path: Path, back: str) -> None:
    text = f"model.cuda(); x = x.cuda(); kept = torch.zeros(1 << 22, device='cuda').{back}; assert not kept.is_cuda"
    assert asked(tmp_path, SMALL.format(text)).allocated_nbytes < 1 << 20
    known = text + "; assert torch.arange(3, device='cuda').cpu().tolist() == [0, 1, 2]"
    assert asked(tmp_path, SMALL.format(known)).allocated_nbytes < 1 << 20


@pytest.mark.parametrize("workers", [0, 1])
def test_transforms_of_a_data_set_are_no_forwards(tmp_path: Path, workers: int) -> None:
    """Transforms are modules, too, and are called once a sample, in workers as well."""
    text = (
        MODEL.replace("sys.argv", "[]")
        + f"""
class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x
class Data(torch.utils.data.Dataset):
    doubled = Doubled()
    def __len__(self):
        return 1500
    def __getitem__(self, i):
        return self.doubled(torch.ones(256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    for x in DataLoader(Data(), batch_size=1500, num_workers={workers}):
        optimizer.zero_grad(); model(x.to(device)).sum().backward(); optimizer.step()
"""
    )
    assert asked(tmp_path, text).purposes["weights"] == 8 * (256 * 256 + 256) * 4


def test_sparse_tensors(tmp_path: Path) -> None:
    """They run for real, and count beside the step: the recorder does not know them."""
    text = """
n, k = 4096, 1 << 16
edges = torch.randint(n, (2, k))
graph = torch.sparse_coo_tensor(edges, torch.ones(k), (n, n)).cuda()
assert graph.is_cuda and graph.cpu()._nnz() == k
words, layer = nn.Embedding(n, 64, sparse=True).cuda(), nn.Linear(64, 64).cuda()
x = torch.randn(n, 64).cuda().requires_grad_()
class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = words, layer
    def forward(self):
        return graph @ self.layer(x + self.words(torch.arange(n, device="cuda")))
model = Graph()
optimizers = torch.optim.SparseAdam(words.parameters()), torch.optim.Adam(layer.parameters())
for _ in range(9):
    model().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""
    answer = asked(tmp_path, text)
    assert answer.purposes["outside the step"] >= (1 << 16) * (2 * 8 + 4)
    assert answer.purposes["weights"] >= (4096 * 64 + 64 * 64 + 64) * 4


def test_data_parallel_has_one_device(tmp_path: Path) -> None:
    wrapped = MODEL + "model = nn.DataParallel(model).cuda()\n"
    assert (
        asked(tmp_path, wrapped + LOOP.replace("len(model) == 8 and ", "")).peak_nbytes
        == asked(tmp_path, MODEL + LOOP).peak_nbytes
    )


def test_a_script_finds_its_arguments_and_changes_nothing_here(tmp_path: Path) -> None:
    text = (
        "import os\nassert __name__ == '__main__' and sys.argv[1:] == ['--lr', '1'], sys.argv\n"
        + MODEL.replace("sys.argv", "[]")
        + LOOP
    )
    before = sys.argv, list(sys.path), sys.modules["__main__"], torch.get_rng_state()
    asked(tmp_path, text, "--lr", "1")
    assert before[:3] == (sys.argv, sys.path, sys.modules["__main__"]) and torch.equal(before[3], torch.get_rng_state())
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
    assert torch._dynamo.utils.unpatched_nn_module_call is nn.Module.__call__, "what was imported meanwhile holds the script"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no data')", "raised ValueError: no data"),
        ("import no_package_of_this_name", r"No module named .* Run it by itself, and correct it\.$"),
        (
            "import os\nfrom torch import distributed\nos.environ |= dict(MASTER_ADDR='localhost', MASTER_PORT='0')\n"
            "distributed.init_process_group('nccl', rank=0, world_size=1)",
            "Run it in one process, without torch.distributed",
        ),
        (MODEL + "sys.exit('no data')", "exited with 'no data' after 0 updates; 4 are needed"),
        (MODEL, "ended after 0 updates; 4 are needed"),
        (
            MODEL + "w = nn.Parameter(torch.zeros(4))\no = torch.optim.SGD([w], lr=0.1)\nfor _ in range(9):\n"
            "    model(torch.randn(4, 256))\n    w.sum().backward()\n    o.step()\n",
            "called no module that has what its optimizers update",
        ),
        (
            MODEL + "o = torch.optim.SGD(model.parameters(), lr=0.1)\nfor _ in range(1 << 60):\n"
            "    model[0][0].forward(torch.randn(4, 256)).sum().backward()\n    o.step()\n",
            "called no module that has what its optimizers update",
        ),
        (
            MODEL + "for _ in range(7):\n    model(torch.randn(4, 256)).sum().backward()\n"
            "    for p in model.parameters():\n        p.data.add_(p.grad, alpha=-0.1)\n",
            r"train.py ran 7 forwards without a call of optimizer.step\(\), and nothing else ends a step",
        ),
    ],
    ids=["raises", "imports", "distributed", "exits", "ends", "no model", "no calls", "no optimizer"],
)
def test_what_goes_wrong_in_a_script_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asked(tmp_path, text)


TRAINS = """
import multiprocessing
def trains(model):
    raise RuntimeError("the process was started")
if __name__ == "__main__":
    model = model.to("cpu")
    process = multiprocessing.get_context({how!r}).Process(target=trains, {given})
    process.start()
    process.join()
"""


@pytest.mark.parametrize("how", ["spawn", "fork"])
@pytest.mark.parametrize("given", ["args=(model,)", "kwargs={'model': model}"])
def test_a_script_that_trains_in_other_processes_says_so_at_once(tmp_path: Path, how: str, given: str) -> None:
    with pytest.raises(
        ConfigError, match="train.py trains in processes that it starts, and what runs there cannot be recorded"
    ):
        asked(tmp_path, MODEL + TRAINS.format(how=how, given=given))


def test_a_script_that_spawns_its_ranks_says_so_at_once(tmp_path: Path) -> None:
    spawns = "def rank(i): pass\nif __name__ == '__main__':\n    torch.multiprocessing.spawn(rank, nprocs=2)\n"
    with pytest.raises(ConfigError, match="trains in processes that it starts"):
        asked(tmp_path, MODEL + spawns)


def test_processes_that_load_data_are_the_scripts_own(tmp_path: Path) -> None:
    loads = LOOP.replace("shuffle=True", "shuffle=True, num_workers=1")
    assert asked(tmp_path, MODEL + loads).fits


def test_a_script_is_left_when_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says how far it is until then, and may catch all exceptions."""
    caplog.set_level(logging.INFO, "lightning_memopt")
    monkeypatch.setattr("lightning_memopt.fitting.patience._TELLS_SECONDS", 0.5)
    stays = "for _ in range(1 << 30):\n    try:\n        model(torch.randn(4, 256))\n    except Exception:\n        pass\n"
    said = r"train.py has made 0 of 4 updates within 2 s, in which [\d,]+ operators ran without being computed. Make its steps"
    with pytest.raises(ConfigError, match=said):
        asked(tmp_path, MODEL + "model.eval()\n" + stays, time_limit=2.0)
    assert "MemOpt: after 1 s, " in caplog.text
    with pytest.raises(ConfigError, match="time_limit is 0; give more than 0 seconds"):
        asked(tmp_path, MODEL + LOOP, time_limit=0)


def test_the_table_says_how_to_ask_about_sizes(tmp_path: Path) -> None:
    text = asked(tmp_path, MODEL + LOOP).table()
    assert "The largest batch and length cannot be told: write {batch} and {length} in the command" in text
    text = asked(tmp_path, MODEL + LOOP, "{batch}").table()
    assert "largest batch ┃" in text and "The largest length cannot be told: write" in text


def test_commands() -> None:
    assert script_of(["python3", "-u", "train.py", "-m", "x"]) == ("train.py", ["-m", "x"], False)
    assert script_of(["/usr/bin/python", "-m", "pkg.train", "--lr", "1"]) == ("pkg.train", ["--lr", "1"], True)
    assert script_of(["train.py"]) == ("train.py", [], False)
    assert script_of(["python", "-W", "ignore", "train.py"])[0] == "train.py"
    for wrong, said in (
        (["python", "-m", "torch.distributed.run", "train.py"], "starts other processes"),
        (["torchrun", "train.py"], "starts other processes"),
        (["python"], "names no script"),
        (["python", "-c", "1"], "names no"),
    ):
        with pytest.raises(ConfigError, match=said):
            script_of(wrong)


def test_options_that_a_script_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="itself says dtype: leave"):
        fit(["python", "train.py"], dtype="fp32")
    with pytest.raises(ConfigError, match="Or write {batch} where"):
        fit(["python", "train.py"], batch=8)
    with pytest.raises(ConfigError, match="itself says batch, length: leave"):
        fit("json:dumps", batch=8, length=3)


def test_the_command_line_prints_the_answer_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(IMPORTS + "print('hello')\n" + MODEL + LOOP)
    assert main(["fit", "--json", "--card", "1GiB", "--", "python", str(script)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cards"][0]["verdict"] == "fits" and "hello" in err
