"""The page: its numbers are those of the run, no name ends an element, and it stays small and quick for huge steps."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "null"))
from graphs import random_steps, training_step

from lightning_memopt import jsonio
from lightning_memopt.cli import main
from lightning_memopt.errors import PlanFileError
from lightning_memopt.graph import unmodified_levels
from lightning_memopt.plan import simulate
from lightning_memopt.report.page import html, render
from lightning_memopt.report.page.budget import next_row
from lightning_memopt.report.page.memory import kept_points
from lightning_memopt.report.page.timeline import merged
from lightning_memopt.report.record import read_record, record_of_plan
from lightning_memopt.session.history import History
from lightning_memopt.session.history import merged as merged_steps
from lightning_memopt.solvers import planner
from tests.cpu.lib.pages import Page, page_at, scripts, trained

LARGEST_NBYTES = 5_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    path = tmp_path_factory.mktemp("report") / "run.html"
    ended = trained(path, share=0.5)
    return SimpleNamespace(path=path, run=ended, status=ended.status(), page=page_at(path))


def test_headline_figures_are_those_of_the_run(run: SimpleNamespace) -> None:
    status, figures = run.status, run.page.figures()
    plan = status.plan
    assert figures["budget", "given"] == status.budget_nbytes
    assert figures["peak with the plan", "predicted"] == plan.predicted_peak_nbytes
    assert figures["peak with the plan", "measured"] == status.measured_peak_nbytes
    assert figures["peak without a plan", "predicted"] == plan.unmodified_peak_nbytes
    assert figures["extra time a step", "predicted"] == plan.predicted.seconds
    assert figures["no plan that only rebuilds adds less than", "proven for these op times"] == plan.lower_bound_seconds
    assert figures["ops run again a step", "predicted"] == plan.predicted.rebuilt_ops > 0


def test_pictures_and_tables_say_the_same(run: SimpleNamespace) -> None:
    """The areas add up to the simulator's bytes, the peak among them, and the table beside a picture has the same numbers."""
    graph, plan = run.status.graph, run.status.plan
    named = {"before": unmodified_levels(graph), "after": simulate(graph, plan.lives).nbytes}
    for picture, (key, totals) in zip(run.page.pictures("stack"), named.items(), strict=True):
        points = picture["points"]
        sums = [sum(column) for column in zip(*(s["nbytes"] for s in picture["series"]), strict=True)]
        assert sums == [totals[p] for p in points]
        assert picture["peak"]["nbytes"] == max(totals) == totals[picture["peak"]["point"]]
        assert picture["peak"]["point"] in points
        rows = run.page.rows(f"memory-{key}")
        assert [row[0][1] for row in rows] == points and [row[4][1] for row in rows] == sums
        at_peak = run.page.rows(f"peak-{key}")
        assert sum(row[3][1] for row in at_peak[:-1]) == at_peak[-1][3][1] == max(totals)
    says = {text for picture in run.page.pictures("stack") for says in picture["says"] for text in says}
    assert any("blocks.0.1" in text for text in says), "hover names the layer"


def test_the_tree_adds_up(run: SimpleNamespace) -> None:
    graph, plan = run.status.graph, run.status.plan
    rows = {row[0][0]: row for row in run.page.rows("modules-all")}
    top = rows["Blocks"]
    saved = {s.tensor for s in graph.saves if s.unpacked_at and graph.tensors[s.tensor].born_at >= 0}
    assert sum(cell[1] for cell in top[1:5]) == sum(graph.tensors[t].nbytes for t in saved)
    dropped = {life.tensor for life in plan.lives if life.how == "rebuild"} & saved
    assert top[2][1] == sum(graph.tensors[t].nbytes for t in dropped) > 0
    assert top[6][1] == pytest.approx(plan.predicted.extra_seconds)
    blocks = [rows[f"blocks.{i}"] for i in range(6)]
    assert sum(row[2][1] for row in blocks) == rows["blocks"][2][1]


def test_frontier_steps_and_timeline_are_those_of_the_run(run: SimpleNamespace) -> None:
    rows = run.run.frontier()
    assert [(row[0][1], row[1][1]) for row in run.page.rows("frontier-plans")] == [
        (row.peak_nbytes, row.extra_seconds) for row in rows
    ]
    steps = run.page.rows("steps-all")
    assert [row[1][0] for row in steps] == ["observed"] * 2 + ["planned"] * 6
    assert max(row[3][1] or 0 for row in steps) == run.status.measured_peak_nbytes
    assert {row[2][1] for row in steps[2:]} == {run.status.plan.predicted.needed_nbytes}
    totals = {row[1][0]: row[3][1] for row in run.page.rows("timeline-totals")}
    assert totals["rebuild"] == pytest.approx(run.status.plan.predicted.extra_seconds)
    more = next_row(tuple(rows), run.status.budget_nbytes)
    assert more is not None and "10 % more budget" in run.page.text


