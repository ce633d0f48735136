"""AdamW with float32 state for weights of any type, as trainings in bfloat16 use it. Torch has state in the weights' type."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, optim

STATE = "exp_avg", "exp_avg_sq"


class Float32AdamW(optim.Optimizer):
    """Each gradient is cast to float32 for its own update alone. The weight is rounded to its type twice: after its decay, and
    after the step.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update(p, p.grad, self.state[p], **{k: v for k, v in group.items() if k in self.defaults})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch casts all state but `step` to the type of its weight, which rounds it here, and has no option for it. So the
        moments are taken from the checkpoint again. What pre-hooks make of the checkpoint does not reach them.
        """
        super().load_state_dict(state_dict)
        saved = [id for group in state_dict["param_groups"] for id in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for id, p in zip(saved, own, strict=True):
            for name in STATE if id in state_dict["state"] else ():
                self.state[p][name] = state_dict["state"][id][name].to(p.device, torch.float32, copy=True)


def update(
    p: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    **of_torch: Any,
) -> None:
    """One parameter. `of_torch`: defaults that torch adds to every optimizer."""
    if not state:
        state["step"] = 0
        for name in STATE:
            state[name] = torch.zeros_like(p, dtype=torch.float32)
    state["step"] += 1
    mean, square = (state[name] for name in STATE)
    gradient = gradient.float()
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    del gradient  # of as many bytes as each of the moments
    scale = square.sqrt().div_(math.sqrt(1 - betas[1] ** state["step"])).add_(eps)
    p.mul_(1 - lr * weight_decay)
    p.addcdiv_(mean, scale, value=-lr / (1 - betas[0] ** state["step"]))
