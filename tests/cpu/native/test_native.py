"""The native counter: every byte, whoever allocates it; built once, cached, and done without where that cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memopt import cxx, optimize
from lightning_memopt.native import Counter, build, counter, install
from lightning_memopt.native.counting import process
from lightning_memopt.session.observe.observation import Observation
from tests.cpu.lib.loops import QUIET, batches, sgd, small, train

ROOT = Path(__file__).parents[3]
INTERPOSED = ROOT / "tests" / "cpu" / "lib" / "interposed.cpp"

pytestmark = pytest.mark.skipif(install() is None, reason="no C++ compiler")


def counts() -> Counter:
    found = counter()
    assert found is not None
    return found


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, cwd=ROOT)


INSTALLED = """
import torch, warnings
from lightning_memopt.native import install
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        counter = install(print)
before = counter.live_nbytes if counter else 0
t = torch.empty(1000, dtype=torch.uint8)
print("counted", counter.live_nbytes - before if counter else None, "said", len(said), *(w.message for w in said))
"""


def test_equal_to_an_independent_count_to_the_byte(tmp_path: Path) -> None:
    """Another count of what torch's allocator asks for, taken beneath it, on ten models: the same bytes and peaks."""
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD")
    library = tmp_path / "interposed.so"
    compiler = cxx.compiler_path()
    subprocess.run([compiler, "-std=c++17", "-O1", "-fPIC", "-shared", str(INTERPOSED), "-o", str(library), "-ldl"], check=True)  # fmt: skip # noqa: E501
    done = python("from tests.cpu.lib.interposed import main; main()", LD_PRELOAD=str(library))
    assert done.stdout.splitlines() == ["compared 10"], done.stdout + done.stderr


def test_every_way_to_allocate_and_to_free() -> None:
    found = counts()
    began = found.live_nbytes
    t = torch.empty(100, dtype=torch.uint8)
    u = t.clone()
    assert found.live_nbytes - began == 200
    u.untyped_storage().resize_(300)
    assert found.live_nbytes - began == 400
    u.data = t
    assert found.live_nbytes - began == 100
    lazy = torch._lazy_clone(t)
    assert found.live_nbytes - began == 100
    lazy.add_(1)
    assert found.live_nbytes - began == 200
    del t, u, lazy
    assert found.live_nbytes == began
    assert not found.counts(torch.from_numpy(torch.ones(3).numpy().copy()).untyped_storage())
    torch.empty(0)
    assert found.live_nbytes == began


def test_windows_overlap_and_what_is_hidden_is_in_all_but_plain_ones() -> None:
    found = counts()
    outer, plain = found.window(), found.window(plain=True)
    assert outer is not None and plain is not None
    began, plainly = outer.reset(), plain.reset()
    torch.empty(1000, dtype=torch.uint8)
    inner = found.window()
    assert inner is not None
    with found.hidden():
        t = torch.empty(600, dtype=torch.uint8)
    assert (outer.peak_nbytes - began, inner.peak_nbytes - began, plain.peak_nbytes - plainly) == (1000, 600, 1000)
    del t
    for window in (outer, inner, plain):
        window.close()
        window.close()
    windows = [found.window() for _ in range(100)]
    assert windows[0] is not None and windows[-1] is None


