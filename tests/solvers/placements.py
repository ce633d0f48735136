"""Problems of placement, and CP-SAT's answer to them."""

from __future__ import annotations

import random

from ortools.sat.python import cp_model

from lightning_memopt.solvers.placement import Buffer


def full(seed: int, capacity: int, moments: int, dropped: float) -> list[Buffer]:
    """Full load at every moment (before some are dropped), with no thought of addresses: a placement may not exist."""
    rng = random.Random(seed)
    alive: list[tuple[int, int]] = []
    done: list[tuple[int, int, int]] = []
    for moment in range(moments + 1):
        going = alive if moment == moments else [b for b in alive if rng.random() < 0.4] or alive[:1]
        alive = [b for b in alive if b not in going]
        done += [(lower, moment, size) for lower, size in going]
        free = capacity - sum(size for _, size in alive)
        while free and moment < moments:
            size = rng.randint(1, free)
            alive.append((moment, size))
            free -= size
    return [Buffer(str(i), *row) for i, row in enumerate(done) if rng.random() >= dropped]


def by_cp_sat(buffers: list[Buffer], capacity: int) -> bool:
    """Whether there is a placement."""
    model = cp_model.CpModel()
    times, addresses = [], []
    for b in buffers:
        offset = model.new_int_var(0, capacity - b.size, "")
        times.append(model.new_fixed_size_interval_var(b.lower, b.upper - b.lower, ""))
        addresses.append(model.new_fixed_size_interval_var(offset, b.size, ""))
    model.add_no_overlap_2d(times, addresses)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE)
    return bool(status != cp_model.INFEASIBLE)
