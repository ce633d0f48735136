"""What `memopt fit` predicts of unmodified steps beside what torch's allocator gives out, on the emulated device in bytes mode.

Usage: python -m tests.emulated.fitted [MODEL ...]

The prediction is of a step that is recorded on the CPU without being computed, with the workspaces of cuBLAS that a card of its
capability has. Measured is the fourth step on an emulated card of 400 GiB: torch's own CUDA build, operators and caching
allocator, and no GPU. Each model is a process of its own.

All values on the emulated device are zero, so transformers would find padding in each batch, and make a mask of it. Neither
the one nor the other has a mask.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch

from lightning_memopt.bench.subject import Training
from lightning_memopt.fitting.recording import record
from lightning_memopt.plan.allocator import Settings, reserved
from lightning_memopt.plan.rates import kind_of
from lightning_memopt.solvers.rollout import keep_all
from tests.emulated.llama import configs
from tests.emulated.real_size import CARDS, each_alone
from tests.emulated.reserved import BENCHMARKS, MIB, SLOW, WORKSPACE_NBYTES, Loss, Made, steady

CARD_NBYTES = 400 << 30
MASKED = ("llama", "qwen2", "gpt2", "mixtral", "vit", "bert", "t5", "whisper")
STEPS = 4
HEADER = (
    "| model | update | reserved: predicted | measured | error | allocated: predicted | measured | error |\n"
    "|---|---|---|---|---|---|---|---|"
)


def benchmark(name: str) -> Made:
    """A model of the benchmarks, in their sizes."""
    model, batch, _ = BENCHMARKS[name]()
    return Loss(model), lambda: batch


def qwen() -> Made:
    """A Qwen2 of 0.5 billion parameters with 151,936 words, bfloat16; 4 x 1,024 tokens."""
    import transformers

    config = configs.Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    words = torch.zeros(4, 1024, dtype=torch.long)
    return Loss(transformers.Qwen2ForCausalLM(config).bfloat16().train()), lambda: {"input_ids": words, "labels": words}


MODELS: dict[str, tuple[Callable[[], Made], str]] = {
    **{name: (partial(benchmark, name), "foreach") for name in BENCHMARKS if name not in SLOW},
    "qwen-0.5b": (qwen, "foreach"),
    **{name: (card.build, card.update) for name, card in CARDS.items() if card.tile == "off"},
}


def training(build: Callable[[], Made], update: str) -> Training:
    module, batch = build()
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True if update == "fused" else None)

    def step() -> None:
        module(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(module, optimizer, step)


def on_card(build: Callable[[], Made], update: str) -> Training:
    with torch.device("cuda"):
        made = training(build, update)
    made.model.cuda()
    return made


def leave_masks_out() -> None:
    """From now on, transformers makes no masks."""
    for family in MASKED:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for made in ("create_causal_mask", "create_sliding_window_causal_mask", "create_bidirectional_mask"):
            if hasattr(module, made):
                setattr(module, made, lambda *args, **kwargs: None)


def measure(name: str) -> None:
    """Print the row of one model."""
    leave_masks_out()
    build, update = MODELS[name]
    graph = record(partial(training, build, update), cuda=True).graph
    predicted = reserved(graph, keep_all(graph), Settings())
    measured = steady(on_card(build, update).step, STEPS)
    cells = [name, update]
    for ours, theirs in zip((predicted.peak_nbytes, predicted.allocated_nbytes), measured, strict=True):
        ours += WORKSPACE_NBYTES * any(kind_of(op.name) == "matmul" for op in graph.ops)
        cells += [f"{ours / MIB:.1f}", f"{theirs / MIB:.1f}", f"{100 * (ours / theirs - 1):+.2f} %"]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    what = "MiB; torch's own allocator on an emulated device, not on a GPU"
    each_alone(__doc__, __spec__.name, dict.fromkeys(MODELS, CARD_NBYTES), measure, f"{what}\n{HEADER}")


if __name__ == "__main__":
    main()
