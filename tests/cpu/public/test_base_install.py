"""Without the optional frameworks: what works, and the line that names the extra. With them: an import loads none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lightning_memopt
from lightning_memopt.errors import EXTRAS, MemOptError, MissingExtraError
from lightning_memopt.versions import TESTED

ROOT = Path(lightning_memopt.__file__).parents[1]
FRAMEWORKS = ("accelerate", "jsonargparse", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")

WITHOUT = f"""
import sys
for name in {(*FRAMEWORKS, "sklearn", "matplotlib", "pynvml", "torchmetrics", "lightning_utilities")!r}:
    sys.modules[name] = None  # an import of it fails, as where it is not installed
"""


def run(code: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env, timeout=timeout
    )


def test_a_base_install_trains_and_names_the_missing_extra() -> None:
    """`tests/base_install.sh` does this, and more, in a real environment with torch alone."""
    done = run(
        f"""{WITHOUT}
import torch, lightning_memopt
from lightning_memopt import MissingExtraError, find_max_batch_size, optimize
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with optimize(model, optimizer, budget="min", profile_steps=1, verbose=False) as run:
    for _ in range(3):
        model(torch.randn(64, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
assert run.status().phase == "planned"
for name in ("MemOptStrategy", "MemOptFabricStrategy", "MemOptBatchScaler", "MemOptMonitor"):
    try:
        getattr(lightning_memopt, name)
    except MissingExtraError as error:
        print(error)
try:
    from lightning_memopt import MemOptStrategy
except ImportError as error:
    assert isinstance(error, lightning_memopt.MemOptError) and error.name == "lightning"
from lightning_memopt import cli
print(cli.main(["demo"]))
"""
    )
    assert done.returncode == 0, done.stderr
    *lines, code = done.stdout.splitlines()
    assert lines[0] == "MemOptStrategy needs lightning, which is not installed: pip install 'lightning-memopt[lightning]'."
    assert len(lines) == 4 and code == "2" and "lightning-memopt[demo]" in done.stderr


def extras() -> dict[str, list[str]]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_error_is_of_both_kinds_and_every_extra_exists() -> None:
    assert issubclass(MissingExtraError, MemOptError) and issubclass(MissingExtraError, ImportError)
    assert set(EXTRAS.values()) <= extras().keys()


@pytest.mark.parametrize("extra", sorted({*EXTRAS.values(), "bench", "demo"}))
def test_no_extra_of_users_excludes_a_supported_torch(extra: str) -> None:
    """pip would replace the installed torch by an older one. Only packages that are installed are asked."""
    supported = [f"{major}.{minor}.0" for major, minor in TESTED]
    for requirement in map(Requirement, extras()[extra]):
        try:
            needs = [Requirement(text) for text in metadata.requires(requirement.name) or ()]
        except metadata.PackageNotFoundError:
            continue
        for need in needs:
            if need.name == "torch" and (need.marker is None or need.marker.evaluate({"extra": ""})):
                assert all(version in need.specifier for version in supported), f"{requirement.name} needs {need}"


def test_the_import_is_quick_loads_no_framework_and_patches_nothing() -> None:
    """Alone, then beside every framework that is installed: their classes and functions stay those that they were."""
    code = f"""
import sys, time
began = time.process_time()
import lightning_memopt
seconds = time.process_time() - began
loaded = sorted({{name.partition(".")[0] for name in sys.modules}} & {{*{FRAMEWORKS!r}, "torch", "numpy", "ortools", "rich"}})
print(seconds, loaded)
"""
    done = run(code)
    seconds, _, loaded = done.stdout.strip().partition(" ")
    assert loaded == "[]" and float(seconds) < 0.1, done.stdout + done.stderr
    code = f"""
import importlib, sys
names = []
for name in {FRAMEWORKS!r}:
    try:
        importlib.import_module(name)
        names.append(name)
    except ImportError:
        pass
import torch

def attributes():
    owners = [(m, sys.modules[m]) for m in sorted(sys.modules) if m.partition(".")[0] in ("torch", *names)]
    found = {{}}
    for module, owner in owners:
        for name, value in list(vars(owner).items()):
            found[module, name] = id(value)
            if isinstance(value, type) and value.__module__ == module:
                found |= {{(module, name, key): id(v) for key, v in vars(value).items() if not key.startswith("_abc")}}
    return found

kept = [vars(m).copy() for m in list(sys.modules.values()) if hasattr(m, "__dict__")]  # no id is used again
before, modules = attributes(), set(sys.modules)
import lightning_memopt
after = attributes()
changed = {{key for key in before if after.get(key) != before[key]}}
assert not changed, changed
print(sorted(n for n in set(sys.modules) - modules if n.partition(".")[0] in names))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr[-2000:]
