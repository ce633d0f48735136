"""Agents in a small world: a cart that is pushed along a line, in numpy."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from benchmarks.robustness.scripts.registry import Log, Watch, script


class Cart:
    """State: place and speed. The episode ends when it has left the line, or after 20 pushes."""

    def reset(self) -> np.ndarray:
        self.at = np.random.uniform(-0.1, 0.1, 2).astype(np.float32)
        self.pushes = 0
        return self.at.copy()

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        self.at[1] += 0.2 * (2 * action - 1) + np.float32(np.random.normal(0, 0.02))
        self.at[0] += self.at[1]
        self.pushes += 1
        return self.at.copy(), 1.0, bool(abs(self.at[0]) > 1.5 or self.pushes == 20)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(2, 64), nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.body(x))
        return F.softmax(self.actor(h), dim=-1), self.critic(h)


@script("Actor-critic: one forward a move, one backward an episode, episodes of any length", steps=20)
def actor_critic(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model, world = Policy(), Cart()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    running = 10.0
    with watch(model, optimizer):
        for _ in range(steps):
            state, done = world.reset(), False
            moves: list[tuple[Tensor, Tensor]] = []
            rewards: list[float] = []
            while not done:
                chances, value = model(torch.from_numpy(state))
                choice = Categorical(chances)
                action = choice.sample()
                moves.append((choice.log_prob(action), value))
                state, reward, done = world.step(action.item())
                rewards.append(reward)
            running = 0.05 * sum(rewards) + 0.95 * running
            total, returns = 0.0, []
            for reward in reversed(rewards):
                total = reward + 0.99 * total
                returns.insert(0, total)
            wanted = torch.tensor(returns)
            wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-6)
            actor = [-log_chance * (target - value.item()) for (log_chance, value), target in zip(moves, wanted, strict=True)]
            critic = [F.smooth_l1_loss(value, target[None]) for (_, value), target in zip(moves, wanted, strict=True)]
            optimizer.zero_grad()
            loss = torch.stack(actor).sum() + torch.stack(critic).sum()
            loss.backward()
            optimizer.step()
            log(loss.item(), running)
    return {"model": model, "adam": optimizer}


@script("Deep Q-learning: a replay memory, a target network that is copied now and then", steps=24)
def dqn(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    world = Cart()
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    memory: deque[tuple[np.ndarray, int, float, np.ndarray, bool]] = deque(maxlen=500)
    state = world.reset()
    with watch(model, optimizer):
        for i in range(steps):
            for _ in range(16):
                if random.random() < 0.3:
                    action = random.randrange(2)
                else:
                    with torch.no_grad():
                        action = int(model(torch.from_numpy(state)[None]).argmax())
                after, reward, done = world.step(action)
                memory.append((state, action, reward, after, done))
                state = world.reset() if done else after
            before, actions, rewards, afters, ends = zip(*random.choices(memory, k=128), strict=True)
            values = model(torch.from_numpy(np.stack(before))).gather(1, torch.tensor(actions)[:, None])[:, 0]
            with torch.no_grad():
                best = target(torch.from_numpy(np.stack(afters))).max(1).values
            wanted = torch.tensor(rewards) + 0.95 * best * ~torch.tensor(ends)
            loss = F.smooth_l1_loss(values, wanted)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 100)
            optimizer.step()
            if i % 6 == 5:
                target.load_state_dict(model.state_dict())
            log(loss.item())
    return {"model": model, "target": target, "adamw": optimizer}
