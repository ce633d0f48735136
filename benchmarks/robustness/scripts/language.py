"""Transformers that predict words."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.robustness.scripts.registry import Log, Watch, script, tokens

WORDS, LENGTH, SIZE, WIDTH = 40, 16, 8, 32


class Attention(nn.Module):
    def __init__(self, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in self.into(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, t, WIDTH))


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        wide = 4 * WIDTH
        self.inner = inner or nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.inner(self.norm2(x))


class Gpt(nn.Module):
    """Gives logits, and the loss where there are targets."""

    def __init__(self, *inner: nn.Module | None) -> None:
        super().__init__()
        self.words, self.places, self.drop = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH), nn.Dropout(0.1)
        self.blocks, self.norm = nn.ModuleList(Block(part) for part in inner), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.drop(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Encoder(nn.Module):
    """torch's own encoder layers with a causal mask and sines for places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.2)
        angles = torch.arange(LENGTH)[:, None] * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH))
        self.register_buffer("places", torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, None])
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.2)
        self.encoder, self.decoder = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.full((len(ids), len(ids)), -math.inf).triu(1)
        x = self.drop(self.embed(ids) * math.sqrt(WIDTH) + self.places[: len(ids)])
        return F.log_softmax(self.decoder(self.encoder(x, mask=mask)), dim=-1)


@script("Word language model: torch's TransformerEncoder, clipping")
def words_transformer(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with watch(model, optimizer):
        for batch in tokens(steps, (LENGTH + 1, SIZE)):
            optimizer.zero_grad()
            output = model(batch[:-1]).view(-1, WORDS)
            loss = F.nll_loss(output, batch[1:].reshape(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            log(loss.item())
    return {"model": model, "sgd": optimizer}


@script("GPT in bf16: accumulation over three batches, decay groups, clipping, a warm-up")
def gpt_bf16(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Gpt(None, None, None)
    large, small = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    data = tokens(3 * steps, (SIZE, LENGTH + 1))
    with watch(model, optimizer):
        for i in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, (i + 1) / 5)
            for _ in range(3):
                batch = next(data)
                with torch.autocast("cpu", torch.bfloat16):
                    _logits, loss = model(batch[:, :-1], batch[:, 1:])
                    loss = loss / 3
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            log(3 * loss.item())
    return {"model": model, "adamw": optimizer}


class Low(nn.Module):
    """A frozen linear layer, and what is learned beside it: a product of two narrow matrices."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up, self.drop = nn.Parameter(torch.zeros(base.out_features, rank)), nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.drop(x) @ self.down.T @ self.up.T


@script("LoRA written by hand: the rest of a GPT is frozen")
def lora(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Gpt(None, None).requires_grad_(False)
    for block in model.blocks:
        block.attention.into = Low(block.attention.into)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with watch(model, optimizer):
        for batch in tokens(steps, (SIZE, LENGTH + 1)):
            _, loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
    return {"model": model, "adamw": optimizer}


@script("LoRA by `peft` on a Llama of transformers", needs=("peft", "transformers.models.llama.modeling_llama"))
def lora_peft(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=WORDS)
    base = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    with watch(model, optimizer):
        for batch in tokens(steps, (SIZE, LENGTH)):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
    return {"model": model, "adamw": optimizer}


class Experts(nn.Module):
    """Each word goes to the two experts that its gate likes best."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            at, which = (chosen == i).nonzero(as_tuple=True)
            if len(at):
                y = y.index_add(0, at, weights[at, which, None] * expert(flat[at]))
        return y.view_as(x)


@script("Mixture of experts: as many words for an expert as there happen to be")
def experts(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Gpt(Experts(), Experts())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for batch in tokens(steps, (SIZE, LENGTH + 1)):
            optimizer.zero_grad()
            _, loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "adam": optimizer}


@script("GPT in fp16-like scaling: a GradScaler, batches of a growing length, evaluation")
def gpt_scaled(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Gpt(None, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    lengths = [8] * (steps // 2) + [LENGTH] * (steps - steps // 2)
    with watch(model, optimizer):
        for length, batch in zip(lengths, tokens(steps, (SIZE, LENGTH + 1)), strict=True):
            with torch.autocast("cpu", torch.bfloat16) if length == LENGTH else contextlib.nullcontext():
                _, loss = model(batch[:, :length], batch[:, 1 : length + 1])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            log(loss.item(), scaler.get_scale())
    return {"model": model, "adamw": optimizer}
