"""Further architectures: of transformers, for documents and series, of torchvision."""

from functools import partial
from typing import Any, Callable, List

import torch
import transformers
from architectures import decoder, encoder, image
from rows import (
    CLASSES,
    DEEPSEEK,
    EXPERTS,
    GROUPED,
    PAIRED_WIDTHS,
    PARTS,
    PATCHES,
    TEXT,
    VOCABULARY,
    Batch,
    Row,
    from_config,
    itself,
    logits,
    pixels,
    shifted,
    tokens,
)
from torch import Tensor
from torch.nn import Module
from torchvision.models import (
    convnext,
    densenet,
    efficientnet,
    maxvit,
    mobilenetv2,
    mobilenetv3,
    regnet,
    shufflenetv2,
    swin_transformer,
    vision_transformer,
)


def eight_tokens(num_samples: int, length: int) -> Batch:
    """Draw texts of as many tokens as fill whole segments."""
    return tokens(num_samples, 8)


MAMBA = {"mamba_d_state": 4, "mamba_chunk_size": 4}

DECODERS = [
    decoder(
        "Gemma 3n",
        "gemma3n_text",
        GROUPED,
        head_dim=4,
        sliding_window=3,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=4,
        altup_num_inputs=2,
        laurel_rank=2,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"],
    ),
    decoder("Cohere 2", "cohere2", GROUPED, sliding_window=3),
    decoder("OLMo3", "olmo3", GROUPED, sliding_window=3),
    decoder("SmolLM3", "smollm3", GROUPED),
    decoder("ERNIE 4.5", "ernie4_5", GROUPED, head_dim=4),
    decoder("Persimmon", "persimmon"),
    decoder("Helium", "helium", GROUPED, head_dim=4),
]
STATE_SPACE = [
    decoder(
        "Qwen3-Next",
        "qwen3_next",
        EXPERTS,
        layer_types=["linear_attention", "full_attention"],
        head_dim=4,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
    ),
    decoder(
        "Zamba2",
        "zamba2",
        GROUPED,
        mamba_d_state=4,
        chunk_size=4,
        mamba_headdim=4,
        n_mamba_heads=4,
        mamba_ngroups=1,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        hybrid_layer_ids=[1],
        adapter_rank=2,
        attention_head_dim=4,
    ),
    decoder(
        "Bamba",
        "bamba",
        GROUPED,
        **MAMBA,
        mamba_n_heads=4,
        mamba_d_head=4,
        mamba_n_groups=1,
        attn_layer_indices=[1],
    ),
    decoder(
        "LFM2", "lfm2", GROUPED, conv_L_cache=3, full_attn_idxs=[1], block_ff_dim=12
    ),
    decoder(
        "Falcon-H1",
        "falcon_h1",
        GROUPED,
        **MAMBA,
        mamba_d_ssm=16,
        mamba_n_heads=4,
        mamba_d_head=4,
        mamba_n_groups=1,
        mamba_d_conv=3,
    ),
]
EXPERT_MODELS = [
    decoder("DeepSeek-V3.2", "deepseek_v32", DEEPSEEK, index_topk=3, index_head_dim=4),
    decoder("MiniMax", "minimax", EXPERTS, block_size=2),
    decoder(
        "Llama 4",
        "llama4_text",
        GROUPED,
        num_local_experts=2,
        num_experts_per_tok=1,
        intermediate_size_mlp=12,
        head_dim=4,
    ),
    decoder("PhiMoE", "phimoe", EXPERTS),
    decoder("DeepSeek-V2", "deepseek_v2", DEEPSEEK),
]
ENCODERS = [
    encoder("NomicBERT", "nomic_bert"),
    encoder("RemBERT", "rembert", input_embedding_size=4, output_embedding_size=6),
    encoder("X-MOD", "xmod", languages=["en"], default_language="en"),
    encoder("Megatron-BERT", "megatron-bert"),
    encoder(
        "Nyströmformer",
        "nystromformer",
        segment_means_seq_len=8,
        num_landmarks=4,
        conv_kernel_size=3,
    )._replace(
        inputs=eight_tokens,
        refused={part: "samples have met in `max`" for part in PARTS},
    ),
    encoder(
        "Reformer",
        "reformer",
        attention_head_size=4,
        feed_forward_size=12,
        axial_pos_shape=[2, 4],
        axial_pos_embds_dim=[4, 4],
        attn_layers=["local", "local"],
        local_attn_chunk_length=4,
        hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        is_decoder=False,
    )._replace(
        inputs=eight_tokens,
        train=True,  # repeats its layers in the backward pass, in this mode alone
        refused={part: "runs a backward pass of its own" for part in PARTS},
    ),
]


