"""Two hosts, which are network namespaces of this machine: DDP and FSDP2 within budgets, bit by bit, and ranks that are killed.

    sudo python -m benchmarks hosts                                    # as root: it makes and removes two namespaces
    sudo python -m benchmarks hosts --json benchmarks/results/hosts.json
    python -m benchmarks hosts --table                                 # what is recorded, as Markdown
    sudo python -m benchmarks hosts --cases ddp --faults               # one case, and no fault

On each host `torchrun --nnodes 2 --nproc_per_node 2` starts two ranks, with gloo over a virtual cable between the namespaces.
Every rank trains each case without a plan, within the smallest plan, and within a budget in bytes. Then a rank is killed, while
it observes, solves or runs under its plan. torchrun would end the other ranks on its host at once, so these ranks are forked
without it, but for the last fault. Patience is what it is for users.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any

from benchmarks.lib.paths import RESULTS, ROOT
from benchmarks.robustness import hosts_rank

FILE = RESULTS / "hosts.json"
PER_HOST, WORLD = 2, 4
CABLE, ADDRESSES, PORT = "memopt", ("10.213.77.1", "10.213.77.2"), 29511
"""Of each namespace: its end of the cable, its address, and a port that is free there."""
_OF_TORCH = ("torchinductor_", "torchelastic_")
"""Beginnings of the names of folders that torch and torchrun leave among temporary files."""
_CLONE_NEWNET = 0x40000000  # of Linux's <sched.h>
BOUND_SECONDS = 60.0
"""Ranks end in this time after another one was killed."""
NAMES = (*hosts_rank.CASES, *hosts_rank.RESUMED)
RANK = ("-m", "benchmarks.robustness.hosts", "--rank")
"""The command of a rank: a folder follows, and what the rank does (hosts_rank.py)."""


@dataclass(frozen=True)
class Fault:
    """A rank is killed.

    moment: what it is doing.
    victim: the number of the rank. Rank 0 holds the store of the process group, and solves for all.
    torchrun: ranks are started by torchrun, which ends the other ranks on the victim's host by itself.
    """

    moment: str
    victim: int = WORLD - 1
    torchrun: bool = False

    @property
    def survivors(self) -> list[int]:
        """The ranks that must name the victim."""
        same_host = [rank for rank in range(WORLD) if self.torchrun and rank // PER_HOST == self.victim // PER_HOST]
        return [rank for rank in range(WORLD) if rank != self.victim and rank not in same_host]

    def names_victim(self, error: str) -> bool:
        """Whether an error names the victim, and no rank that has not ended with it."""
        match = re.search(r"[rR]ank ([\d, ]+) (did not say why|has been silent)|usually rank (\d+)", error)
        if match is None or not error.startswith("RankFailedError"):
            return False
        named = {int(rank) for rank in (match[1] or match[3]).split(", ")}
        return self.victim in named and named.isdisjoint(self.survivors)


FAULTS = {
    "observing": Fault("observing"),
    "solving": Fault("solving"),
    "solving for all": Fault("solving", 0),
    "running": Fault("running"),
    "running, with the store": Fault("running", 0),
    "running, by torchrun": Fault("running", torchrun=True),
}


class Hosts:
    """Two namespaces with a cable between them, while the context is entered. Processes that are left in them are killed."""

    def __init__(self) -> None:
        self.names = tuple(f"memopt{i}-{os.getpid()}" for i in range(2))

    def __enter__(self) -> Hosts:
        one, other = self.names
        try:
            for name in self.names:
                _ip("netns", "add", name)
            _ip("link", "add", CABLE, "netns", one, "type", "veth", "peer", "name", CABLE, "netns", other)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
                _ip("-n", name, "link", "set", CABLE, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)

    def processes(self) -> list[int]:
        """Ids of the processes that run on the hosts."""
        outputs = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True) for name in self.names]
        return [int(word) for done in outputs for word in done.stdout.split()]

    def start(self, host: int, log: Path, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """`python command` on a host; it prints into a file."""
        env = os.environ | {"GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)} | environment
        with log.open("wb") as file:
            words = ["ip", "netns", "exec", self.names[host], sys.executable, "-W", "ignore", *command]
            return subprocess.Popen(words, env=env, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

    def torchrun(self, folder: Path, *arguments: str) -> list[subprocess.Popen[bytes]]:
        """Start torchrun on both hosts, with ranks that get the folder and these arguments."""
        size = ["--nnodes", "2", "--nproc_per_node", str(PER_HOST), "--master_addr", ADDRESSES[0], "--master_port", str(PORT)]
        command = ["-m", "torch.distributed.run", *size]
        rank = [*RANK, str(folder), *arguments]
        return [self.start(host, folder / f"log.{host}", *command, "--node_rank", str(host), *rank) for host in range(2)]

    def ranks(self, folder: Path, *arguments: str) -> list[Process]:
        """Start all ranks by themselves, as torchrun would. They are forked: imports take longer than the training."""
        context = multiprocessing.get_context("fork")
        names = [self.names[rank // PER_HOST] for rank in range(WORLD)]
        processes = [context.Process(target=_rank, args=(i, name, folder, arguments)) for i, name in enumerate(names)]
        for process in processes:
            process.start()
        return processes


def _rank(rank: int, host: str, folder: Path, arguments: tuple[str, ...]) -> None:
    """Be a rank on a host, in a process that was forked for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {host}")
    with (folder / f"log.{rank}").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    tempfile.tempdir = str(folder)
    os.environ |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "WORLD_SIZE": str(WORLD), "RANK": str(rank)}
    os.environ |= {"GLOO_SOCKET_IFNAME": CABLE}
    hosts_rank.main([str(folder), *arguments])


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def impossible() -> str | None:
    """Why this machine cannot have two hosts; None where it can."""
    if shutil.which("ip") is None:
        return "needs `ip` (iproute2)"
    try:
        with Hosts() as hosts:
            _ip("netns", "exec", hosts.names[0], "true")
    except RuntimeError as error:
        return f"cannot make network namespaces: {error}"
    return None


