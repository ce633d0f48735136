"""The commands that CONTRIBUTING and the Makefile name: each target's first step runs, each benchmark is listed."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import SHORT, benchmarks, commands, main
from tests.conftest import exhaustive

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
DEFAULTS = re.findall(r"^(\w+) \?= (.*)$", MAKEFILE, re.M)
TARGETS = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[1].split()  # type: ignore[index]
BIN = Path(sys.executable).parent


def recipe(target: str) -> list[str]:
    """The commands of a target, as `make` would run them where the environment is there."""
    lines = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", MAKEFILE, re.M)[1].splitlines()  # type: ignore[index]
    commands = [line.strip().replace("$(BIN)/", f"{BIN}{os.sep}") for line in lines]
    for name, value in DEFAULTS:
        commands = [command.replace(f"$({name})", value) for command in commands]
    return commands


@pytest.mark.skipif(not (BIN / "memopt").exists(), reason="not an environment that `make setup` made")
@pytest.mark.parametrize("target", [t for t in TARGETS if t not in ("setup", "clean")])
def test_what_a_target_runs_is_there(target: str) -> None:
    """Every command of it exists and takes the arguments it is given: with `--help` it says so and does nothing else."""
    assert recipe(target)
    if target == "docs" and not (BIN / "mkdocs").exists():
        pytest.skip("mkdocs is not installed: pip install -c constraints.txt '.[docs]'")
    for command in recipe(target):
        ended = subprocess.run([*shlex.split(command), "--help"], cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0 and "usage" in ended.stdout.lower(), (command, ended.stderr)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install -c constraints.txt '.[docs]'")
def test_the_site_builds(tmp_path: Path) -> None:
    """Every page is in its table of contents, and every link leads to a page of it: `--strict` fails otherwise."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_setup_makes_the_environment(tmp_path: Path) -> None:
    """An interpreter is asked for an environment, and that one for the packages; a second `make setup` does nothing."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$@" >> calls\n[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" || true\n')
    fake.chmod(0o755)
    for _ in range(2):
        subprocess.run(["make", "setup", f"PYTHON={fake}"], cwd=tmp_path, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "-m venv .venv" and calls[-1].endswith(".[demo,dev,docs]") and len(calls) == 3


def test_clean_leaves_what_is_yours(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (".venv", "build", "runs", "lightning_logs", "tests/__pycache__", "lightning_memopt", "examples"):
        (tmp_path / name).mkdir(parents=True)
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    yours = {"runs", "lightning_logs", "tests", "lightning_memopt", "examples"}
    assert {p.name for p in tmp_path.iterdir()} == {"Makefile", *yours}
    assert not list((tmp_path / "tests").iterdir())


def test_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """By name, with what each measures; the short ones and those of CONTRIBUTING are among them."""
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(benchmarks())
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)
    assert {name for name, *_ in SHORT} <= set(benchmarks())


def test_words_of_a_benchmark_are_its_own() -> None:
    assert commands(["frontier", "gpt2", "--rounds", "5", "chain", "--small"]) == [
        ["frontier", "gpt2", "--rounds", "5"],
        ["chain", "--small"],
    ]
    assert commands(["gpu", "replay", "offload", "--small", "meter"]) == [["gpu", "replay", "offload", "--small"], ["meter"]]
    with pytest.raises(ValueError, match="no benchmark 'frontiers'; there are architectures"):
        commands(["frontiers"])


def test_a_benchmark_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chain", "--no-such-option"]) == 1
    assert "failed: chain" in capsys.readouterr().err


def test_exhaustive_tests_are_there() -> None:
    """A test that was renamed would silently be one of `make test-all` again, and a file that is gone would be forgotten."""
    for name in exhaustive():
        path, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text() if test else (ROOT / path).is_file(), name