VISION = [
    image(
        "PVT v2",
        "pvt_v2",
        16,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        mlp_ratios=[1, 1],
        num_encoder_blocks=2,
        patch_sizes=[3, 3],
        strides=[2, 2],
    ),
    image("ViT-MSN", "vit_msn", **PATCHES),
    image(
        "DINOv2 with registers",
        "dinov2_with_registers",
        **PATCHES,
        mlp_ratio=1,
        num_register_tokens=2,
    ),
    image(
        "SwiftFormer",
        "swiftformer",
        32,
        depths=[1, 1, 1, 1],
        embed_dims=[4, 4, 8, 8],
        mlp_ratio=1,
    ),
]


def detector(name: str, model_type: str, *scales: int, **config: Any) -> Row:
    """Describe a model that finds objects, from feature maps of a small ResNet."""
    backbone = transformers.ResNetConfig(
        embedding_size=4,
        hidden_sizes=[4, 4, 4, 8],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=[f"stage{scale}" for scale in scales],
    )
    config = {
        **PAIRED_WIDTHS,
        "num_queries": 3,
        "num_labels": 2,
        "use_timm_backbone": False,
        "backbone": None,
        "backbone_config": backbone,
        **config,
    }
    build = from_config("ObjectDetection", model_type, **config)
    return Row("Vision", name, build, pixels(32), logits)


def dpt() -> Module:
    """Build a model that estimates depths."""
    sizes = {**PATCHES, "num_hidden_layers": 4, "image_size": 8, "patch_size": 4}
    config = transformers.DPTConfig(
        **sizes,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[4, 4, 4, 4],
        fusion_hidden_size=4,
        reassemble_factors=[1, 1, 1, 1],
        readout_type="ignore",
        is_hybrid=False,
    )
    return transformers.DPTForDepthEstimation(config)


def siglip() -> Module:
    """Build the two towers of SigLIP."""
    text = {**TEXT, "projection_size": 8}
    config = transformers.SiglipConfig(text_config=text, vision_config=PATCHES)
    return transformers.SiglipModel(config)


def boxes(num_samples: int, length: int) -> Batch:
    """Draw tokens, and the box of each on a page."""
    first = torch.randint(0, 4, (num_samples, length, 2))
    last = torch.randint(4, 8, (num_samples, length, 2))
    return {**tokens(num_samples, length), "bbox": torch.cat([first, last], -1)}


def five_tokens(num_samples: int, length: int) -> Batch:
    """Draw texts of as many tokens as the Perceiver asks for."""
    return tokens(num_samples, 5)


def image_and_text(num_samples: int, length: int) -> Batch:
    """Draw images and texts."""
    return {**tokens(num_samples, length), **pixels(4)(num_samples, length)}


def contrasted(num_samples: int, length: int) -> Batch:
    """Draw images and texts, and have each told from those of all other samples."""
    return {**image_and_text(num_samples, length), "return_loss": True}


def both_embeddings(output: Any) -> Tensor:
    """Take the embeddings of images and texts, ``[N, 2, D]``."""
    return torch.stack([output.image_embeds, output.text_embeds], 1)


def blip() -> Module:
    """Build a model that describes images."""
    text = {**TEXT, "encoder_hidden_size": 8, "projection_dim": 4}
    config = transformers.BlipConfig(
        text_config=text, vision_config=PATCHES, projection_dim=4
    )
    return transformers.BlipForConditionalGeneration(config)


