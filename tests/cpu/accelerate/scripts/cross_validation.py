"""In the style of the example `cross_validation` of Accelerate: a model for each fold; the model is freed before the next."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, finish, loader, loss_of, network

FOLDS = 3


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(42)
    history, predictions = [], []
    for fold in range(FOLDS):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 8)
        data, test = loader(80 + 8 * fold, 8), loader(40, 16, shuffle=False)
        model, optimizer, data, test, schedule = accelerator.prepare(model, optimizer, data, test, schedule)
        model.train()
        for i, batch in enumerate(data):
            loss = loss_of(model, batch) / 2
            accelerator.backward(loss)
            if i % 2 == 0:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            history.append(loss.item())
        model.eval()
        parts = []
        for x, y in test:
            with torch.no_grad():
                logits = model(x).mean(1)
            parts.append(accelerator.gather_for_metrics((logits, y))[0].cpu())
        predictions.append(torch.cat(parts))
        if fold == FOLDS - 1:
            finish(args, accelerator, model, optimizer, history, torch.stack(predictions).sum(0))
        model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()
