"""In the style of the example `tracking` of Accelerate: losses are logged by a tracker, summed on the device over an epoch."""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from common import arguments, finish, loader, loss_of, network


class Lines(GeneralTracker):
    """A tracker that keeps what it is given."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[object] = []

    @property
    def tracker(self) -> list[object]:
        return self.lines

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        self.lines.append(values)

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None) -> None:
        self.lines.append((step, values))


def main() -> None:
    args = arguments()
    lines = Lines()
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(mixed_precision=args.mixed_precision, log_with=lines, project_dir=folder)
        accelerator.init_trackers("training", {"lr": 1e-2})
        set_seed(42)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer, data = accelerator.prepare(model, optimizer, loader(80, 8))
        history = []
        for epoch in range(2):
            total = 0
            for batch in data:
                loss = loss_of(model, batch)
                total += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            history.append(total.item() / len(data))
            accelerator.log({"train_loss": history[-1]}, step=epoch)
        finish(args, accelerator, model, optimizer, history, len(lines.lines) if accelerator.is_main_process else 0)
        accelerator.end_training()


if __name__ == "__main__":
    main()
