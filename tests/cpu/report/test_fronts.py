"""Every front takes `report=`, refuses a bad path before anything runs, and writes the page however the run ends."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt import MemOptConfig, optimize
from lightning_memopt.cli import main
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.plan import step_of
from lightning_memopt.plan.clocks import waits
from lightning_memopt.report import page as page_module
from tests.cpu.lib.pages import Blocks, Page, page_at, trained

OPTIONS: dict[str, Any] = dict(budget="min", profile_steps=2, solver_seconds=0.5, verbose=False)


def checked(path: Path, model: str, steps: int) -> Page:
    """The page at `path`: of a planned run of this model, measured; its record gives the same page."""
    page = page_at(path)
    assert f"MemOpt: {model}" in page.text
    figures = page.figures()
    assert figures["peak with the plan", "measured"] and figures["peak without a plan", "predicted"]
    assert sum(row[1][0] == "planned" for row in page.rows("steps-all")) >= steps
    again = path.with_name("again.html")
    assert main(["report", str(path.with_suffix(".json")), "-o", str(again)]) == 0
    assert again.read_bytes() == path.read_bytes()
    return page


def bad_paths(folder: Path) -> list[Any]:
    (folder / "folder.html").mkdir()
    (folder / "taken.json").mkdir()
    locked = folder / "file"
    locked.write_text("")
    return [
        folder / "missing" / "run.html",
        folder / "folder.html",
        folder / "taken.html",
        locked / "run.html",
        folder / "run.txt",
        folder / "run",
        "",
        7,
        True,
        b"run.html",
    ]


def test_a_bad_path_is_refused_before_anything_runs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for path in bad_paths(tmp_path):
        with pytest.raises(ConfigError, match="report"), optimize(model, optimizer, report=path, **OPTIONS):
            pytest.fail("the loop has begun")
    with optimize(model, optimizer, **OPTIONS):  # nothing was left attached
        pass
    assert main(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "missing" / "run.html")]) == 2


def test_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "run.html")
    checked(tmp_path / "run.html", "Blocks", 6)
    monkeypatch.chdir(tmp_path)
    trained(Path("beside.html"))
    assert (tmp_path / "beside.html").is_file() and (tmp_path / "beside.json").is_file()
    before = sorted(tmp_path.iterdir())
    model = Blocks()
    with optimize(model, torch.optim.Adam(model.parameters()), **OPTIONS):
        model(torch.randn(8, 64)).sum().backward()
    assert sorted(tmp_path.iterdir()) == before, "nothing is written where nobody asked"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_is_in_the_report_and_is_raised(tmp_path: Path, kind: type[BaseException]) -> None:
    error = kind("</script> it & broke")
    model = Blocks()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(kind) as raised, optimize(model, optimizer, report=tmp_path / "run.html", **OPTIONS):
        for _ in range(5):
            model(torch.randn(128, 64)).sum().backward()
            optimizer.step()
        raise error
    assert raised.value is error
    del raised  # its traceback holds tensors
    page = checked(tmp_path / "run.html", "Blocks", 3)
    assert f"The run was ended by {type(error).__name__}: {error}" in page.text


def test_a_refused_budget_has_a_page(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError) as raised:
        trained(tmp_path / "run.html", budget=3 << 20)
    page = page_at(tmp_path / "run.html")
    assert f"InfeasibleError: {raised.value}" in page.text


def test_what_goes_wrong_at_the_end_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is gone, or the page cannot be made: the training has ended well, and its own exception is the one raised."""
    folder = tmp_path / "gone"
    folder.mkdir()
    model = Blocks()
    optimizer = torch.optim.Adam(model.parameters())
    with (
        pytest.warns(UserWarning, match="could not be written"),
        optimize(model, optimizer, report=folder / "run.html", **OPTIONS),
    ):
        folder.rmdir()
    monkeypatch.setattr(page_module, "render", lambda record: 1 / 0)
    with pytest.raises(ValueError, match="mine"), pytest.warns(UserWarning, match="ZeroDivisionError"):
        with optimize(model, optimizer, report=tmp_path / "run.html", **OPTIONS):
            raise ValueError("mine")
    assert not list(tmp_path.iterdir())


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_DISABLE", "1")
    trained(tmp_path / "run.html")
    assert not list(tmp_path.iterdir())


def test_two_runs_that_are_open_together_write_two_pages(tmp_path: Path) -> None:
    outer, inner = Blocks(), nn.Linear(4, 4)
    with optimize(outer, torch.optim.SGD(outer.parameters(), 0.1), report=tmp_path / "run.html", **OPTIONS):
        with optimize(inner, torch.optim.SGD(inner.parameters(), 0.1), report=tmp_path / "run.html", **OPTIONS):
            pass
    assert "MemOpt: Blocks" in page_at(tmp_path / "run.html").text
    assert "MemOpt: Linear" in page_at(tmp_path / "run-2.html").text
    trained(tmp_path / "run.html")
    assert not (tmp_path / "run-3.html").exists()


