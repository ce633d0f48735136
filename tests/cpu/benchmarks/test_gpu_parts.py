"""`python -m benchmarks gpu`: each result is kept, whatever becomes of a part, of the process or of the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import gpu, lines, machine, runner
from benchmarks.gpu.parts import Part, chosen, names
from benchmarks.lib.paths import RESULTS, ROOT

WRITES = """
import os, pathlib, signal, subprocess, sys, time
from benchmarks.gpu import lines
path, part = pathlib.Path(sys.argv[2]), sys.argv[4]
def write(test, outcome, **more):
    lines.append(path, kind="test", part=part, test=test, outcome=outcome, **more)
write("first", "began")
write("first", "passed")
"""


def part(name: str, code: str = "", seconds: float = 1.0, **more: object) -> Part:
    return replace(Part(name, "", ("-c", WRITES + code), seconds), **more)  # type: ignore[arg-type]


def ran(path: Path, *parts: Part, seconds: float = 60.0, again: bool = False) -> tuple[dict[str, str], list[str]]:
    """(part -> status, what was said)."""
    said: list[str] = []
    runner.run(parts, path, time.monotonic() + seconds, again, said.append)
    return {name: outcome.status for name, outcome in lines.outcomes(path).items()}, said


def ends(pid: int) -> bool:
    """Whether a process is gone soon, or waits for nothing but its parent. It is gone in any case."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not stat.exists() or ") Z " in stat.read_text():
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def test_a_torn_line_costs_itself_alone(path: Path) -> None:
    lines.append(path, kind="test", part="a", test="one", outcome="passed")
    with path.open("ab") as file:
        file.write(b'{"kind": "test", "part": "a", "te')
    lines.append(path, kind="test", part="a", test="two", outcome="failed")
    assert [line["test"] for line in lines.read(path)] == ["one", "two"]


def test_a_crash_and_an_error_cost_their_parts_alone(path: Path) -> None:
    crash = part("crash", "write('second', 'began')\nprint('last words', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)")
    error = part("error", "raise ValueError('no')")
    wrong = part("wrong", "write('second', 'failed', message='other bits')")
    found, said = ran(path, crash, error, wrong, part("good"))
    assert found == {"crash": "crashed", "error": "crashed", "wrong": "failed", "good": "passed"}
    crashed, raised = (lines.outcomes(path)[name].ended or {} for name in ("crash", "error"))
    assert crashed["reason"] == "SIGSEGV in second" and "last words" in crashed["output"] and crashed["passed"] == 1
    assert raised["reason"] == "returned 1" and "ValueError: no" in raised["output"]
    assert sum("good: passed" in line for line in said) == 1


def test_a_part_that_hangs_is_stopped_with_all_that_it_started(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Part, "limit_seconds", 5.0)
    pid = tmp_path / "pid"
    hangs = part("hangs", f"pathlib.Path({str(pid)!r}).write_text(str(subprocess.Popen(['sleep', '60']).pid))\n"
                          "write('second', 'began')\nsignal.pause()")  # fmt: skip
    found, _ = ran(path, hangs, part("good"))
    assert found == {"hangs": "timed out", "good": "passed"}
    assert (lines.outcomes(path)["hangs"].ended or {})["reason"] == "stopped in second"
    assert ends(int(pid.read_text())), "what the part had started goes on"