def trained(hosts: Hosts, names: list[str], limit_seconds: float = 900.0) -> list[dict[str, Any]]:
    """What each rank came to in these cases."""
    with tempfile.TemporaryDirectory(prefix="memopt-hosts-") as name:
        folder = Path(name)
        processes = hosts.torchrun(folder, *names)
        ended = _ends(processes, limit_seconds)
        if ended is None or any(process.returncode for process in processes):
            raise RuntimeError(f"{'a rank hangs' if ended is None else 'a rank failed'}: {_logs(folder)}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def killed(hosts: Hosts, fault: Fault) -> dict[str, Any]:
    """What the other ranks came to after a rank was killed. Seconds are those since then; None where a process did not end."""
    with tempfile.TemporaryDirectory(prefix="memopt-hosts-") as name:
        folder = Path(name)
        start: Callable[..., Any] = hosts.torchrun if fault.torchrun else hosts.ranks
        processes = start(folder, "dies", fault.moment, str(fault.victim))
        ended = _ends(processes, 400.0)
        if not (folder / "killed").exists():
            raise RuntimeError(f"no rank was killed: {_logs(folder)}")
        at = float((folder / "killed").read_text())
        ranks = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
        files = {path.name for path in folder.iterdir()}
        logs = (f"log.{i}" for i in range(len(processes)))
        expected = {"killed", *logs, *(f"{rank}.json" for rank in ranks)}
        return {
            "victim": fault.victim,
            "ranks": {rank: {"error": end["error"], "seconds": round(end["at"] - at, 1)} for rank, end in ranks.items()},
            "all_ended_seconds": None if ended is None else round(ended - at, 1),
            "left": {
                "processes": len(hosts.processes()),
                "files": sorted(name for name in files - expected if not name.startswith(_OF_TORCH)),
            },
        }


def _logs(folder: Path) -> str:
    """The last lines that each process printed."""
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("log.*")))


def _ends(processes: list[Any], seconds: float) -> float | None:
    """The time at which the last process ended; None where one did not, and was killed."""

    def running() -> list[Any]:
        return [p for p in processes if (p.is_alive() if isinstance(p, Process) else p.poll() is None)]

    until = time.monotonic() + seconds
    while running() and time.monotonic() < until:
        time.sleep(0.1)
    ended = None if running() else time.time()
    for process in running():
        process.kill()
    return ended


