"""What is measured of a planned step, and what is not part of it."""

from __future__ import annotations

import torch

from tests.cpu.lib.fits import COUNT, Task, fit, loader, memopt, session_of
from tests.cpu.lib.inside import state_of


class Wide(Task):
    """Its validation takes far more than a step of training."""

    def validation_step(self, batch: object, batch_idx: int, dataloader_idx: int = 0) -> None:
        torch.empty(1 << 24, dtype=torch.uint8).fill_(0)


def test_evaluation_between_accumulated_batches() -> None:
    """Validation in the middle of a step is not measured as part of it: else a plan that keeps its budget would be given up."""
    options = {"limit_train_batches": 4, "max_epochs": 4, "val_check_interval": 1, "limit_val_batches": 1}
    data = lambda: loader(shuffle=False, count=COUNT, size=COUNT // 4)  # noqa: E731
    found = state_of(session_of(fit(memopt(profile_steps=1), Wide, accumulate_grad_batches=2, data=data, **options)))
    assert found.measured_nbytes is not None
    assert found.measured_nbytes <= 1.05 * found.plan.predicted_peak_nbytes
