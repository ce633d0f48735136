"""Networks on graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.robustness.scripts.registry import Log, Watch, script

NODES, FEATURES, CLASSES = 240, 32, 5


def _graph() -> tuple[Tensor, Tensor, Tensor]:
    """Features (nodes, features), labels, and edges (2, count) with a loop at every node."""
    source = torch.Generator().manual_seed(21)
    edges = torch.randint(0, NODES, (2, 6 * NODES), generator=source)
    loops = torch.arange(NODES).expand(2, -1)
    features = torch.rand(NODES, FEATURES, generator=source)
    return features, torch.randint(0, CLASSES, (NODES,), generator=source), torch.cat((edges, edges.flip(0), loops), 1)


class Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, x @ self.weight) + self.bias


class Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Convolution(FEATURES, 24), Convolution(24, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.one(x, adjacency)), 0.5, training=self.training)
        return F.log_softmax(self.two(x, adjacency), dim=1)


@script("Graph convolutions on a sparse adjacency (COO), the whole graph in every step", steps=16)
def gcn(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    features, labels, edges = _graph()
    degree = torch.zeros(NODES).index_add_(0, edges[0], torch.ones(edges.shape[1]))
    weights = (degree[edges[0]] * degree[edges[1]]).rsqrt()
    adjacency = torch.sparse_coo_tensor(edges, weights, (NODES, NODES)).coalesce()
    model = Gcn()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    train, held = torch.arange(160), torch.arange(160, NODES)
    with watch(model, optimizer):
        for _ in range(steps):
            model.train()
            optimizer.zero_grad()
            output = model(features, adjacency)
            loss = F.nll_loss(output[train], labels[train])
            loss.backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                right = (model(features, adjacency)[held].argmax(1) == labels[held]).sum()
            log(loss.item(), right.item())
    return {"model": model, "adam": optimizer}


class Attending(nn.Module):
    """Every node weighs its neighbours: a softmax over the edges that end at it."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads, self.project = heads, nn.Linear(inputs, heads * outputs, bias=False)
        self.near, self.own = nn.Parameter(0.1 * torch.randn(heads, outputs)), nn.Parameter(0.1 * torch.randn(heads, outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.project(x).view(len(x), self.heads, -1)
        near, at = edges
        score = F.leaky_relu((h * self.near).sum(-1)[near] + (h * self.own).sum(-1)[at], 0.2)
        score = (score - score.max()).exp()
        total = torch.zeros(len(x), self.heads).index_add(0, at, score)
        share = F.dropout(score / (total[at] + 1e-16), 0.3, self.training)
        return torch.zeros_like(h).index_add(0, at, share[..., None] * h[near]).flatten(1)


class Gat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Attending(FEATURES, 8, 4), Attending(32, CLASSES, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.elu(self.one(F.dropout(x, 0.3, self.training), edges))
        return F.log_softmax(self.two(x, edges), dim=-1)


@script("Graph attention over lists of edges")
def gat(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    features, labels, edges = _graph()
    model = Gat()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    with watch(model, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.nll_loss(model(features, edges), labels)
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "adam": optimizer}
