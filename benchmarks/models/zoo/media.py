"""Architectures that read sound, images, several modes, and series."""

# fmt: off

from __future__ import annotations

from typing import Any

import torch

from benchmarks.models.zoo.base import LABELS, add, boxes, classes, depths, ids, maps, pairs, pixels, series, sound, text, tiny

# -- sound ---------------------------------------------------------------------------------------------------------

_WAVES: dict[str, Any] = dict(
    conv_dim=(32, 32, 32), conv_stride=(5, 4, 4), conv_kernel=(10, 4, 4), num_conv_pos_embedding_groups=4, vocab_size=32,
    mask_time_length=4, mask_feature_length=4, mask_feature_prob=0.1,
)
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
    vocab_size=32, mask_time_length=4, layerdrop=0.0)
add("sound", "whisper", "WhisperForConditionalGeneration",
    lambda c: {"input_features": torch.randn(4, 16, 128), "labels": ids(4, 32)}, num_mel_bins=16, max_source_positions=64,
    max_target_positions=64, apply_spec_augment=True, mask_feature_prob=0.1)
add("sound", "speech_to_text", "Speech2TextForConditionalGeneration",
    lambda c: {"input_features": torch.randn(4, 256, 16), "labels": ids(4, 32)}, input_feat_per_channel=16, conv_channels=64)
add("sound", "audio_spectrogram_transformer", "ASTForAudioClassification",
    lambda c: {"input_values": torch.randn(8, 64, 32), "labels": classes(8, 0)}, max_length=64, num_mel_bins=32,
    frequency_stride=6, time_stride=6)
add("sound", "moonshine", "MoonshineForConditionalGeneration",
    lambda c: {"input_values": torch.randn(4, 16000), "labels": ids(4, 32)})

# -- vision --------------------------------------------------------------------------------------------------------

_images = pixels(labels=classes)
add("vision", "vit", "ViTForImageClassification", _images)
add("vision", "deit", "DeiTForImageClassification", _images)
add("vision", "beit", "BeitForImageClassification", _images, use_relative_position_bias=True)
add("vision", "dinov2", "Dinov2ForImageClassification", _images, drop_path_rate=0.1)
add("vision", "vit_mae", "ViTMAEForPreTraining", pixels())
add("vision", "swin", "SwinForImageClassification", pixels(2, labels=classes), patch_size=2, embed_dim=16, depths=[2, 2],
    num_heads=[2, 4],
    window_size=4)
add("vision", "swinv2", "Swinv2ForImageClassification", pixels(2, labels=classes), patch_size=2, embed_dim=16, depths=[2,
    2], num_heads=[2, 4],
    window_size=4, pretrained_window_sizes=[0, 0])
add("vision", "convnext", "ConvNextForImageClassification", pixels(2, labels=classes), patch_size=2, hidden_sizes=[16, 32,
    32, 64], depths=[2, 2, 2, 2],
    drop_path_rate=0.1)
add("vision", "convnextv2", "ConvNextV2ForImageClassification", pixels(2, labels=classes), patch_size=2, hidden_sizes=[16,
    32, 32, 64],
    depths=[2, 2, 2, 2], drop_path_rate=0.1)
add("vision", "resnet", "ResNetForImageClassification", pixels(16, labels=classes), embedding_size=8, hidden_sizes=[16, 32,
    64], depths=[3, 4, 3])
add("vision", "regnet", "RegNetForImageClassification", pixels(16, labels=classes), embedding_size=8, hidden_sizes=[16, 32,
    64], depths=[3, 4, 3],
    groups_width=8)
add("vision", "bit", "BitForImageClassification", pixels(16, labels=classes), embedding_size=8, hidden_sizes=[16, 32, 64],
    depths=[3, 4, 3],
    num_groups=4, drop_path_rate=0.1)
add("vision", "mobilenet_v2", "MobileNetV2ForImageClassification", _images, depth_multiplier=0.35)
add("vision", "mobilevit", "MobileViTForImageClassification", _images, hidden_sizes=[16, 24, 32],
    neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32], patch_size=2, num_attention_heads=4)
add("vision", "efficientnet", "EfficientNetForImageClassification", _images, width_coefficient=0.3, depth_coefficient=0.5,
    hidden_dim=384)
add("vision", "poolformer", "PoolFormerForImageClassification", _images, hidden_sizes=[16, 32, 64, 64], depths=[2, 2, 2, 2],
    drop_path_rate=0.1, stride=2, patch_sizes=[3, 3, 3, 3], strides=[2, 2, 2, 2], padding=[1, 1, 1, 1])
