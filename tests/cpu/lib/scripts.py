"""Scripts in processes of their own that start quickly: one process imports what they need, and forks for each.

Whatever starts `Interpreter.executable` instead of Python gets such a process. In it `sys.executable` is the same file: so do
the launchers that it runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import marshal
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[3]
NEEDS = "TESTS_SCRIPTS_NEED"
"""Environment variable with the modules that are imported first."""
OURS_NEED = "torch._dynamo", "ortools.sat.python.cp_model"
"""What the package imports, and takes long."""

_STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}

_STUB = """#!{python} -IS
import marshal, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
request = marshal.dumps((sys.argv, os.getcwd(), dict(os.environ)))
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
pid = int.from_bytes(server.recv(8), "big")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
said = server.recv(8)
code = int.from_bytes(said, "big", signed=True) if said else 1
if code < 0 and -code != signal.SIGKILL:
    signal.signal(-code, signal.SIG_DFL)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""Hands its arguments, folder, environment and standard streams over, passes signals on, and ends as the process ended."""


class Interpreter:
    """Runs as `python ARGUMENTS` does, and imports are there already."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self.executable = str(self._folder / "python")
        path = str(self._folder / "socket")
        Path(self.executable).write_text(_STUB.format(python=sys.executable, path=path))
        os.chmod(self.executable, 0o700)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": "/nonexistent"}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(64)
            command = [sys.executable, "-m", "tests.cpu.lib.scripts", str(server.fileno())]
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[server.fileno()])

    def run(
        self, *arguments: str, cwd: Path, needs: tuple[str, ...] = (), seconds: float = 200
    ) -> subprocess.CompletedProcess[str]:
        """`needs`: modules that are imported first, and stay for later scripts. `seconds`: after them, it is killed."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", NEEDS: " ".join((*OURS_NEED, *needs))}
        command = [self.executable, *arguments]
        done = subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        out, err = done.stdout.decode(), done.stderr.decode()  # as they are, "\r" too
        return subprocess.CompletedProcess(arguments, done.returncode, out, err)

    def stands_in(self, patch: pytest.MonkeyPatch, *needs: str) -> None:
        """Whatever this process starts with `sys.executable`, until `patch` is undone, has these imports already."""
        patch.setattr(sys, "executable", self.executable)
        patch.setenv(NEEDS, " ".join((*OURS_NEED, *needs)))

    def close(self) -> None:
        self._process.communicate()
        shutil.rmtree(self._folder)


def _received(client: socket.socket) -> tuple[list[int], bytes]:
    """The standard streams and the request of one who starts a process."""
    head, streams, *_ = socket.recv_fds(client, 8, 3)
    missing, request = int.from_bytes(head, "big"), b""
    while missing:
        part = client.recv(missing)
        if not part:
            raise ConnectionError("who asks was killed")
        request += part
        missing -= len(part)
    return streams, request


def _in_turn(server: socket.socket) -> list[str] | None:
    """In each of the forked processes: its arguments. None in the first one, when nobody asks any more.

    They are not processes of `multiprocessing`: those end without the end of the interpreter.
    """
    ended, ends = socket.socketpair()
    for end in (ended, ends):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends.fileno())
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as ready:
        for each in (server, ended, sys.stdin):
            ready.register(each, selectors.EVENT_READ)
        while True:
            sources = [key.fileobj for key, _ in ready.select()]
            if sys.stdin in sources:
                signal.set_wakeup_fd(-1)
                for pid in running:
                    _kill(pid)
                return None
            for pid, client in list(running.items()):
                if client in sources:  # who started it was killed
                    _kill(pid)
                    ready.unregister(client)
            if ended in sources:
                with contextlib.suppress(BlockingIOError):
                    ended.recv(4096)
            _reap(running, ready)
            if server in sources:
                client, _ = server.accept()
                try:
                    streams, request = _received(client)
                except ConnectionError:
                    continue
                asked = marshal.loads(request)
                for need in asked[2].get(NEEDS, "").split():
                    importlib.import_module(need)
                gc.freeze()  # each session collects garbage: not of all that was imported
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (server, ended, ends, client, *running.values()):
                        other.close()
                    return _arrive(streams, *asked)
                for stream in streams:
                    os.close(stream)
                running[pid] = client
                ready.register(client, selectors.EVENT_READ)
                with contextlib.suppress(BrokenPipeError):
                    client.sendall(pid.to_bytes(8, "big"))


def _kill(pid: int) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _reap(running: dict[int, socket.socket], ready: selectors.BaseSelector) -> None:
    """Say of each process that has ended how it ended."""
    for pid, client in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _kill(pid)
            with contextlib.suppress(KeyError):
                ready.unregister(client)
            with contextlib.suppress(BrokenPipeError):
                client.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
            running.pop(pid).close()


def _arrive(streams: list[int], arguments: list[str], cwd: str, environment: dict[str, str]) -> list[str]:
    """Become the process that was asked for."""
    for (to, stream), (name, mode) in zip(enumerate(streams), _STREAMS.items(), strict=True):
        os.dup2(stream, to)
        os.close(stream)
        before = getattr(sys, name)  # it was opened on something else, which may have been a file
        now = os.fdopen(to, mode, encoding=before.encoding, errors=before.errors, closefd=False)
        now.reconfigure(line_buffering=name == "stderr")
        setattr(sys, name, now)
        setattr(sys, f"__{name}__", now)
    os.setsid()  # what it starts, and leaves, ends with it
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= environment
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.executable = arguments[0]
    return arguments[1:]


def _run(arguments: list[str]) -> None:
    while arguments[0] in ("-u", "-W"):
        if arguments.pop(0) == "-u":
            raw = os.fdopen(1, "wb", buffering=0, closefd=False)
            sys.stdout = io.TextIOWrapper(raw, sys.stdout.encoding, sys.stdout.errors, write_through=True)
        else:
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as server:
        asked = _in_turn(server)
    if asked is not None:
        _run(asked)