def test_samples_and_a_pool_are_in_the_report(tmp_path: Path) -> None:
    model = Blocks()
    optimizer = torch.optim.Adam(model.parameters())
    with optimize(model, optimizer, report=tmp_path / "run.html", pool="planned", **OPTIONS) as run:
        meter = run.monitor(warmup=0, every=1)
        for _ in range(10):
            model(torch.randn(128, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.step(samples=128)
    page = checked(tmp_path / "run.html", "Blocks", 8)
    rates = {row[0][0]: row[1][1] for row in page.rows("rates-all")}
    assert rates["batch, samples a step"] == 128
    assert rates["samples a second"] == run._meter.rates().samples_per_sec
    pool = run.status().pool
    assert pool is not None and pool.addresses is not None
    (picture,) = page.pictures("rects")
    assert picture["arena"] == pool.addresses.arena_nbytes and len(picture["rects"]) == pool.addresses.planned
    assert all(until > first and offset + nbytes <= picture["arena"] for first, until, nbytes, offset in picture["rects"])


def test_parked_tensors_have_copies_and_waits(tmp_path: Path) -> None:
    """Without recomputation only parking is left; the record has the rates that its timeline was drawn with."""
    run = trained(tmp_path / "run.html", recompute=False, offload="disk", compress="lossless")
    plan = run.plan
    assert plan is not None and any(life.how == "fetch" for life in plan.lives)
    page = checked(tmp_path / "run.html", "Blocks", 6)
    totals = {(row[0][0], row[1][0]): row[3][1] for row in page.rows("timeline-totals")}
    copies = totals["copies out", "copy"] + totals["copies in", "copy"]  # type: ignore[operator]
    graph = step_of(run.status().graph, plan)
    in_step = sum(copy.seconds for copy in graph.copies)
    resting = (*plan.states, *plan.weights)
    in_update = sum(each.copy_seconds for each in resting) - in_step  # the timeline ends where backward does
    assert copies == pytest.approx(plan.predicted.copy_seconds - in_update)
    waits_in_update = sum(each.seconds for each in resting) - sum(waits(graph))
    assert totals.get(("compute", "wait"), 0.0) == pytest.approx(plan.predicted.stall_seconds - waits_in_update)
    top = page.rows("modules-all")[-1]
    assert {row[0][0]: row[3][1] for row in page.rows("modules-all")}["Blocks"] == sum(
        run.status().graph.tensors[t].nbytes for t in {life.tensor for life in plan.lives if life.how == "fetch"}
    ), top
    assert "fetched" in {s["name"] for s in page.pictures("stack")[1]["series"]}


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    import lightning.pytorch as pl

    from lightning_memopt import MemOptStrategy

    class Task(pl.LightningModule):
        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.net, self.fails = Blocks(), fails

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if self.fails and index == 5:
                raise ValueError("of the task")
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    def fit(path: Path, fails: bool = False) -> None:
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        strategy = MemOptStrategy(report=path, **OPTIONS)
        loader = torch.utils.data.DataLoader(torch.randn(8 * 64, 64), batch_size=64)
        pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, **quiet).fit(Task(fails), loader)  # type: ignore[arg-type]

    fit(tmp_path / "run.html")
    checked(tmp_path / "run.html", "Task", 6)
    with pytest.raises(ValueError, match="of the task"):
        fit(tmp_path / "failed.html", fails=True)
    assert "ended by ValueError: of the task" in checked(tmp_path / "failed.html", "Task", 3).text
    with pytest.raises(ConfigError, match="there is no folder"):
        fit(tmp_path / "missing" / "run.html")


def test_fabric(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning_memopt import MemOptFabricStrategy
    from tests.cpu.lib.fabrics import fabric_of

    def loop(path: Path) -> None:
        fabric = fabric_of(MemOptFabricStrategy(report=path, **OPTIONS))
        module = Blocks()
        model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters()))
        for _ in range(8):
            fabric.backward(model(torch.randn(64, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        fabric.strategy.teardown()

    loop(tmp_path / "run.html")
    checked(tmp_path / "run.html", "Blocks", 6)
    with pytest.raises(ConfigError, match="there is no folder"):
        loop(tmp_path / "missing" / "run.html")


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from lightning_memopt.integrations import accelerate as front
    from lightning_memopt.integrations import wire
    from tests.cpu.lib.prepared import fresh

    def loop(path: Path) -> None:
        accelerator = fresh()
        module = Blocks()
        model, optimizer = front.prepare(accelerator, module, torch.optim.Adam(module.parameters()), report=path, **OPTIONS)
        for _ in range(8):
            accelerator.backward(model(torch.randn(64, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()

    loop(tmp_path / "run.html")
    checked(tmp_path / "run.html", "Blocks", 6)
    with pytest.raises(ConfigError, match="there is no folder"):
        loop(tmp_path / "missing" / "run.html")
    front.end()  # the model that was prepared
    assert wire.options_of({"report": "run.html"}) == {"report": "run.html"}
    with pytest.raises(ConfigError, match=r"ends with \.html"):
        wire.options_of({"report": "run.txt"})


def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from tests.cpu.lib.trainers import callback, trainer

    trainer([callback(report=tmp_path / "run.html")]).train()
    checked(tmp_path / "run.html", "GPT2LMHeadModel", 6)
    with pytest.raises(ConfigError, match="there is no folder"):
        trainer([callback(report=tmp_path / "missing" / "run.html")]).train()


def test_all_options_agree() -> None:
    assert MemOptConfig(report="a.html").report == "a.html" and MemOptConfig().report is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MemOptConfig(report=Path("a.html"))