add("vision", "pvt_v2", "PvtV2ForImageClassification", _images, hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2,
    2, 4],
    drop_path_rate=0.1)
add("vision", "cvt", "CvtForImageClassification", _images, embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3])
add("vision", "levit", "LevitForImageClassification", pixels(8, 128, classes), image_size=128, patch_size=16,
    hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4],
    depths=[4, 4, 4], key_dim=[8, 8, 8])
add("vision", "focalnet", "FocalNetForImageClassification", pixels(2, labels=classes), patch_size=2, embed_dim=16,
    hidden_sizes=[32, 64], depths=[2, 2],
    focal_levels=[2, 2], focal_windows=[3, 3])
add("vision", "segformer", "SegformerForSemanticSegmentation", pixels(labels=maps), hidden_sizes=[16, 16, 32, 32],
    num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16, depths=[3, 3, 3, 3], num_labels=LABELS)
add("vision", "upernet", "UperNetForSemanticSegmentation", pixels(labels=maps), lambda: dict(
    hidden_size=16, auxiliary_channels=16, auxiliary_in_channels=32, num_labels=LABELS,
    backbone_config=tiny("ConvNextConfig", hidden_sizes=[8, 16, 32, 32], depths=[3, 3, 3, 3],
                         out_features=["stage1", "stage2", "stage3", "stage4"])))
add("vision", "dpt", "DPTForSemanticSegmentation", pixels(4, labels=maps), num_labels=LABELS, num_hidden_layers=4,
    backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[16, 16, 32, 32], fusion_hidden_size=16)
add("vision", "glpn", "GLPNForDepthEstimation", pixels(labels=depths), hidden_sizes=[16, 16, 32, 32],
    num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=8, depths=[3, 3, 3, 3])


def _backbone() -> Any:
    return tiny("ResNetConfig", embedding_size=4, hidden_sizes=[16, 32, 32], depths=[1, 2, 1], layer_type="basic",
                out_features=["stage1", "stage2", "stage3"])


add("vision", "detr", "DetrForObjectDetection", pixels(8, 128, boxes), lambda: dict(
    backbone_config=_backbone(), num_queries=10, num_labels=LABELS, auxiliary_loss=True))
add("vision", "conditional_detr", "ConditionalDetrForObjectDetection", pixels(8, 128, boxes), lambda: dict(
    backbone_config=_backbone(), num_queries=10, num_labels=LABELS))
add("vision", "deformable_detr", "DeformableDetrForObjectDetection", pixels(2, 64, boxes), lambda: dict(
    backbone_config=_backbone(), encoder_layers=4, decoder_layers=3, num_queries=10, num_labels=LABELS))
add("vision", "yolos", "YolosForObjectDetection", pixels(4, 64, boxes), image_size=[64, 64], num_detection_tokens=10,
    num_labels=LABELS)
add("vision", "mask2former", "Mask2FormerForUniversalSegmentation",
    lambda c: {"pixel_values": torch.randn(2, 3, 64, 64), "mask_labels": [torch.randint(0, 2, (2, 64,
    64)).float() for _ in range(2)],
               "class_labels": [torch.tensor([1, 2]) for _ in range(2)]},
    lambda: dict(backbone_config=tiny("SwinConfig", embed_dim=16, depths=[1, 1, 1, 1], num_heads=[2, 2, 2, 2], window_size=4,
                                      patch_size=4, out_features=["stage1", "stage2", "stage3", "stage4"]),
                 feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=64, dim_feedforward=64,
                 num_queries=10,
                 train_num_points=64, encoder_layers=1, decoder_layers=3, num_attention_heads=4, num_labels=LABELS))
add("vision", "swin2sr", "Swin2SRModel", pixels(2, 32), image_size=32, patch_size=1, embed_dim=24, depths=[2, 2],
    num_heads=[2, 2],
    window_size=4)
add("vision", "vivit", "VivitForVideoClassification", lambda c: {"pixel_values": torch.randn(4, 4, 3, 32, 32),
    "labels": classes(4, 0)},
    image_size=32, num_frames=4, tubelet_size=[2, 4, 4])
add("vision", "timesformer", "TimesformerForVideoClassification",
    lambda c: {"pixel_values": torch.randn(4, 4, 3, 32, 32), "labels": classes(4, 0)}, image_size=32, num_frames=4,
    patch_size=4)

