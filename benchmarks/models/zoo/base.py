"""How tiny configurations and their batches are made, and `add`, which enters an architecture.

A configuration is the class's own with its sizes made small and every dropout on; what else differs is written where the
architecture is entered. Batches are as small as lets activations be most of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()

Batch = dict[str, Any]
WORDS, LABELS = 128, 10

_SIZES: list[tuple[int, str]] = [
    (0, "pad_token_id"),
    (1, "bos_token_id decoder_start_token_id"),
    (2, "eos_token_id sep_token_id type_vocab_size num_experts_per_tok num_key_value_heads num_kv_heads"),
    (2, "encoder_layers decoder_layers num_encoder_layers num_decoder_layers"),
    (2, "decoder_num_hidden_layers encoder_num_hidden_layers"),
    (3, "num_hidden_layers n_layer n_layers num_layers"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads"),
    (4, "num_encoder_attention_heads num_decoder_attention_heads decoder_num_attention_heads encoder_num_attention_heads"),
    (4, "num_experts num_local_experts"),
    (8, "patch_size"),
    (16, "d_kv d_head head_dim num_conv_pos_embeddings"),
    (64, "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size projection_dim image_size decoder_hidden_size"),
    (64, "word_embed_proj_dim moe_intermediate_size shared_expert_intermediate_size"),
    (128, "intermediate_size d_ff ffn_dim d_inner n_inner dff encoder_ffn_dim decoder_ffn_dim decoder_intermediate_size"),
    (128, "ffn_hidden_size hidden_dim vocab_size"),
    (256, "max_position_embeddings n_positions n_ctx context_length max_seq_len"),
]
_TINY = {name: size for size, names in _SIZES for name in names.split()}
_AS_THEY_ARE = ("layerdrop", "layer_drop", "drop_path", "droppath")


def tiny(config: str | type, **own: Any) -> Any:
    """The configuration with small sizes, and every dropout that is a number at a tenth; `own` wins.

    Sub-configurations are made small as well; what is their own is given as a dict under their name.
    """
    cls = getattr(transformers, config) if isinstance(config, str) else config
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        number = isinstance(f.default, (int, float)) and not isinstance(f.default, bool)
        if f.name in _TINY and (number or (f.default is None and f.name.endswith("token_id"))):
            values[f.name] = _TINY[f.name]
        elif number and "drop" in f.name and not any(kept in f.name for kept in _AS_THEY_ARE):
            values[f.name] = 0.1
    for name, sub in (cls.sub_configs or {}).items():
        if sub is not transformers.AutoConfig and (name not in own or isinstance(own[name], dict)):
            own = {**own, name: tiny(sub, **own.get(name, {}))}
    return cls(**values | own)


@dataclass(frozen=True)
class Architecture:
    """`model`: a class of transformers. `own`: what its configuration has of its own. `batch`: the inputs it is trained on."""

    model: str
    family: str
    own: Callable[[], dict[str, Any]]
    batch: Callable[[Any], Batch]
    adaptive: bool
    loss: Callable[[Any], Tensor]

    def build(self) -> tuple[nn.Module, Batch]:
        cls = getattr(transformers, self.model)
        config = tiny(cls.config_class, **self.own())
        model = cls(config).train()
        return model, self.batch(config)


def loss_of(output: Any) -> Tensor:
    """The model's own loss, or the mean square of the first thing it returns."""
    loss = getattr(output, "loss", None)
    return output[0].float().square().mean() if loss is None else loss


ZOO: dict[str, Architecture] = {}


def add(family: str, name: str, model: str, batch: Callable[[Any], Batch], own: Any = None, **more: Any) -> None:
    loss = more.pop("loss", loss_of)
    given = own if callable(own) else lambda: {**(own or {}), **more}
    ZOO[name] = Architecture(model, family, given, batch, len(ZOO) % 2 == 0, loss)


# -- batches ------------------------------------------------------------------------------------------------


def ids(*shape: int, high: int = WORDS) -> Tensor:
    return torch.randint(3, high, shape)


def text(size: int = 4, length: int = 96, labels: str = "words", **more: Any) -> Callable[[Any], Batch]:
    """Token ids, an attention mask that ends half of the rows early, and labels: for each word, each row, or a span."""

    def batch(config: Any) -> Batch:
        x = ids(size, length)
        mask = torch.ones(size, length, dtype=torch.long)
        mask[::2, -length // 8 :] = 0
        found: Batch = {"input_ids": x, "attention_mask": mask}
        if labels == "words":
            found["labels"] = x.masked_fill(mask == 0, -100)
        elif labels == "row":
            found["labels"] = classes(size, 0)
        elif labels == "span":
            found |= {"start_positions": torch.randint(0, 9, (size,)), "end_positions": torch.randint(9, 60, (size,))}
        return found | {k: v(config) if callable(v) else v for k, v in more.items()}

    return batch


def unmasked(size: int = 4, length: int = 96) -> Callable[[Any], Batch]:
    def batch(config: Any) -> Batch:
        x = ids(size, length)
        return {"input_ids": x, "labels": x}

    return batch


def translation(size: int = 4, source: int = 96, target: int = 64) -> Callable[[Any], Batch]:
    def batch(config: Any) -> Batch:
        mask = torch.ones(size, source, dtype=torch.long)
        mask[::2, -source // 8 :] = 0
        return {"input_ids": ids(size, source), "attention_mask": mask, "labels": ids(size, target)}

    return batch


def pixels(size: int = 8, side: int = 64, labels: Callable[[int, int], Any] | None = None) -> Callable[[Any], Batch]:
    def batch(config: Any) -> Batch:
        found: Batch = {"pixel_values": torch.randn(size, 3, side, side)}
        return found | ({} if labels is None else {"labels": labels(size, side)})

    return batch


def classes(size: int, side: int) -> Tensor:
    return torch.randint(0, 2, (size,))


def maps(size: int, side: int) -> Tensor:
    return torch.randint(0, LABELS, (size, side, side))


def depths(size: int, side: int) -> Tensor:
    return torch.rand(size, side, side) + 0.1


def boxes(size: int, side: int) -> list[dict[str, Tensor]]:
    return [
        {"class_labels": torch.randint(0, LABELS, (n,)), "boxes": torch.rand(n, 4) * 0.4 + 0.1}
        for n in (i % 3 + 1 for i in range(size))
    ]


def sound(size: int = 4, samples: int = 8000, labels: bool = True) -> Callable[[Any], Batch]:
    def batch(config: Any) -> Batch:
        found: Batch = {"input_values": torch.randn(size, samples)}
        return found | ({"labels": ids(size, 6, high=30)} if labels else {})

    return batch


def pairs(size: int = 8, length: int = 32, side: int = 64, **more: Any) -> Callable[[Any], Batch]:
    """Images with texts."""

    def batch(config: Any) -> Batch:
        found: Batch = {"input_ids": ids(size, length), "pixel_values": torch.randn(size, 3, side, side)}
        found["attention_mask"] = torch.ones(size, length, dtype=torch.long)
        return found | {k: v(config) if callable(v) else v for k, v in more.items()}

    return batch


def series(lags: int = 7) -> Callable[[Any], Batch]:
    def batch(config: Any) -> Batch:
        past = config.context_length + max(config.lags_sequence)
        time = lambda n: torch.randn(32, n, 1)  # noqa: E731
        return {
            "past_values": torch.randn(32, past), "past_time_features": time(past),
            "past_observed_mask": torch.ones(32, past), "future_values": torch.randn(32, config.prediction_length),
            "future_time_features": time(config.prediction_length),
        }  # fmt: skip

    return batch
