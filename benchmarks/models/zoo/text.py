"""Architectures that read text."""

# fmt: off

from __future__ import annotations

import torch

from benchmarks.models.zoo.base import WORDS, add, ids, text, translation, unmasked

# -- encoders of text ----------------------------------------------------------------------------------------

for _name, _model in {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "mpnet": "MPNetForMaskedLM",
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
add("encoder", "rembert", "RemBertForMaskedLM", text(), input_embedding_size=32, output_embedding_size=64)
add("encoder", "albert", "AlbertForMaskedLM", text(), embedding_size=32)
add("encoder", "electra", "ElectraForMaskedLM", text(), embedding_size=32)
add("encoder", "deberta", "DebertaForMaskedLM", text(2), relative_attention=True, pos_att_type=["c2p", "p2c"])
add("encoder", "deberta_v2", "DebertaV2ForMaskedLM", text(2), relative_attention=True, pos_att_type=["c2p", "p2c"],
    position_buckets=32, conv_kernel_size=3)
add("encoder", "mobilebert", "MobileBertForMaskedLM", text(), embedding_size=64, intra_bottleneck_size=32,
    num_feedforward_networks=2)
add("encoder", "convbert", "ConvBertForMaskedLM", text())
add("encoder", "funnel", "FunnelForMaskedLM", text(2), block_sizes=[1, 2], num_decoder_layers=1, initializer_std=0.02)
add("encoder", "nystromformer", "NystromformerForMaskedLM", unmasked(2), num_landmarks=16, segment_means_seq_len=96,
    conv_kernel_size=9)
add("encoder", "yoso", "YosoForMaskedLM", text())
add("encoder", "big_bird", "BigBirdForMaskedLM", text(2, 256), block_size=16, num_random_blocks=2)
add("encoder", "longformer", "LongformerForMaskedLM", text(2, 256), attention_window=32, max_position_embeddings=300)
add("encoder", "canine", "CanineForSequenceClassification", text(16, 128, "row"), max_position_embeddings=256,
    local_transformer_stride=32)
add("encoder", "xlm", "XLMWithLMHeadModel", text(), emb_dim=64)
add("encoder", "flaubert_layerdrop", "FlaubertWithLMHeadModel", text(), layerdrop=0.2)
add("encoder", "xlnet", "XLNetLMHeadModel", text(2))
add("encoder", "esm", "EsmForMaskedLM", text(), vocab_size=WORDS, position_embedding_type="rotary", token_dropout=True,
    mask_token_id=4)
add("encoder", "perceiver", "PerceiverForMaskedLM", text(4, 64), num_latents=64, d_latents=64, num_self_attends_per_block=3,
    num_self_attention_heads=4, num_cross_attention_heads=4, max_position_embeddings=64, vocab_size=262)
add("encoder", "reformer", "ReformerModelWithLMHead", unmasked(4, 128), is_decoder=True, attention_head_size=16,
    feed_forward_size=128,
    attn_layers=["local", "lsh", "local", "lsh"], axial_pos_shape=[8, 16], axial_pos_embds_dim=[32, 32], num_buckets=4,
    local_attn_chunk_length=16, lsh_attn_chunk_length=16, use_cache=False)
add("encoder", "layoutlm", "LayoutLMForMaskedLM", text(bbox=lambda c: torch.arange(4).expand(4, 96, 4).clone()))
add("encoder", "lilt", "LiltForTokenClassification", text(labels="words", bbox=lambda c: torch.arange(4).expand(4, 96,
    4).clone()),
    num_labels=WORDS, hidden_size=96, channel_shrink_ratio=2)
add("encoder", "splinter", "SplinterForQuestionAnswering", text(labels="span"), question_token_id=5)
add("encoder", "luke", "LukeForMaskedLM", text(entity_ids=ids(4, 4, high=20), entity_position_ids=ids(4, 4, 6, high=60)),
    entity_vocab_size=20, entity_emb_size=16)

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
add("decoder", "gpt_neo", "GPTNeoForCausalLM", text(), attention_types=[[["global", "local"], 2]], num_layers=4,
    window_size=32)
add("decoder", "opt_layerdrop", "OPTForCausalLM", text(), num_hidden_layers=4, layerdrop=0.2)
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
    q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, num_key_value_heads=4, first_k_dense_replace=1)
add("experts", "gpt_oss", "GptOssForCausalLM", text(), sliding_window=32)
add("experts", "switch_transformers", "SwitchTransformersForConditionalGeneration", translation(), num_layers=2,
    num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=300, num_decoder_layers=2,
    decoder_start_token_id=0)
add("experts", "nllb_moe", "NllbMoeForConditionalGeneration", translation(), expert_capacity=300, encoder_sparse_step=2,
    decoder_sparse_step=2)
add("recurrent", "mamba", "MambaForCausalLM", unmasked(8, 16), num_hidden_layers=4, state_size=8)
add("recurrent", "mamba2", "Mamba2ForCausalLM", unmasked(4, 64), num_heads=8, head_dim=16, n_groups=2, state_size=8,
    chunk_size=16)
add("recurrent", "falcon_mamba", "FalconMambaForCausalLM", unmasked(8, 16), num_hidden_layers=4, state_size=8)
add("recurrent", "rwkv", "RwkvForCausalLM", unmasked(16, 32), num_hidden_layers=2, attention_hidden_size=64)
add("recurrent", "recurrent_gemma", "RecurrentGemmaForCausalLM", unmasked(8, 64), num_key_value_heads=2, lru_width=64,
    attention_window_size=32)
add("recurrent", "jamba", "JambaForCausalLM", unmasked(4, 32), num_hidden_layers=4, attn_layer_period=2,
    attn_layer_offset=1, mamba_dt_rank=4,
    mamba_d_state=8, use_mamba_kernels=False)
add("recurrent", "lfm2", "Lfm2ForCausalLM", text(), layer_types=["conv", "full_attention", "conv"])
add("recurrent", "qwen3_next", "Qwen3NextForCausalLM", unmasked(4, 64), num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16, linear_value_head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4)
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
    encoder_attention_type="transient-global", decoder_start_token_id=0)
add("seq2seq", "led", "LEDForConditionalGeneration", translation(2, 256, 64), attention_window=32,
    max_encoder_position_embeddings=300, max_decoder_position_embeddings=128)
add("seq2seq", "pegasus_x", "PegasusXForConditionalGeneration", translation(4), num_global_tokens=16, block_size=32)
add("seq2seq", "bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", translation(2, 256, 64), block_size=16,
    num_random_blocks=2, encoder_layers=4)