def test_threads_count_together() -> None:
    found = counts()
    began = found.live_nbytes
    kept: list[torch.Tensor] = []

    def allocate() -> None:
        for i in range(2000):
            torch.empty(64 + i, dtype=torch.uint8)
        kept.append(torch.empty(123, dtype=torch.uint8))

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.live_nbytes - began == 4 * 123
    kept.clear()
    assert found.live_nbytes == began


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_goes_on_counting() -> None:
    found = counts()
    child = os.fork()
    if not child:
        began = found.live_nbytes
        t = torch.empty(77, dtype=torch.uint8)
        os._exit(0 if found.live_nbytes - began == t.nbytes else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_another_allocator_after_ours_is_noticed(tmp_path: Path) -> None:
    """A user's own allocator, set later: nothing is said of what it does, and what was ours is freed as ever."""
    source, library = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(
        "#include <c10/core/CPUAllocator.h>\n"
        'extern "C" void other() { c10::SetAllocator(c10::kCPU, c10::GetDefaultCPUAllocator(), 255); }\n'
    )
    home = Path(torch.__file__).parent
    subprocess.run([cxx.compiler_path(), "-std=c++20", "-w", "-fPIC", "-shared", f"-I{home / 'include'}", str(source), "-o", str(library), f"-L{home / 'lib'}", "-lc10"], check=True)  # fmt: skip # noqa: E501
    code = f"""
import ctypes, torch
from lightning_memopt.native import install, counter
assert install() is not None
t = torch.ones(1000)
ctypes.CDLL({str(library)!r}).other()
assert counter() is None
u = torch.ones(1000)
t.untyped_storage().resize_(8000)
del t, u
from tests.cpu.lib.loops import *
model = small()
with optimize(model, optimizer := sgd(model), budget="min", **QUIET) as run:
    train(model, optimizer, batches(4))
    assert run.plan is not None and run.status().measured_peak_nbytes is not None
print("done")
"""
    done = python(code)
    assert done.stdout.splitlines() == ["done"], done.stderr


def test_without_a_compiler_one_line_says_so(tmp_path: Path) -> None:
    done = python(INSTALLED, PATH="/nowhere", CXX="", XDG_CACHE_HOME=str(tmp_path))
    assert "counted None said 1 MemOpt: the native memory meter is not there: there is no C++ compiler" in done.stdout, done
    done = python(INSTALLED, CXX=shutil.which("false") or "/bin/false", XDG_CACHE_HOME=str(tmp_path))
    assert "counted None said 1" in done.stdout and "false failed" in done.stdout, done


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, for libraries that take no time to build."""

    def compiled(compiler: str, target: Path) -> None:
        time.sleep(0.02)
        target.write_bytes(b"library" * 1000)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compile", compiled)
    return tmp_path / "lightning_memopt"


def test_of_many_builds_at_once_one_stays(cache: Path) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: build.library(said.append), range(8)))
    (folder,) = cache.iterdir()
    assert paths == {folder / "counter.so"} and 2 <= len(said) <= 16
    assert not cache.stat().st_mode & 0o077
    said.clear()
    build.library(said.append)
    assert not said


def test_a_broken_library_is_built_again(cache: Path) -> None:
    """Half of one, as after a crash, and one whose checksum is gone."""
    said: list[str] = []
    library = build.library(said.append)
    for broken in (lambda: library.write_bytes(b"lib"), library.with_name("counter.sha256").unlink):
        broken()
        assert build.library(said.append) == library and library.read_bytes() == b"library" * 1000
    assert len(said) == 6 and [f.name for f in cache.iterdir()] == [library.parent.name]


def test_what_cannot_be_loaded_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "tried", False)
    monkeypatch.setattr(process, "counter", None)
    with pytest.warns(UserWarning, match="native memory meter is not there: .* cannot be loaded"):
        assert install() is None


def test_a_cache_that_others_may_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in it is run."""
    (tmp_path / "lightning_memopt").mkdir(mode=0o777)
    (tmp_path / "lightning_memopt").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cxx.cache()
    try:
        assert folder != tmp_path / "lightning_memopt" and not folder.stat().st_mode & 0o077
    finally:
        folder.rmdir()


def test_two_sessions_count_alike() -> None:
    """Each step's peak has the other model in it, and both end as they began."""
    found = counts()
    one, other = small(), small()
    o, p, least = sgd(one), sgd(other), {"budget": "min"} | QUIET
    with optimize(one, o, **least) as first, optimize(other, p, **least) as second:
        train(one, o, batches(4))
        train(other, p, batches(4))
        train(one, o, batches(4))
        for run in (first, second):
            assert run.plan is not None and run.status().measured_peak_nbytes is not None  # type: ignore[union-attr]
            assert run.status().measured_peak_nbytes > sum(q.nbytes for m in (one, other) for q in m.parameters())  # type: ignore
    assert process.counter is found and counter() is found


def test_ops_after_the_end_of_metering_are_not_measured() -> None:
    """Where metering ends in the middle of a step, later ops leave what was measured as it was."""
    observation = Observation(model := nn.Linear(16, 16), [], torch.device("cpu"), None, verify=False, meter=True)
    with observation.begin_round((x := torch.randn(8, 16),)):
        out = model(x)
    assert observation.events is not None
    observation.stop_metering()
    before = dict(observation.events.workspaces)
    loss = (out * 2).sum()
    assert before and observation.events.workspaces == before
    observation.forward_ended()
    loss.backward()
    graph = observation.finish()
    assert graph is not None and max(op.workspace_nbytes for op in graph.ops) < 1 << 20