def faults_of(results: dict[str, Any]) -> list[str]:
    """What is not as promised in these results."""
    wrong = []
    for name, ranks in results["cases"].items():
        for rank, rows in enumerate(ranks):
            for kind, row in rows.items():
                if row["state"] != rows["plain"]["state"] or row["weights"] != ranks[0]["plain"]["weights"]:
                    wrong.append(f"{name}, rank {rank}, {kind}: not the bits of the unmodified run")
                if kind not in hosts_rank.PLANNED:
                    continue
                if not row.get("rebuilt_ops") or row["measured_nbytes"] > row["budget_nbytes"]:
                    wrong.append(f"{name}, rank {rank}, {kind}: not within a plan")
                elif abs(row["measured_nbytes"] - row["predicted_nbytes"]) > 0.01 * row["predicted_nbytes"]:
                    wrong.append(f"{name}, rank {rank}, {kind}: not as predicted")
    for name, outcome in results["faults"].items():
        fault = FAULTS[name]
        for rank in fault.survivors:
            end = outcome["ranks"].get(str(rank))
            if end is None or not fault.names_victim(end["error"]):
                wrong.append(f"killed {name}: rank {rank} does not name rank {fault.victim}: {end}")
            elif end["seconds"] > BOUND_SECONDS:
                wrong.append(f"killed {name}: rank {rank} took {end['seconds']} s")
        if outcome["all_ended_seconds"] is None or outcome["all_ended_seconds"] > BOUND_SECONDS:
            wrong.append(f"killed {name}: processes ended after {outcome['all_ended_seconds']} s")
        if outcome["left"]["processes"] or outcome["left"]["files"]:
            wrong.append(f"killed {name}: left behind: {outcome['left']}")
    return wrong


def table(results: dict[str, Any]) -> str:
    """Two tables as Markdown: a row for each case, and one for each fault; of the ranks, the largest."""
    head = ("case", "unmodified", "smallest plan", "within a budget", "budget", "exact", "off, at most")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, ranks in results["cases"].items():

        def most(kind: str, field: str, ranks: list[Any] = ranks) -> str:
            values = [rows[kind][field] for rows in ranks if field in rows.get(kind, {})]
            return f"{max(values) / 2**20:.2f} MiB" if values else ""

        smallest = "min" if "min" in ranks[0] else "plain, then min"
        exact = all(row["state"] == rows["plain"]["state"] for rows in ranks for row in rows.values())
        planned = [row for rows in ranks for row in rows.values() if "predicted_nbytes" in row]
        off = max(abs(row["measured_nbytes"] - row["predicted_nbytes"]) / row["predicted_nbytes"] for row in planned)
        cells = [most(smallest, "unmodified_nbytes"), most(smallest, "measured_nbytes"), most("bytes", "measured_nbytes")]
        cells += [most("bytes", "budget_nbytes"), "yes" if exact else "NO", f"{100 * off:.2f} %"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| killed while | rank | error of the others | raised after | all ended after |", "|---|---|---|---|---|"]
    for name, outcome in results["faults"].items():
        errors = sorted({end["error"].partition(": ")[2].partition(". ")[0] for end in outcome["ranks"].values()})
        seconds = max((end["seconds"] for end in outcome["ranks"].values()), default=None)
        lines.append(f"| {name} | {outcome['victim']} | {'; '.join(errors)} | {seconds} s | {outcome['all_ended_seconds']} s |")
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        hosts_rank.main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="*", default=list(NAMES), choices=NAMES, help="default: all")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS), help="default: all; no name: none")
    parser.add_argument("--json", type=Path, help="write the results into this file; others stay as they are recorded")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(FILE.read_text())))
        return 0
    why = impossible()
    if why is not None:
        print(f"There are no two hosts: {why}", file=sys.stderr)
        return 1
    with Hosts() as hosts:
        ranks = trained(hosts, args.cases) if args.cases else []
        results = {
            "cases": {name: [results[name] for results in ranks] for name in args.cases},
            "faults": {name: killed(hosts, FAULTS[name]) for name in args.faults},
        }
    print(table(results))
    if args.json is not None:
        recorded = json.loads(args.json.read_text()) if args.json.exists() else {"cases": {}, "faults": {}}
        merged = {kind: recorded[kind] | results[kind] for kind in recorded}
        args.json.write_text(json.dumps(merged, indent=1) + "\n")
    wrong = faults_of(results)
    print("\n".join(wrong or ["no fault"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
