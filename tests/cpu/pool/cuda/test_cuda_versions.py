"""Other versions of torch: what they lack is not asked for, and what they have anew is said where it is needed."""

from __future__ import annotations

import contextlib
import re
import types
from pathlib import Path

import pytest
import torch

from lightning_memopt import cxx
from lightning_memopt.cxx import BuildError
from lightning_memopt.native import build, cuda_pooling

HEADER = Path("c10/cuda/CUDACachingAllocator.h")


LACKED = ["markCaptureBegin", "markCaptureEnd", "getContextForPointer", "allocateWithAddress", "attachOomRejectionObserver"]
"""Functions that are not in every version before 2.13."""


def without(text: str, name: str) -> str:
    """Without the function of the class, and the one beside the class that calls it."""
    while f" {name}(" in text:
        at = text.index(f" {name}(")
        begin, depth, end = max(text.rfind("  virtual ", 0, at), text.rfind("inline ", 0, at)), 0, at
        while depth or text[end] not in ";}":
            depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[end], 0)
            end += 1
            if not depth and text[end - 1] == "}":
                break
        text = text[:begin] + text[end:].removeprefix(";")
    return text


def older(text: str) -> str:
    """Without what versions before 2.13 lack."""
    for name in LACKED:
        text = without(text, name)
        assert f" {name}(" not in text
    text = re.sub(r",\s+bool include_traces = true", "", text)
    return text.replace("snapshot(mempool_id, include_traces)", "snapshot(mempool_id)").replace("using OomRej", "using Not")


def newer(text: str) -> str:
    """With a function that has no default."""
    last = "  virtual std::string name() = 0;\n"
    return text.replace(last, last + "  virtual void anew() = 0;\n")


def compiled(text: str, tmp_path: Path) -> None:
    """Check cuda.cpp with this text as torch's header. Raises BuildError."""
    (tmp_path / HEADER).parent.mkdir(parents=True)
    (tmp_path / HEADER).write_text(text)
    try:
        headers, compiler = build.cuda_headers(), cxx.compiler_path()
    except BuildError as error:
        pytest.skip(str(error))
    include = Path(torch.__file__).parent / "include"
    source = Path(build.__file__).with_name("cuda.cpp")
    options = ["-std=c++20", "-fsyntax-only", "-w", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"]
    cxx.run([compiler, *options, f"-I{tmp_path}", f"-I{include}", f"-I{headers}", str(source)])


@pytest.fixture
def header() -> str:
    return (Path(torch.__file__).parent / "include" / HEADER).read_text()


def test_what_an_older_torch_lacks_is_not_asked_for(header: str, tmp_path: Path) -> None:
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the header is changed from that of 2.13")
    compiled(older(header), tmp_path)


def test_what_a_newer_torch_needs_is_an_error_that_says_so(header: str, tmp_path: Path) -> None:
    assert newer(header) != header
    with pytest.raises(BuildError, match="abstract"):
        compiled(newer(header), tmp_path)


def test_a_pool_that_is_the_first_to_use_cuda_initialises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, torch has no allocator that could be wrapped; that it failed once would count for the whole process."""
    done: list[str] = []

    class Allocator:
        installed = True

        def __init__(self, path: Path) -> None:
            if done != ["init"]:
                raise BuildError("torch's allocator for CUDA is not its own caching allocator")

        def check(self, device: int, handle: int) -> None:
            done.append(f"checked {device}")

    monkeypatch.setattr(cuda_pooling, "_process", cuda_pooling._Process())
    monkeypatch.setattr(cuda_pooling, "CudaAllocator", Allocator)
    monkeypatch.setattr(cuda_pooling, "cuda_library", lambda say: Path())
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("init"))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=0))
    assert cuda_pooling.cuda_allocator(torch.device("cuda", 1), lambda _: None).installed
    assert done == ["init", "checked 1"]
