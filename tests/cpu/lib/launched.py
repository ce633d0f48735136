"""Training scripts in processes of their own, by Accelerate's launcher and by ours."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import lightning_memopt
from tests.cpu.lib.scripts import NEEDS, OURS_NEED, Interpreter

ROOT = Path(lightning_memopt.__file__).parents[1]
SCRIPTS = ROOT / "tests" / "cpu" / "accelerate" / "scripts"
STOCK = ("accelerate.commands.accelerate_cli", "launch")
OURS = ("lightning_memopt.integrations.accelerate_cli", "launch")

OPTIONAL = ("transformers.models.gpt2.modeling_gpt2",) if find_spec("transformers") else ()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def port() -> list[str]:
    """Flags with a free port. Accelerate 1.0 does not look for one by itself."""
    return ["--main_process_port", str(free_port())]


def forked(interpreter: Interpreter) -> dict[str, str]:
    """Options of `ran`: processes, also those that a launcher starts, are forked from one that has made their imports."""
    needs = *OURS_NEED, "torch.distributed.launcher.api", "torch.distributed.fsdp", "accelerate.commands.launch", *OPTIONAL
    return {"python": interpreter.executable, NEEDS: " ".join(needs)}


def ran(
    *command: str, timeout: int = 120, cwd: Path | None = None, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python -m command`, with what it printed and its exit code. A process that does not end is ended, with its children.

    python: what runs the command and, where it starts others, those.

    Launchers start their processes in sessions of their own: only the launcher can end them, and does so on SIGTERM.
    """
    ours = ("ACCELERATE_", "MEMOPT_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HOME": "/nonexistent"} | environment
    process = subprocess.Popen(
        [python, "-W", "ignore", "-m", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=cwd, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def same(a: Any, b: Any) -> bool:
    """Whether two nests of lists, dicts, tensors and numbers have the same bits."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, Sequence) and not isinstance(a, str):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.numpy().tobytes() == b.numpy().tobytes()
    return repr(a) == repr(b)
