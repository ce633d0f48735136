"""A plan that one run saves is made smaller without the model, and another run starts with it."""

from __future__ import annotations

import torch

from lightning_memopt import cli, optimize

from .plain_loop import batches, build, step


def train(steps: int, budget: str, plan: str | None = None) -> None:
    """Train within a budget, print the run's table, and write the plan that was in force."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    with optimize(model, optimizer, budget=budget, plan=plan, verbose=False) as run:
        for batch in batches(steps):
            step(model, optimizer, batch)
    print(run.report())
    run.save_plan("plan.json")


if __name__ == "__main__":
    train(5, "10MiB")
    cli.main(["plan", "plan.json", "--budget", "8MiB", "-o", "smaller.json"])
    train(3, "8MiB", "smaller.json")  # in force from the first step