def test_what_is_not_there_is_said(run: SimpleNamespace) -> None:
    """In one place at the end, not as empty sections."""
    text, last = run.page.text, run.page.text.partition("Not in this report")[2].partition("Not in this report")[2]
    assert "asks for an arena" in last and "Samples were not counted" in last and "parks nothing" in text
    links = [str(given["href"]) for tag, given in run.page.elements if tag == "a"]
    assert "#absent" in links and not {"#arena", "#rates"} & set(links)
    assert set(links) <= {f"#{given.get('id')}" for _, given in run.page.elements}


def test_a_page_needs_nothing_else_and_every_number_is_reached(run: SimpleNamespace) -> None:
    page = run.page
    assert len(page.source.encode()) < LARGEST_NBYTES
    for tag, given in page.elements:
        assert not {"src", "srcset", "action"} & given.keys(), (tag, given)
        assert given.get("href", "#").startswith(("#", "data:,"))
        if tag == "table":
            assert given["id"]
        if given.get("class", "") and "scroll" in str(given["class"]).split():
            assert given["tabindex"] == "0" and given["aria-label"]
        if "data-picture" in given:
            assert given["role"] == "img" and len(str(given["aria-label"])) > 20
    assert "default-src 'none'" in page.source and "<canvas" not in page.source
    assert sum(tag == "caption" for tag, _ in page.elements) == len(page.tables)


