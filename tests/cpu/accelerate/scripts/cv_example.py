"""Images, in the style of Accelerate's `cv_example.py`: a frozen stem, batch norm, OneCycleLR, accuracy after each epoch."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, finish
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset


class Pets(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(index))
        return {"image": image, "label": torch.tensor(index % 4)}


def resnet() -> nn.Module:
    block = lambda: (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))  # noqa: E731
    return nn.Sequential(nn.Conv2d(3, 8, 3), *block(), *block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(42)
    train_dataloader = DataLoader(Pets(72), shuffle=True, batch_size=8)
    eval_dataloader = DataLoader(Pets(20), shuffle=False, batch_size=8)
    model = resnet().to(accelerator.device)
    for param in model[0].parameters():
        param.requires_grad = False
    mean = torch.tensor([0.1, 0.0, -0.1])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=3e-2 / 25)
    schedule = OneCycleLR(optimizer=optimizer, max_lr=3e-2, epochs=2, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, schedule = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, schedule
    )
    history = []
    for _ in range(2):
        model.train()
        for batch in train_dataloader:
            outputs = model(batch["image"] - mean)
            loss = nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            history.append(loss.item())
        model.eval()
        accurate = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(batch["image"] - mean)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            accurate += (predictions == references).long().sum().item()
        history.append(accurate)
    finish(args, accelerator, model, optimizer, history)


if __name__ == "__main__":
    main()