def llava() -> Module:
    """Build a decoder that reads images in place of some tokens."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**GROUPED),
        vision_config=transformers.CLIPVisionConfig(**PATCHES, projection_dim=4),
        image_token_index=VOCABULARY - 1,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


def image_in_text(num_samples: int, length: int) -> Batch:
    """Draw texts with the places of an image's 4 patches, and images."""
    places = torch.full((num_samples, 4), VOCABULARY - 1)
    texts = tokens(num_samples, length)["input_ids"].clamp(max=VOCABULARY - 2)
    ids = torch.cat([texts[:, :1], places, texts], 1)
    return {"input_ids": ids, **pixels(4)(num_samples, length)}


def patch_tst() -> Module:
    """Build a model that classifies series of numbers."""
    config = transformers.PatchTSTConfig(
        num_input_channels=2,
        context_length=8,
        patch_length=4,
        patch_stride=2,
        num_hidden_layers=1,
        d_model=8,
        num_attention_heads=2,
        ffn_dim=12,
        num_targets=CLASSES,
        norm_type="layernorm",
    )
    return transformers.PatchTSTForClassification(config)


def series(num_samples: int, length: int) -> Batch:
    """Draw series of 8 steps in 2 channels."""
    return {"past_values": torch.randn(num_samples, 8, 2, dtype=torch.float64)}


def forecast() -> Module:
    """Build a model that predicts a distribution of what comes next."""
    config = transformers.TimeSeriesTransformerConfig(
        **PAIRED_WIDTHS,
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2],
        num_time_features=2,
    )
    return transformers.TimeSeriesTransformerForPrediction(config)


def history(num_samples: int, length: int) -> Batch:
    """Draw a series with what is known of its times, and how it goes on."""
    past, later = torch.randn(num_samples, 14, 3).double().split((10, 4), 1)
    return {
        **{"past_values": past[..., 0], "past_time_features": past[..., 1:]},
        **{"future_values": later[..., 0], "future_time_features": later[..., 1:]},
        "past_observed_mask": torch.ones(num_samples, 10).double(),
    }


PAGES = {**TEXT, "max_2d_position_embeddings": 16}
OTHERS = [
    detector("DETR", "detr", 4),
    detector(
        "RT-DETR",
        "rt_detr",
        *(3, 4),
        encoder_hidden_dim=8,
        encoder_in_channels=[4, 8],
        decoder_in_channels=[8, 8],
        feat_strides=[16, 32],
        encode_proj_layers=[1],
        num_feature_levels=2,
        num_denoising=0,
    ),
    Row(
        "Vision",
        "DPT",
        dpt,
        pixels(8),
        lambda out: out.predicted_depth.flatten(1)[:, :6].unflatten(1, (2, 3)),
    ),
    Row(
        "Mixed",
        "LayoutLM",
        from_config("TokenClassification", "layoutlm", **PAGES),
        boxes,
        logits,
    ),
    Row(
        "Mixed",
        "LayoutLMv3",
        from_config(
            "TokenClassification",
            "layoutlmv3",
            **PAGES,
            coordinate_size=1,
            shape_size=2,
            visual_embed=False,
        ),
        boxes,
        logits,
    ),
    Row(
        "Mixed",
        "Perceiver",
        from_config(
            "MaskedLM",
            "perceiver",
            d_model=8,
            num_latents=3,
            d_latents=8,
            num_blocks=1,
            num_self_attends_per_block=1,
            num_self_attention_heads=2,
            num_cross_attention_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=5,
            qk_channels=8,
            v_channels=8,
        ),
        five_tokens,
        logits,
    ),
    Row("Mixed", "SigLIP (two towers)", siglip, image_and_text, both_embeddings),
    Row("Mixed", "BLIP", blip, image_and_text, logits),
    Row("Mixed", "LLaVA", llava, image_in_text, shifted),
    Row(
        "Mixed",
        "ViLT",
        lambda: transformers.ViltForQuestionAnswering(
            transformers.ViltConfig(**{**TEXT, "image_size": 4, "patch_size": 2})
        ),
        image_and_text,
        logits,
    ),
    Row(
        "Mixed",
        "Time series transformer",
        forecast,
        history,
        lambda out: torch.stack(out.params, -1),
    ),
    Row("Mixed", "PatchTST", patch_tst, series, lambda out: out.prediction_logits),
    Row(
        "Mixed",
        "SigLIP (two towers)",
        siglip,
        contrasted,
        both_embeddings,
        "contrastive loss",
        own_loss=True,
        refused={part: "sample" for part in PARTS},
    ),
]


