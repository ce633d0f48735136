"""Tiny configurations of `transformers` architectures, built from scratch with random weights: no downloads.

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
    (2, "encoder_layers decoder_layers num_encoder_layers num_decoder_layers decoder_num_hidden_layers encoder_num_hidden_layers"),
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
    """`model`: a class of transformers. `own`: what its configuration has of its own. `batch`: the inputs for a configuration."""

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


# -- encoders of text ----------------------------------------------------------------------------------------

for _name, _model in {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "mpnet": "MPNetForMaskedLM",
    "rembert": "RemBertForMaskedLM",
    "roformer": "RoFormerForMaskedLM",
    "megatron_bert": "MegatronBertForMaskedLM",
    "nomic_bert": "NomicBertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "eurobert": "EuroBertForMaskedLM",
    "fnet": "FNetForMaskedLM",
    "squeezebert": "SqueezeBertForMaskedLM",
    "ibert": "IBertForMaskedLM",
}.items():
    if _name != "fnet":
        add("encoder", _name, _model, text())
add("encoder", "fnet", "FNetForMaskedLM", unmasked())
add("encoder", "ibert_quantized", "IBertForMaskedLM", text(), quant_mode=True)
add("encoder", "albert", "AlbertForMaskedLM", text(), embedding_size=32)
add("encoder", "electra", "ElectraForMaskedLM", text(), embedding_size=32)
add("encoder", "deberta", "DebertaForMaskedLM", text(2), relative_attention=True, pos_att_type=["c2p", "p2c"])
add("encoder", "deberta_v2", "DebertaV2ForMaskedLM", text(2), relative_attention=True, pos_att_type=["c2p", "p2c"],
    position_buckets=32, conv_kernel_size=3)  # fmt: skip
add("encoder", "mobilebert", "MobileBertForMaskedLM", text(), embedding_size=64, intra_bottleneck_size=32, num_feedforward_networks=2)
add("encoder", "convbert", "ConvBertForMaskedLM", text())
add("encoder", "funnel", "FunnelForMaskedLM", text(2), block_sizes=[1, 2], num_decoder_layers=1, initializer_std=0.02)
add("encoder", "nystromformer", "NystromformerForMaskedLM", unmasked(2), num_landmarks=16, segment_means_seq_len=96, conv_kernel_size=9)
add("encoder", "yoso", "YosoForMaskedLM", text())
add("encoder", "big_bird", "BigBirdForMaskedLM", text(2, 256), block_size=16, num_random_blocks=2)
add("encoder", "longformer", "LongformerForMaskedLM", text(2, 256), attention_window=32, max_position_embeddings=300)
add("encoder", "canine", "CanineForSequenceClassification", text(4, 128, "row"), max_position_embeddings=256,
    local_transformer_stride=32)  # fmt: skip
add("encoder", "xlm", "XLMWithLMHeadModel", text(), emb_dim=64)
add("encoder", "flaubert_layerdrop", "FlaubertWithLMHeadModel", text(), layerdrop=0.2)
add("encoder", "xlnet", "XLNetLMHeadModel", text(2))
add("encoder", "esm", "EsmForMaskedLM", text(), vocab_size=WORDS, position_embedding_type="rotary", token_dropout=True, mask_token_id=4)
add("encoder", "perceiver", "PerceiverForMaskedLM", text(4, 64), num_latents=64, d_latents=64, num_self_attends_per_block=3,
    num_self_attention_heads=4, num_cross_attention_heads=4, max_position_embeddings=64, vocab_size=262)  # fmt: skip
add("encoder", "reformer", "ReformerModelWithLMHead", unmasked(4, 128), is_decoder=True, attention_head_size=16, feed_forward_size=128,
    attn_layers=["local", "lsh", "local", "lsh"], axial_pos_shape=[8, 16], axial_pos_embds_dim=[32, 32], num_buckets=4,
    local_attn_chunk_length=16, lsh_attn_chunk_length=16, use_cache=False)  # fmt: skip
add("encoder", "layoutlm", "LayoutLMForMaskedLM", text(bbox=lambda c: torch.arange(4).expand(4, 96, 4).clone()))
add("encoder", "lilt", "LiltForTokenClassification", text(labels="words", bbox=lambda c: torch.arange(4).expand(4, 96, 4).clone()),
    num_labels=WORDS, hidden_size=96, channel_shrink_ratio=2)  # fmt: skip
add("encoder", "splinter", "SplinterForQuestionAnswering", text(labels="span"), question_token_id=5)
add("encoder", "luke", "LukeForMaskedLM", text(entity_ids=ids(4, 4, high=20), entity_position_ids=ids(4, 4, 6, high=60)),
    entity_vocab_size=20, entity_emb_size=16)  # fmt: skip

# -- decoders --------------------------------------------------------------------------------------------------

for _name, _model in {
    "gpt2": "GPT2LMHeadModel",
    "gptj": "GPTJForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "openai_gpt": "OpenAIGPTLMHeadModel",
    "ctrl": "CTRLLMHeadModel",
    "codegen": "CodeGenForCausalLM",
    "bloom": "BloomForCausalLM",
    "biogpt": "BioGptForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "falcon": "FalconForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "cohere": "CohereForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "doge": "DogeForCausalLM",
}.items():
    if _name in ("gptj", "codegen"):
        add("decoder", _name, _model, text(), rotary_dim=8)
    else:
        add("decoder", _name, _model, text())
add("decoder", "mpt", "MptForCausalLM", text(), attn_config={"attn_pdrop": 0})
add("decoder", "nemotron", "NemotronForCausalLM", text(), num_key_value_heads=2)
add("decoder", "diffllama", "DiffLlamaForCausalLM", text(), attention_dropout=0.0)
add("decoder", "gpt_neo", "GPTNeoForCausalLM", text(), attention_types=[[["global", "local"], 2]], num_layers=4, window_size=32)
add("decoder", "opt_layerdrop", "OPTForCausalLM", text(), layerdrop=0.2)
add("decoder", "xglm", "XGLMForCausalLM", text())
add("decoder", "mistral", "MistralForCausalLM", text(), sliding_window=32)
add("decoder", "gemma2", "Gemma2ForCausalLM", text(), sliding_window=32)
add("decoder", "gemma3", "Gemma3ForCausalLM", text(), sliding_window=32)

# -- mixtures of experts, state spaces, recurrences ----------------------------------------------------------------

add("experts", "mixtral", "MixtralForCausalLM", text(), output_router_logits=True, router_jitter_noise=0.1)
add("experts", "qwen2_moe", "Qwen2MoeForCausalLM", text())
add("experts", "olmoe", "OlmoeForCausalLM", text())
add("experts", "granitemoe", "GraniteMoeForCausalLM", text())
add("experts", "jetmoe", "JetMoeForCausalLM", text(), kv_channels=16, num_key_value_heads=2)
add("experts", "deepseek_v3", "DeepseekV3ForCausalLM", text(), n_routed_experts=8, n_group=2, topk_group=1, kv_lora_rank=16,
    q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, num_key_value_heads=4, first_k_dense_replace=1)  # fmt: skip
add("experts", "gpt_oss", "GptOssForCausalLM", text(), sliding_window=32)
add("experts", "switch_transformers", "SwitchTransformersForConditionalGeneration", translation(), num_layers=2,
    num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=300, num_decoder_layers=2, decoder_start_token_id=0)  # fmt: skip
add("experts", "nllb_moe", "NllbMoeForConditionalGeneration", translation(), expert_capacity=300, encoder_sparse_step=2,
    decoder_sparse_step=2)  # fmt: skip
add("recurrent", "mamba", "MambaForCausalLM", unmasked(8, 16), num_hidden_layers=4, state_size=8)
add("recurrent", "mamba2", "Mamba2ForCausalLM", unmasked(4, 64), num_heads=8, head_dim=16, n_groups=2, state_size=8, chunk_size=16)
add("recurrent", "falcon_mamba", "FalconMambaForCausalLM", unmasked(8, 16), num_hidden_layers=4, state_size=8)
add("recurrent", "rwkv", "RwkvForCausalLM", unmasked(16, 32), num_hidden_layers=2, attention_hidden_size=64)
add("recurrent", "recurrent_gemma", "RecurrentGemmaForCausalLM", unmasked(8, 64), num_key_value_heads=2, lru_width=64,
    attention_window_size=32)  # fmt: skip
add("recurrent", "jamba", "JambaForCausalLM", unmasked(4, 32), attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4,
    mamba_d_state=8, use_mamba_kernels=False)  # fmt: skip
add("recurrent", "lfm2", "Lfm2ForCausalLM", text(), layer_types=["conv", "full_attention", "conv"])
add("recurrent", "qwen3_next", "Qwen3NextForCausalLM", unmasked(4, 64), num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16, linear_value_head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4)  # fmt: skip
add("recurrent", "minimax", "MiniMaxForCausalLM", text(2), block_size=32)

# -- sequence to sequence ----------------------------------------------------------------------------------------

for _name, _model in {
    "t5": "T5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "marian": "MarianMTModel",
    "m2m_100": "M2M100ForConditionalGeneration",
    "prophetnet": "ProphetNetForConditionalGeneration",
}.items():
    if _name == "bart":
        add("seq2seq", _name, _model, translation(), encoder_layerdrop=0.2, decoder_layerdrop=0.2)
    elif _name in ("t5", "umt5"):
        add("seq2seq", _name, _model, translation(), num_layers=2, decoder_start_token_id=0)
    else:
        add("seq2seq", _name, _model, translation())
add("seq2seq", "longt5", "LongT5ForConditionalGeneration", translation(4), num_layers=2, local_radius=15,
    encoder_attention_type="transient-global", decoder_start_token_id=0)  # fmt: skip
add("seq2seq", "led", "LEDForConditionalGeneration", translation(2, 256, 64), attention_window=32,
    max_encoder_position_embeddings=300, max_decoder_position_embeddings=128)  # fmt: skip
add("seq2seq", "pegasus_x", "PegasusXForConditionalGeneration", translation(4), num_global_tokens=16, block_size=32)
add("seq2seq", "bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", translation(2, 256, 64), block_size=16,
    num_random_blocks=2)  # fmt: skip

# -- sound ---------------------------------------------------------------------------------------------------------

_WAVES: dict[str, Any] = dict(
    conv_dim=(32, 32, 32), conv_stride=(5, 4, 4), conv_kernel=(10, 4, 4), num_conv_pos_embedding_groups=4, vocab_size=32,
    mask_time_length=4, mask_feature_length=4, mask_feature_prob=0.1,
)  # fmt: skip
_QUIET: dict[str, Any] = dict(layerdrop=0.0, apply_spec_augment=False)
add("sound", "wav2vec2", "Wav2Vec2ForCTC", sound(), **_WAVES | _QUIET)
add("sound", "wav2vec2_spec_augment", "Wav2Vec2ForCTC", sound(), **_WAVES, layerdrop=0.0)
add("sound", "hubert_layerdrop", "HubertForCTC", sound(), **_WAVES, layerdrop=0.2)
add("sound", "wavlm", "WavLMForCTC", sound(), **_WAVES, mask_feature_min_masks=0)
add("sound", "unispeech_sat", "UniSpeechSatForCTC", sound(), **_WAVES)
add("sound", "sew", "SEWForCTC", sound(), **_WAVES)
add("sound", "sew_d", "SEWDForCTC", sound(), **_WAVES, position_buckets=32)
add("sound", "wav2vec2_conformer", "Wav2Vec2ConformerForCTC", sound(), **_WAVES)
add("sound", "wav2vec2_bert", "Wav2Vec2BertForCTC",
    lambda c: {"input_features": torch.randn(4, 100, 16), "labels": ids(4, 6, high=30)}, feature_projection_input_dim=16,
    vocab_size=32, mask_time_length=4, layerdrop=0.0)  # fmt: skip
add("sound", "whisper", "WhisperForConditionalGeneration",
    lambda c: {"input_features": torch.randn(4, 16, 128), "labels": ids(4, 32)}, num_mel_bins=16, max_source_positions=64,
    max_target_positions=64, apply_spec_augment=True, mask_feature_prob=0.1)  # fmt: skip
add("sound", "speech_to_text", "Speech2TextForConditionalGeneration",
    lambda c: {"input_features": torch.randn(4, 256, 16), "labels": ids(4, 32)}, input_feat_per_channel=16, conv_channels=64)  # fmt: skip
add("sound", "audio_spectrogram_transformer", "ASTForAudioClassification",
    lambda c: {"input_values": torch.randn(8, 64, 32), "labels": classes(8, 0)}, max_length=64, num_mel_bins=32,
    frequency_stride=6, time_stride=6)  # fmt: skip
add("sound", "moonshine", "MoonshineForConditionalGeneration",
    lambda c: {"input_values": torch.randn(4, 16000), "labels": ids(4, 32)})  # fmt: skip

# -- vision --------------------------------------------------------------------------------------------------------

_images = pixels(labels=classes)
add("vision", "vit", "ViTForImageClassification", _images)
add("vision", "deit", "DeiTForImageClassification", _images)
add("vision", "beit", "BeitForImageClassification", _images, use_relative_position_bias=True)
add("vision", "dinov2", "Dinov2ForImageClassification", _images, drop_path_rate=0.1)
add("vision", "vit_mae", "ViTMAEForPreTraining", pixels())
add("vision", "swin", "SwinForImageClassification", pixels(2, labels=classes), patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
    window_size=4)  # fmt: skip
add("vision", "swinv2", "Swinv2ForImageClassification", pixels(2, labels=classes), patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
    window_size=4, pretrained_window_sizes=[0, 0])  # fmt: skip
add("vision", "convnext", "ConvNextForImageClassification", pixels(2, labels=classes), patch_size=2, hidden_sizes=[16, 32, 32, 64], depths=[2, 2, 2, 2],
    drop_path_rate=0.1)  # fmt: skip
add("vision", "convnextv2", "ConvNextV2ForImageClassification", pixels(2, labels=classes), patch_size=2, hidden_sizes=[16, 32, 32, 64],
    depths=[2, 2, 2, 2], drop_path_rate=0.1)  # fmt: skip
add("vision", "resnet", "ResNetForImageClassification", pixels(16, labels=classes), embedding_size=8, hidden_sizes=[16, 32, 64], depths=[3, 4, 3])
add("vision", "regnet", "RegNetForImageClassification", pixels(16, labels=classes), embedding_size=8, hidden_sizes=[16, 32, 64], depths=[3, 4, 3],
    groups_width=8)  # fmt: skip
add("vision", "bit", "BitForImageClassification", pixels(16, labels=classes), embedding_size=8, hidden_sizes=[16, 32, 64], depths=[3, 4, 3],
    num_groups=4, drop_path_rate=0.1)  # fmt: skip
add("vision", "mobilenet_v2", "MobileNetV2ForImageClassification", _images, depth_multiplier=0.35)
add("vision", "mobilevit", "MobileViTForImageClassification", _images, hidden_sizes=[16, 24, 32],
    neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32], patch_size=2, num_attention_heads=4)  # fmt: skip
add("vision", "efficientnet", "EfficientNetForImageClassification", _images, width_coefficient=0.3, depth_coefficient=0.5,
    hidden_dim=384)  # fmt: skip
add("vision", "poolformer", "PoolFormerForImageClassification", _images, hidden_sizes=[16, 32, 64, 64], depths=[2, 2, 2, 2],
    drop_path_rate=0.1, stride=2, patch_sizes=[3, 3, 3, 3], strides=[2, 2, 2, 2], padding=[1, 1, 1, 1])  # fmt: skip
add("vision", "pvt_v2", "PvtV2ForImageClassification", _images, hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 2, 4],
    drop_path_rate=0.1)  # fmt: skip
add("vision", "cvt", "CvtForImageClassification", _images, embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3])
add("vision", "levit", "LevitForImageClassification", pixels(8, 128, classes), image_size=128, patch_size=16, hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4],
    depths=[2, 2, 2], key_dim=[8, 8, 8])  # fmt: skip
add("vision", "focalnet", "FocalNetForImageClassification", pixels(2, labels=classes), patch_size=2, embed_dim=16, hidden_sizes=[32, 64], depths=[2, 2],
    focal_levels=[2, 2], focal_windows=[3, 3])  # fmt: skip
add("vision", "segformer", "SegformerForSemanticSegmentation", pixels(labels=maps), hidden_sizes=[16, 16, 32, 32],
    num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32, num_labels=LABELS)  # fmt: skip
add("vision", "upernet", "UperNetForSemanticSegmentation", pixels(labels=maps), lambda: dict(
    hidden_size=16, auxiliary_channels=16, auxiliary_in_channels=32, num_labels=LABELS,
    backbone_config=tiny("ConvNextConfig", hidden_sizes=[8, 16, 32, 32], depths=[1, 1, 2, 1],
                         out_features=["stage1", "stage2", "stage3", "stage4"])))  # fmt: skip
add("vision", "dpt", "DPTForSemanticSegmentation", pixels(4, labels=maps), num_labels=LABELS, num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[16, 16, 32, 32], fusion_hidden_size=16)  # fmt: skip
add("vision", "glpn", "GLPNForDepthEstimation", pixels(labels=depths), hidden_sizes=[16, 16, 32, 32],
    num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16)  # fmt: skip


def _backbone() -> Any:
    return tiny("ResNetConfig", embedding_size=4, hidden_sizes=[16, 32, 32], depths=[1, 2, 1], layer_type="basic",
                out_features=["stage1", "stage2", "stage3"])  # fmt: skip


add("vision", "detr", "DetrForObjectDetection", pixels(8, 128, boxes), lambda: dict(
    backbone_config=_backbone(), num_queries=10, num_labels=LABELS, auxiliary_loss=True))  # fmt: skip
add("vision", "conditional_detr", "ConditionalDetrForObjectDetection", pixels(8, 128, boxes), lambda: dict(
    backbone_config=_backbone(), num_queries=10, num_labels=LABELS))  # fmt: skip
add("vision", "deformable_detr", "DeformableDetrForObjectDetection", pixels(2, 128, boxes), lambda: dict(
    backbone_config=_backbone(), num_queries=10, num_labels=LABELS))  # fmt: skip
add("vision", "yolos", "YolosForObjectDetection", pixels(4, 64, boxes), image_size=[64, 64], num_detection_tokens=10, num_labels=LABELS)
add("vision", "mask2former", "Mask2FormerForUniversalSegmentation",
    lambda c: {"pixel_values": torch.randn(2, 3, 64, 64), "mask_labels": [torch.randint(0, 2, (2, 64, 64)).float() for _ in range(2)],
               "class_labels": [torch.tensor([1, 2]) for _ in range(2)]},
    lambda: dict(backbone_config=tiny("SwinConfig", embed_dim=16, depths=[1, 1, 1, 1], num_heads=[2, 2, 2, 2], window_size=4,
                                      patch_size=4, out_features=["stage1", "stage2", "stage3", "stage4"]),
                 feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=64, dim_feedforward=64, num_queries=10,
                 train_num_points=64, encoder_layers=1, decoder_layers=3, num_attention_heads=4, num_labels=LABELS))  # fmt: skip
add("vision", "swin2sr", "Swin2SRModel", pixels(2, 32), image_size=32, patch_size=1, embed_dim=24, depths=[2, 2], num_heads=[2, 2],
    window_size=4)  # fmt: skip
add("vision", "vivit", "VivitForVideoClassification", lambda c: {"pixel_values": torch.randn(4, 4, 3, 32, 32), "labels": classes(4, 0)},
    image_size=32, num_frames=4, tubelet_size=[2, 4, 4])  # fmt: skip
add("vision", "timesformer", "TimesformerForVideoClassification",
    lambda c: {"pixel_values": torch.randn(4, 4, 3, 32, 32), "labels": classes(4, 0)}, image_size=32, num_frames=4, patch_size=4)  # fmt: skip

# -- several modes -------------------------------------------------------------------------------------------------

add("multimodal", "clip", "CLIPModel", pairs(return_loss=True))
add("multimodal", "siglip", "SiglipModel", pairs(return_loss=True))
add("multimodal", "blip", "BlipForConditionalGeneration", pairs(labels=lambda c: ids(8, 32)),
    text_config=dict(encoder_hidden_size=64), vision_config={})  # fmt: skip
add("multimodal", "git", "GitForCausalLM", pairs(labels=lambda c: ids(8, 32)), vision_config=dict(image_size=64, patch_size=8))
add("multimodal", "groupvit", "GroupViTModel", pairs(return_loss=True), vision_config=dict(
    depths=[2, 1, 1], num_group_tokens=[8, 4, 0], num_output_groups=[8, 4, 4]), projection_intermediate_dim=64)  # fmt: skip
add("multimodal", "vilt", "ViltForQuestionAnswering", pairs(labels=lambda c: torch.rand(8, LABELS)), max_image_length=32, num_labels=LABELS)
add("multimodal", "lxmert", "LxmertModel",
    lambda c: {"input_ids": ids(8, 32), "visual_feats": torch.randn(8, 16, 32), "visual_pos": torch.rand(8, 16, 4)},
    visual_feat_dim=32, l_layers=2, x_layers=2, r_layers=2, loss=lambda out: out[0].square().mean() + out[1].square().mean())  # fmt: skip
add("multimodal", "visual_bert", "VisualBertModel", text(labels="", visual_embeds=lambda c: torch.randn(4, 16, 32)),
    visual_embedding_dim=32)  # fmt: skip
add("multimodal", "llava", "LlavaForConditionalGeneration",
    lambda c: {"input_ids": torch.cat([torch.full((4, 64), 3), ids(4, 64) // 2 + 4], 1), "pixel_values": torch.randn(4, 3, 64, 64),
               "labels": ids(4, 128)},
    lambda: dict(vision_config=tiny("CLIPVisionConfig"), text_config=tiny("LlamaConfig"), image_token_index=3,
                 vision_feature_layer=-1, image_seq_length=64))  # fmt: skip
add("multimodal", "pix2struct", "Pix2StructForConditionalGeneration",
    lambda c: {"flattened_patches": torch.cat([torch.randint(0, 8, (4, 64, 2)).float(), torch.randn(4, 64, 192)], 2),
               "labels": ids(4, 32)}, vision_config=dict(patch_embed_hidden_size=192, seq_len=64))  # fmt: skip
add("multimodal", "vision_encoder_decoder", "VisionEncoderDecoderModel",
    lambda c: {"pixel_values": torch.randn(4, 3, 64, 64), "labels": ids(4, 64)},
    lambda: dict(encoder=tiny("ViTConfig").to_dict(), decoder=tiny("GPT2Config", add_cross_attention=True, is_decoder=True).to_dict(),
                 decoder_start_token_id=1, pad_token_id=0))  # fmt: skip
add("multimodal", "layoutlmv3", "LayoutLMv3ForTokenClassification",
    pairs(4, 64, bbox=torch.arange(4).expand(4, 64, 4).clone(), labels=lambda c: torch.randint(0, 2, (4, 64))), input_size=64,
    coordinate_size=11, shape_size=10)  # fmt: skip

# -- series ----------------------------------------------------------------------------------------------------------

_TIMES: dict[str, Any] = dict(context_length=32, prediction_length=16, num_time_features=1)
add("series", "time_series_transformer", "TimeSeriesTransformerForPrediction", series(), **_TIMES)
add("series", "autoformer", "AutoformerForPrediction", series(), **_TIMES)
add("series", "informer", "InformerForPrediction", series(), **_TIMES, lags_sequence=[1, 2, 3, 4, 5, 6, 7])
add("series", "patchtst", "PatchTSTForPrediction",
    lambda c: {"past_values": torch.randn(16, 64, 4), "future_values": torch.randn(16, 24, 4)}, num_input_channels=4,
    context_length=64, patch_length=4, patch_stride=4)  # fmt: skip
add("series", "decision_transformer", "DecisionTransformerModel",
    lambda c: {"states": torch.randn(8, 32, 17), "actions": torch.randn(8, 32, 4), "rewards": torch.randn(8, 32, 1),
               "returns_to_go": torch.randn(8, 32, 1), "timesteps": torch.arange(32).expand(8, 32).contiguous(),
               "attention_mask": torch.ones(8, 32)}, max_ep_len=64)  # fmt: skip
