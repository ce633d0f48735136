"""Models that `memopt bench` knows by name: `transformers` configurations with random weights, small widths, no downloads.

Every builder takes `batch=`, the number of samples, and where texts are long, their lengths; defaults: the benchmarks' sizes.
`model(**batch).loss` is the training loss, `blocks(model)` the modules that per-block checkpointing would wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lightning_memopt.bench.subject import Training

Blocks = Callable[[Any], list[nn.Module]]
Built = tuple[nn.Module, dict[str, Tensor], Blocks]
"""A model, a batch, and the blocks of such a model."""

transformers.logging.set_verbosity_error()
configs: Any = transformers
"""Its configurations take keywords that their signatures do not name."""


def _words(batch: int, length: int, vocabulary: int = 1024) -> torch.Tensor:
    return torch.randint(2, vocabulary, (batch, length))


def gpt2(layers: int = 8, batch: int = 8, length: int = 256) -> Built:
    """GPT-2, 8 layers: batch 8, 256 tokens, width 256, dropout on."""
    config = configs.GPT2Config(
        n_layer=layers, n_embd=256, n_head=4, vocab_size=1024, n_positions=256, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    x = torch.randint(0, 1024, (batch, length))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": x, "labels": x}, lambda m: list(m.transformer.h)


def llama(layers: int = 8, batch: int = 8, length: int = 256) -> Built:
    """Llama, 8 layers: batch 8, 256 tokens, width 256, grouped-query attention, attention dropout on."""
    config = configs.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        use_cache=False,
        attention_dropout=0.1,
    )
    x = torch.randint(0, 1024, (batch, length))
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": x, "labels": x}, lambda m: list(m.model.layers)


def resnet50(batch: int = 32) -> Built:
    """ResNet-50, 1/8 width: bottleneck, 3-4-6-3, batch 32, 64 x 64 pixels."""
    config = configs.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=10
    )
    images = {"pixel_values": torch.randn(batch, 3, 64, 64), "labels": torch.randint(0, 10, (batch,))}
    model: Any = transformers.ResNetForImageClassification(config).train()
    return model, images, lambda m: [layer for stage in m.resnet.encoder.stages for layer in stage.layers]


def t5(batch: int = 8, source: int = 128, target: int = 96) -> Built:
    """T5, 4 + 4 layers: batch 8, 128 and 96 tokens, width 192, dropout on; all layers of a side share one position bias."""
    config = configs.T5Config(
        d_model=192,
        d_kv=48,
        d_ff=512,
        num_layers=4,
        num_heads=4,
        vocab_size=1024,
        dropout_rate=0.1,
        use_cache=False,
        decoder_start_token_id=0,
    )
    words = {"input_ids": _words(batch, source), "labels": _words(batch, target)}
    return transformers.T5ForConditionalGeneration(config).train(), words, lambda m: [*m.encoder.block, *m.decoder.block]


def bert(batch: int = 8, length: int = 160) -> Built:
    """BERT, 6 layers: masked words, batch 8, 160 tokens of which some are padding, width 192, dropout on."""
    config = configs.BertConfig(
        vocab_size=1024,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=768,
        max_position_embeddings=160,
    )
    x, seen = _words(batch, length), torch.ones(batch, length, dtype=torch.long)
    seen[::2, 120:] = 0
    words = {"input_ids": x, "attention_mask": seen, "labels": x}
    return transformers.BertForMaskedLM(config).train(), words, lambda m: list(m.bert.encoder.layer)


def vit(batch: int = 24) -> Built:
    """ViT, 8 layers: batch 24, 64 x 64 pixels in patches of 8, width 192, dropout on."""
    config = configs.ViTConfig(
        hidden_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )
    images = {"pixel_values": torch.randn(batch, 3, 64, 64), "labels": torch.randint(0, 10, (batch,))}
    return transformers.ViTForImageClassification(config).train(), images, lambda m: list(m.vit.layers)


def whisper(batch: int = 8) -> Built:
    """Whisper, 4 + 4 layers: two convolutions in front, batch 8, 300 frames, 64 tokens, width 192, dropout on."""
    config = configs.WhisperConfig(
        vocab_size=1024,
        num_mel_bins=40,
        d_model=192,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=768,
        decoder_ffn_dim=768,
        max_source_positions=150,
        max_target_positions=64,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
        use_cache=False,
    )
    sounds = {"input_features": torch.randn(batch, 40, 300), "labels": _words(batch, 64)}
    model = transformers.WhisperForConditionalGeneration(config).train()
    return model, sounds, lambda m: [*m.model.encoder.layers, *m.model.decoder.layers]


def mixtral(batch: int = 8, length: int = 160) -> Built:
    """Mixtral, 4 layers of 4 experts: batch 8, 160 tokens, width 192; noise in the routing: sizes vary from step to step."""
    config = configs.MixtralConfig(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_dropout=0.1,
        router_jitter_noise=0.01,
        output_router_logits=True,
        use_cache=False,
        experts_implementation="eager",
    )
    x = _words(batch, length)
    return transformers.MixtralForCausalLM(config).train(), {"input_ids": x, "labels": x}, lambda m: list(m.model.layers)


MODELS: dict[str, Callable[..., Built]] = {
    "gpt2": gpt2,
    "llama": llama,
    "resnet50": resnet50,
    "t5": t5,
    "bert": bert,
    "vit": vit,
    "whisper": whisper,
    "mixtral": mixtral,
}


def training(built: Built, device: torch.device) -> Training:
    """The training of a built model with AdamW on this device."""
    model, batch, blocks = built
    model.to(device)
    batch = {name: value.to(device) for name, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step, blocks)