def test_the_record_gives_the_same_page(run: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = tmp_path / "again.html"
    assert main(["report", str(run.path.with_suffix(".json")), "-o", str(again)]) == 0
    assert again.read_bytes() == run.path.read_bytes()
    assert str(again.stat().st_size) in capsys.readouterr().out


def test_a_plan_file_has_a_page(run: SimpleNamespace, tmp_path: Path) -> None:
    """With the plan's figures, the plans of a new search, and an arena that would be; without measured steps, which it says."""
    plan, out = tmp_path / "plan.json", tmp_path / "plan.html"
    run.run.save_plan(str(plan))
    assert main(["report", str(plan), "-o", str(out), "--solver-seconds", "1"]) == 0
    page = page_at(out)
    assert page.figures()["peak with the plan", "predicted"] == run.status.plan.predicted_peak_nbytes
    assert page.figures()["peak with the plan", "measured"] is None
    assert page.pictures("rects") and page.pictures("frontier") and not page.pictures("steps")
    assert "has no measured steps" in page.text
    assert main(["report", str(plan), "-o", str(out), "--solver-seconds", "0"]) == 0
    assert "has no other plans" in page_at(out).text


HOSTILE = "</script><script>alert(1)</script><!--&quot;'\u2028"


def test_a_name_ends_no_element(tmp_path: Path) -> None:
    """A module may be called anything without a dot."""
    trained(tmp_path / "run.html", name=HOSTILE)
    page = page_at(tmp_path / "run.html")
    assert sum(tag == "script" for tag, _ in page.elements) == 4
    assert [len(text) > 0 for text in scripts(page.source)] == [True] * 4
    assert "alert" not in "".join(scripts(page.source)[1:])
    assert any(HOSTILE in text for picture in page.pictures("stack") for says in picture["says"] for text in says)
    assert any(HOSTILE in row[0][0] for row in page.rows("modules-all"))
    assert not any(tag in ("img", "iframe", "object") or "onerror" in given for tag, given in page.elements)


def test_embedded_json_is_what_it_was() -> None:
    value = {"</script>": ["<!--", "&", "\u2028\u2029", "ü", 1.5, None]}
    text = html.embedded(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert jsonio.parse(text) == value


@pytest.mark.parametrize("n", [1, 2, 500, 501, 5000])
def test_no_maximum_is_lost(n: int) -> None:
    for seed in range(20):
        totals = [random.Random(seed * n + i).randrange(1000) for i in range(n)]
        points = kept_points(totals)
        assert points == sorted(set(points)) and len(points) <= 500
        assert max(totals[p] for p in points) == max(totals) and totals.index(max(totals)) in points
        assert {0, n - 1} <= set(points)


@pytest.mark.long
def test_a_huge_step_stays_small_and_quick() -> None:
    """15,000 ops and more."""
    graph = training_step(random_steps(random.Random(1), 7600), inputs={"input": 64})
    assert len(graph.ops) >= 15_000
    graph = replace(
        graph, ops=tuple(replace(op, seconds=1e-5, scope=f"stack.{op.id % 300}.layer.{op.id % 7}") for op in graph.ops)
    )
    frontier_plan = planner.Frontier(graph, (_kept(graph),), 1, max(unmodified_levels(graph)), (), 0.0).plan(1 << 60)
    began = perf_counter()
    page = Page(text := render(record_of_plan(frontier_plan, graph)))
    assert perf_counter() - began < 20  # on a loaded machine; alone about 3 s, of which 2 are the search for addresses
    assert len(text.encode()) < LARGEST_NBYTES
    before, _ = page.pictures("stack")
    assert before["peak"]["nbytes"] == max(unmodified_levels(graph))
    spans, rectangles = page.pictures("lanes")[0]["spans"], page.pictures("rects")[0]["rects"]
    assert len(before["points"]) <= 500 and len(spans) <= 1500
    assert len(page.rows("timeline-intervals")) == len(spans), "every number of a picture is in a table"
    assert len(page.rows("arena-buffers")) == len(rectangles) > 1000


def _kept(graph: object) -> planner.Candidate:
    from lightning_memopt.solvers.rollout import keep_all

    lives = keep_all(graph)  # type: ignore[arg-type]
    return planner.Candidate(lives, simulate(graph, lives).predicted, "keep all")  # type: ignore[arg-type]


def test_merged_intervals_lose_no_time(run: SimpleNamespace) -> None:
    from lightning_memopt.plan import lower
    from lightning_memopt.plan.clocks import intervals

    graph, plan = run.status.graph, run.status.plan
    log, _ = intervals(graph, plan.lives, lower(graph, plan.lives), None)
    drawn = merged(graph, log, most=60)
    assert len(drawn) < len(log) and sum(n for _, n in drawn) == len(log)
    assert sum(i.ends - i.begins for i, _ in drawn) == pytest.approx(sum(i.ends - i.begins for i in log))
    assert len(merged(graph, log, most=3)) == 3


def test_a_long_run_keeps_its_largest_peak() -> None:
    history = History(wanted=True)
    for step in range(10_000):
        history.step_ended("planned", 100, 200 if step == 777 else 90)
    entries = history.entries
    assert len(entries) <= 2048 and sum(entry.steps for entry in entries) == 10_000
    assert max(entry.measured_nbytes for entry in entries) == 200
    assert [e.kind for e in merged_steps(list(entries))] == ["planned"] * len(merged_steps(list(entries)))
    silent = History(wanted=False)
    silent.step_ended("planned", 1, 1)
    assert silent.entries == ()


def test_bad_records_are_refused(run: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every field that is missing, or of another kind; nothing is written then."""
    good = jsonio.read(run.path.with_suffix(".json"))
    bad, out = tmp_path / "bad.json", tmp_path / "out.html"
    wrong = ({"a": 1}, [1], -3, 1.5, True, "text")
    changes = [{k: v for k, v in good.items() if k != key} for key in good]
    changes += [good | {key: value} for key in good for value in wrong if type(value) is not type(good[key])]
    changes += [good | {key: {"a": 1}} for key, value in good.items() if isinstance(value, dict)]
    changes += [good | change for change in ({"replans": -1}, {"budget_nbytes": -1}, {"phase": "later"}, {"checkpointed": [1]})]
    steps = good["steps"]
    changes += [good | {"steps": steps | {key: [*steps[key][:-1], -2]}} for key in steps if key != "kind"]
    changes += [good | {"steps": steps | {key: steps[key][:-1]}} for key in steps]
    changes += [good | {"more": 1}, good | {"schema": 2}, good | {"format": "lightning_memopt.buffers"}]
    for changed in changes:
        jsonio.write(bad, changed)
        with pytest.raises(PlanFileError, match=r"bad\.json"):
            read_record(bad)
    assert main(["report", str(bad), "-o", str(out)]) == 2
    assert not out.exists() and "bad.json" in capsys.readouterr().err


def test_no_plan_has_a_page_too(tmp_path: Path) -> None:
    trained(tmp_path / "run.html", steps=1, profile_steps=3)
    page = page_at(tmp_path / "run.html")
    assert "still observed" in page.text and "There is no plan" in page.text
    assert len(page.pictures("stack")) == 1, "the observed step is drawn"
    assert torch.is_grad_enabled()
    assert main(["report", str(tmp_path / "run.json"), "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "run.html").read_bytes()