def test_what_ends_the_command_ends_the_part_too(tmp_path: Path) -> None:
    code = f"""
import sys
from benchmarks.gpu import gpu, machine
from benchmarks.gpu.parts import Part
hangs = "import os, pathlib, time; pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid())); time.sleep(60)"
machine.described = lambda: dict(device="a card", driver="", torch="")
gpu.chosen = lambda *_: [Part("hangs", "", ("-c", hangs), 1.0)]
sys.exit(gpu.main(["--out", {str(tmp_path)!r}]))
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL) as command:
        while not (pid := tmp_path / "pid").exists() or not pid.read_text():
            assert command.poll() is None
            time.sleep(0.05)
        command.terminate()
        assert command.wait(30) == 143
    assert ends(int(pid.read_text()))
    assert lines.outcomes(tmp_path / "results.jsonl")["hangs"].status == "never ended"


def test_what_does_not_fit_is_not_begun_and_the_next_that_fits_is(path: Path) -> None:
    found, said = ran(path, part("long", seconds=1000.0), part("short"), seconds=30.0)
    assert found == {"short": "passed"} and said[0].startswith("long: takes about 1000 s, and 2")
    assert not any(line.get("part") == "long" for line in lines.read(path))


def test_the_time_is_kept_and_what_it_cut_short_is_run_again(path: Path) -> None:
    began = time.monotonic()
    found, _ = ran(path, part("slow", "signal.pause()", seconds=0.5), seconds=runner.GRACE_SECONDS + 2)
    assert time.monotonic() - began < runner.GRACE_SECONDS + 2
    assert found == {"slow": "cut short"}
    assert ran(path, part("slow"))[0] == {"slow": "passed"}


def test_what_has_a_result_is_not_run_again_unless_asked(path: Path) -> None:
    parts = part("good"), part("wrong", "write('second', 'failed')"), part("always", repeated=True)
    ran(path, *parts)
    _, said = ran(path, *parts)
    assert [line.partition(":")[0] for line in said] == ["always", "always"]
    _, said = ran(path, *parts, again=True)
    assert [line.partition(":")[0] for line in said[::2]] == ["good", "wrong", "always"]


def test_a_part_in_which_the_machine_went_comes_after_the_others(path: Path) -> None:
    lines.append(path, kind="began", part="fatal")
    lines.append(path, kind="test", part="fatal", test="one", outcome="began")
    assert lines.outcomes(path)["fatal"].status == "never ended"
    _, said = ran(path, part("fatal"), part("good"))
    assert [line.partition(":")[0] for line in said[::2]] == ["good", "fatal"]


def test_what_is_missing_leaves_a_part_out_until_it_is_there(path: Path) -> None:
    found, said = ran(path, part("lacks", needs=("no_such_package",)), part("good"))
    assert found == {"lacks": "left out", "good": "passed"} and said[0] == "lacks: left out: no_such_package not installed"
    assert ran(path, part("lacks"))[0]["lacks"] == "passed"


def test_verdicts_of_tests_are_written_as_they_are_made(path: Path, tmp_path: Path) -> None:
    """With what they print; after an error that costs the context, no other test is run."""
    file = tmp_path / "test_it.py"
    file.write_text("""
import pytest
def test_good(): print("3 GB/s")
def test_bad(): assert 1 == 2
def test_skipped(): pytest.skip("not here")
def test_lost(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_after(): pass
""")
    tests = Part("tests", "", ("-m", "pytest", "-q", "-p", "benchmarks.gpu.verdicts", "-p", "no:cacheprovider", str(file)), 1.0)
    found, _ = ran(path, tests)
    known = lines.outcomes(path)["tests"].tests
    assert found == {"tests": "failed"}
    assert {name.partition("::")[2]: line["outcome"] for name, line in known.items()} == {
        "test_good": "passed", "test_bad": "failed", "test_skipped": "skipped", "test_lost": "failed"
    }  # fmt: skip
    good, bad, skipped, _ = known.values()
    assert good["output"] == "3 GB/s\n" and "assert 1 == 2" in bad["message"] and skipped["message"] == "not here"


def test_a_file_that_skips_itself_is_left_out_and_one_that_cannot_be_imported_fails(path: Path, tmp_path: Path) -> None:
    texts = {"skips": "import pytest\npytest.skip('no card', allow_module_level=True)", "broken": "import no_such_module"}
    for name, text in texts.items():
        file = tmp_path / f"test_{name}.py"
        file.write_text(text)
        words = "-m", "pytest", "-q", "-p", "benchmarks.gpu.verdicts", "-p", "no:cacheprovider", str(file)
        ran(path, Part(name, "", words, 1.0))
    known = lines.outcomes(path)
    assert known["skips"].status == "left out" and (known["skips"].ended or {})["reason"] == "no card"
    assert known["broken"].status == "failed" and "no_such_module" in str(known["broken"].tests)


def test_each_file_of_tests_is_in_a_part_and_each_part_is_there() -> None:
    words = [word for found in chosen([]) for word in found.words]
    files = {word.partition("::")[0] for word in words if word.startswith("tests/")}
    assert files == {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert len({found.name for found in chosen([])}) == len(chosen([]))
    assert next(found.name for found in chosen(["replay", "pool"])) == "pool" and "replay" in names()
    with pytest.raises(ValueError, match="there is no part 'rep'"):
        chosen(["rep"])


def test_without_a_device_one_line_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", "--out", str(tmp_path / "out")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.splitlines() == ["there is no CUDA device here that answers", "failed: gpu"]
    assert not (tmp_path / "out").exists() and not done.stdout


def test_an_emulated_device_gives_no_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "described", lambda: {"device": gpu.EMULATED})
    monkeypatch.setattr(runner, "run", lambda *_: pytest.fail("it ran"))
    assert gpu.main(["--out", str(RESULTS / "gpu")]) == 1
    assert "not a result" in capsys.readouterr().err


def test_the_summary_names_what_failed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part("wrong", "write('second', 'failed', message='other bits')"), part("good"), part("later")]
    ran(path, *parts[:2])
    assert gpu.summary(parts, path) == 1
    out = capsys.readouterr().out
    assert "    second: other bits" in out and "to be run" in out
    assert gpu.summary(parts[1:], path) == 0