# -- several modes -------------------------------------------------------------------------------------------------

add("multimodal", "clip", "CLIPModel", pairs(return_loss=True))
add("multimodal", "siglip", "SiglipModel", pairs(return_loss=True))
add("multimodal", "blip", "BlipForConditionalGeneration", pairs(labels=lambda c: ids(8, 32)),
    text_config=dict(encoder_hidden_size=64), vision_config={})
add("multimodal", "git", "GitForCausalLM", pairs(labels=lambda c: ids(8, 32)), vision_config=dict(image_size=64,
    patch_size=8))
add("multimodal", "groupvit", "GroupViTModel", pairs(return_loss=True), vision_config=dict(
    depths=[3, 2, 2], num_group_tokens=[8, 4, 0], num_output_groups=[8, 4, 4]), projection_intermediate_dim=64)
add("multimodal", "vilt", "ViltForQuestionAnswering", pairs(labels=lambda c: torch.rand(8, LABELS)), max_image_length=32,
    num_labels=LABELS)
add("multimodal", "lxmert", "LxmertModel",
    lambda c: {"input_ids": ids(8, 32), "visual_feats": torch.randn(8, 16, 32), "visual_pos": torch.rand(8, 16, 4)},
    visual_feat_dim=32, l_layers=2, x_layers=2, r_layers=2, loss=lambda out: out[0].square().mean() + out[1].square().mean())
add("multimodal", "visual_bert", "VisualBertModel", text(labels="", visual_embeds=lambda c: torch.randn(4, 16, 32)),
    visual_embedding_dim=32)
add("multimodal", "llava", "LlavaForConditionalGeneration",
    lambda c: {"input_ids": torch.cat([torch.full((4, 64), 3), ids(4, 64) // 2 + 4], 1), "pixel_values": torch.randn(4, 3,
    64, 64),
               "labels": ids(4, 128)},
    lambda: dict(vision_config=tiny("CLIPVisionConfig"), text_config=tiny("LlamaConfig"), image_token_index=3,
                 vision_feature_layer=-1, image_seq_length=64))
add("multimodal", "pix2struct", "Pix2StructForConditionalGeneration",
    lambda c: {"flattened_patches": torch.cat([torch.randint(0, 8, (4, 64, 2)).float(), torch.randn(4, 64, 192)], 2),
               "labels": ids(4, 32)}, vision_config=dict(patch_embed_hidden_size=192, seq_len=64))
add("multimodal", "vision_encoder_decoder", "VisionEncoderDecoderModel",
    lambda c: {"pixel_values": torch.randn(4, 3, 64, 64), "labels": ids(4, 64)},
    lambda: dict(encoder=tiny("ViTConfig").to_dict(), decoder=tiny("GPT2Config", add_cross_attention=True,
    is_decoder=True).to_dict(),
                 decoder_start_token_id=1, pad_token_id=0))
add("multimodal", "layoutlmv3", "LayoutLMv3ForTokenClassification",
    pairs(4, 64, bbox=torch.arange(4).expand(4, 64, 4).clone(), labels=lambda c: torch.randint(0, 2, (4, 64))), input_size=64,
    coordinate_size=11, shape_size=10)

# -- series ----------------------------------------------------------------------------------------------------------

_TIMES: dict[str, Any] = dict(context_length=32, prediction_length=16, num_time_features=1)
add("series", "time_series_transformer", "TimeSeriesTransformerForPrediction", series(), **_TIMES)
add("series", "autoformer", "AutoformerForPrediction", series(), **_TIMES)
add("series", "informer", "InformerForPrediction", series(), **_TIMES, lags_sequence=[1, 2, 3, 4, 5, 6, 7])
add("series", "patchtst", "PatchTSTForPrediction",
    lambda c: {"past_values": torch.randn(16, 64, 4), "future_values": torch.randn(16, 24, 4)}, num_input_channels=4,
    context_length=64, patch_length=4, patch_stride=4)
add("series", "decision_transformer", "DecisionTransformerModel",
    lambda c: {"states": torch.randn(8, 32, 17), "actions": torch.randn(8, 32, 4), "rewards": torch.randn(8, 32, 1),
               "returns_to_go": torch.randn(8, 32, 1), "timesteps": torch.arange(32).expand(8, 32).contiguous(),
               "attention_mask": torch.ones(8, 32)}, max_ep_len=64)