def classifier(name: str, size: int, build: Callable[..., Module], *args: Any) -> Row:
    """Describe a model of ``torchvision`` that classifies images."""
    build = partial(build, *args, num_classes=CLASSES)
    return Row("Vision (torchvision)", name, build, pixels(size, "x"), itself)


def small_mobilenet(num_classes: int) -> Module:
    """Build a MobileNetV3 of two blocks."""
    blocks = [
        mobilenetv3.InvertedResidualConfig(8, 3, 8, 8, True, "RE", 2, 1, 1.0),
        mobilenetv3.InvertedResidualConfig(8, 3, 16, 8, True, "HS", 1, 1, 1.0),
    ]
    return mobilenetv3.MobileNetV3(blocks, 16, num_classes=num_classes)


def small_efficientnet(num_classes: int) -> Module:
    """Build an EfficientNet of two blocks."""
    blocks = [
        efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0),
        efficientnet.FusedMBConvConfig(2, 3, 2, 8, 8, 1),
    ]
    return efficientnet.EfficientNet(
        blocks, 0.2, num_classes=num_classes, last_channel=8
    )


SWIN = {
    "patch_size": [2, 2],
    "embed_dim": 4,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": [2, 2],
}
TORCHVISION = [
    classifier(
        "MobileNetV2",
        16,
        partial(
            mobilenetv2.MobileNetV2,
            width_mult=0.25,
            inverted_residual_setting=[[1, 8, 1, 1], [2, 8, 2, 2]],
        ),
    ),
    classifier("MobileNetV3", 16, small_mobilenet),
    classifier("EfficientNet (torchvision)", 16, small_efficientnet),
    classifier(
        "Swin (torchvision)", 8, partial(swin_transformer.SwinTransformer, **SWIN)
    ),
    classifier(
        "Swin v2 (torchvision)",
        8,
        partial(
            swin_transformer.SwinTransformer,
            **SWIN,
            block=swin_transformer.SwinTransformerBlockV2,
            downsample_layer=swin_transformer.PatchMergingV2,
        ),
    ),
    classifier(
        "ViT (torchvision)",
        4,
        vision_transformer.VisionTransformer,
        *(4, 2, 2, 2, 8, 12),
    ),
    classifier(
        "ConvNeXt (torchvision)",
        8,
        convnext.ConvNeXt,
        [convnext.CNBlockConfig(4, 8, 1), convnext.CNBlockConfig(8, None, 1)],
    ),
    classifier(
        "RegNet (torchvision)",
        16,
        partial(
            regnet.RegNet,
            regnet.BlockParams([1, 1], [8, 8], [4, 4], [1.0, 1.0], [2, 2], 0.25),
            stem_width=4,
        ),
    ),
    classifier(
        "DenseNet (checkpointed)",
        32,
        partial(densenet.DenseNet, 2, (2, 2), 4, 2, memory_efficient=True),
    ),
    classifier(
        "MaxViT (torchvision)", 8, maxvit.MaxVit, (8, 8), 4, 2, [4], [1], 4, 0.2
    ),
    classifier(
        "ShuffleNetV2", 32, shufflenetv2.ShuffleNetV2, [1, 1, 1], [4, 8, 8, 8, 8]
    ),
]

FURTHER: List[Row] = [
    *DECODERS,
    *(row._replace(kind="State space") for row in STATE_SPACE),
    *(row._replace(kind="Mixtures of experts") for row in EXPERT_MODELS),
    *ENCODERS,
    *VISION,
    *OTHERS,
    *TORCHVISION,
]
