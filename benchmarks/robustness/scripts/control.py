"""Agents in a small world: a cart that is pushed along a line, in numpy."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from benchmarks.robustness.scripts.registry import Log, Watch, rows, script, update


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


class Agent(nn.Module):
    """A trunk that actor and critic share; nothing defines `forward`."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, 3), nn.Linear(width, 1)

    def value(self, x: Tensor) -> Tensor:
        return self.critic(self.trunk(x))

    def act(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = self.trunk(x)
        chances = Categorical(logits=self.actor(hidden))
        if action is None:
            action = chances.sample()
        return action, chances.log_prob(action), chances.entropy(), self.critic(hidden)


@script("Proximal policy optimization: an agent of methods alone, moves without gradients, epochs of minibatches", steps=24)
def policy_methods(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3, eps=1e-5)
    with watch(agent, optimizer):
        done = 0
        for x in rows(steps // 4, 128, 8):
            with torch.no_grad():
                action, before, _, value = agent.act(x)
                after = agent.value(x.roll(1, 0))
            reward = (x.sum(1) * (action - 1)).sign()
            returns = reward + 0.9 * after.flatten()
            gain = returns - value.flatten()
            for _ in range(2):
                for part in torch.randperm(len(x)).split(64):
                    _, chance, entropy, now = agent.act(x[part], action[part])
                    ratio = (chance - before[part]).exp()
                    with torch.no_grad():
                        divergence = ((ratio - 1) - (chance - before[part])).mean()
                    wanted = (gain[part] - gain[part].mean()) / (gain[part].std() + 1e-8)
                    loss = torch.max(-wanted * ratio, -wanted * ratio.clamp(0.8, 1.2)).mean()
                    loss = loss - 0.01 * entropy.mean() + 0.5 * (now.flatten() - returns[part]).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
                    log(loss.item(), divergence.item())
                    done += 1
    assert done == steps
    return {"agent": agent, "adam": optimizer}


class SoftAgent(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2 * 2))
        self.critic = nn.Sequential(nn.Linear(8 + 2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.target = copy.deepcopy(self.critic).requires_grad_(False)

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = self.actor(x).chunk(2, dim=-1)
        chances = Normal(mean, deviation.clamp(-5, 1).exp())
        action = chances.rsample()
        return action.tanh(), (chances.log_prob(action) - (1 - action.tanh().square() + 1e-6).log()).sum(-1)


@script("Soft actor-critic in one module: two optimizers in turn, moves with gradients that nobody asks for", steps=16)
def soft_actor_critic(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    agent = SoftAgent()
    of_actor = torch.optim.Adam(agent.actor.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(agent.critic.parameters(), lr=1e-3)
    with watch(agent, [of_actor, of_critic]):
        for x in rows(steps, 256, 8):
            for move in x[:3]:
                action, _ = agent.act(move[None])
                action.detach().numpy()
            with torch.no_grad():
                action, chance = agent.act(x.roll(1, 0))
                wanted = x.sum(1) + 0.9 * (agent.target(torch.cat([x, action], 1)).flatten() - 0.1 * chance)
            loss = F.mse_loss(agent.critic(torch.cat([x, x[:, :2].tanh()], 1)).flatten(), wanted)
            update(of_critic, loss)
            action, chance = agent.act(x)
            other = (0.1 * chance - agent.critic(torch.cat([x, action], 1)).flatten()).mean()
            update(of_actor, other)
            with torch.no_grad():
                for p, target in zip(agent.critic.parameters(), agent.target.parameters(), strict=True):
                    target.lerp_(p, 0.05)
            log(loss.item(), other.item())
    return {"agent": agent, "actor": of_actor, "critic": of_critic}
