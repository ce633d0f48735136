"""What is measured of a planned step, and what is not part of it."""

from __future__ import annotations

import torch

from lightning_memopt.native import counter
from lightning_memopt.session.measure.peak_meter import Metering, spoil_open_meters
from tests.cpu.lib.engines import needs_native
from tests.cpu.lib.fits import COUNT, Task, fit, loader, memopt, session_of
from tests.cpu.lib.inside import state_of


class Wide(Task):
    """A model whose validation takes far more memory than a training step."""

    def validation_step(self, batch: object, batch_idx: int, dataloader_idx: int = 0) -> None:
        torch.empty(1 << 24, dtype=torch.uint8).fill_(0)


def test_evaluation_between_accumulated_batches() -> None:
    """Validation in the middle of a step is not measured as part of it: else a plan that keeps its budget would be given up. It
    is measured as what it is.
    """
    options = {"limit_train_batches": 4, "max_epochs": 4, "val_check_interval": 1, "limit_val_batches": 1}
    data = lambda: loader(shuffle=False, count=COUNT, size=COUNT // 4)  # noqa: E731
    session = session_of(fit(memopt(profile_steps=1), Wide, accumulate_grad_batches=2, data=data, **options))
    found, measured = state_of(session), session.status().measured_peak_nbytes
    assert counter() is None or (measured is not None and measured >= 1 << 24)
    assert found.peaks.measured_nbytes is not None
    assert found.peaks.measured_nbytes <= 1.05 * found.plan.predicted_peak_nbytes


@needs_native
def test_the_solve_of_another_session_is_in_no_step() -> None:
    """The step of a generator goes on around those of its discriminator, whose plan is made meanwhile, by probing a disk."""
    metering, others, cpu = Metering(), Metering(), torch.device("cpu")
    for _ in range(2):
        metering.begin(torch.nn.Linear(2, 2), [], torch.ones(2), cpu, wanted=True)
        torch.empty(1 << 24)
        spoil_open_meters()
        metering.begin(torch.nn.Linear(2, 2), [], torch.ones(2), cpu, wanted=True)  # the second forward of this step
        assert metering.close() is None
    metering.begin(torch.nn.Linear(2, 2), [], torch.ones(2), cpu, wanted=True)
    assert metering.close() is not None
    assert others.close() is None
