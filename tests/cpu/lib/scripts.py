"""Scripts in processes of their own that start quickly: one process imports what they need, and forks for each."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Interpreter:
    """Runs as `python ARGUMENTS` does, and imports are there already."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.cpu.lib.scripts"]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self, *arguments: str, cwd: Path, needs: tuple[str, ...] = (), seconds: int = 200
    ) -> subprocess.CompletedProcess[str]:
        """`needs`: modules that are imported first, and stay for later scripts. `seconds`: after them, it is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            self._process.stdin.write(json.dumps([arguments, str(cwd), folder, needs, seconds]) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            out, err = (Path(folder, name).read_bytes().decode() for name in ("out", "err"))  # as they are, "\r" too
        return subprocess.CompletedProcess(arguments, code, out, err)

    def close(self) -> None:
        self._process.communicate()


def _in_turn() -> list[str] | None:
    """In each of the forked processes: its arguments. None in the first one, when nobody asks any more.

    They are not processes of `multiprocessing`: those end without the end of the interpreter.
    """
    for line in sys.stdin:
        arguments, cwd, folder, needs, seconds = json.loads(line)
        for need in needs:
            importlib.import_module(need)
        gc.freeze()  # each session collects garbage: not of all that was imported
        child = os.fork()
        if child == 0:
            signal.alarm(seconds)
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(Path(folder, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
            os.chdir(cwd)
            return arguments
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it started, and left
        print(code, flush=True)
    return None


if __name__ == "__main__":
    asked = _in_turn()
    if asked is not None and asked[0] == "-m":
        sys.argv, sys.path[0] = asked[1:], os.getcwd()
        runpy.run_module(asked[1], run_name="__main__", alter_sys=True)
    elif asked is not None:
        sys.argv, sys.path[0] = asked, str(Path(asked[0]).parent)
        runpy.run_path(asked[0], run_name="__main__")
