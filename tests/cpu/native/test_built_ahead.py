"""`memopt build`: what was built ahead serves machines without a compiler. What others may have written is not loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memopt import cli, cxx
from lightning_memopt.cxx import BuildError
from tests.cpu.lib.engines import needs_native

_TRAINS = """
import torch
from lightning_memopt import optimize
from lightning_memopt.native import engine
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with optimize(model, optimizer, budget="80%"):
    for _ in range(5):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("native" if engine.loaded() is not None else "python")
"""


def trained(folder: Path, libraries: Path | None) -> subprocess.CompletedProcess[str]:
    """A run on a machine without a compiler and with an empty cache."""
    environment = os.environ | {"PATH": str(folder), "CXX": "", "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {"MEMOPT_LIBRARIES": "" if libraries is None else str(libraries)}
    (folder / "cache").mkdir(exist_ok=True)
    return subprocess.run([sys.executable, "-c", _TRAINS], env=environment, capture_output=True, text=True, timeout=300)


@needs_native
def test_a_machine_without_a_compiler_uses_what_was_built_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ahead = tmp_path / "ahead"
    for _ in range(2):  # again: the copies are replaced
        assert cli.main(["build", "-o", str(ahead)]) == 0
    told = capsys.readouterr().out
    assert "native engine: " in told and "memory meter: " in told and f"MEMOPT_LIBRARIES={ahead}" in told
    (tmp_path / "machine").mkdir()
    run = trained(tmp_path / "machine", ahead)
    assert run.stdout.strip() == "native", run.stderr
    assert "building" not in run.stderr and "is not there" not in run.stderr
    run = trained(tmp_path / "machine", None)
    assert run.stdout.strip() == "python"
    assert "there is no C++ compiler" in run.stderr and "memopt build -o" in run.stderr


def compiled(compiler: str, target: Path) -> None:
    target.write_bytes(b"x" * 100)


def built(said: list[str]) -> Path:
    return cxx.library("part", "a part", ("a text",), compiled, said.append)


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a library that was built ahead. The cache is empty again, and there is no compiler."""
    monkeypatch.delenv("MEMOPT_LIBRARIES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    said: list[str] = []
    path = built(said)
    assert said[0].startswith("MemOpt: building a part") and "a part was built in 0 s: 0.0 MB" in said[1]
    folder = tmp_path / "ahead"
    path.parent.parent.rename(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("MEMOPT_LIBRARIES", str(folder))

    def none() -> str:
        raise BuildError("there is no C++ compiler")

    monkeypatch.setattr(cxx, "compiler_path", none)
    return folder


def test_it_is_found_first(ahead: Path) -> None:
    said: list[str] = []
    assert built(said).parent.parent == ahead and not said


def test_a_damaged_library_is_not_loaded(ahead: Path) -> None:
    built([]).write_bytes(b"y" * 100)
    with pytest.raises(BuildError, match="no C.. compiler"):
        built([])


def test_a_folder_that_others_may_write_to_is_refused(ahead: Path) -> None:
    ahead.chmod(0o777)
    with pytest.raises(BuildError, match="may be written by others"):
        built([])


def test_a_folder_that_is_not_there_is_named(ahead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_LIBRARIES", str(ahead / "nowhere"))
    with pytest.raises(BuildError, match="nowhere cannot be read"):
        built([])
