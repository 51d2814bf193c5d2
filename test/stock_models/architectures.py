"""Architectures that people use, as small random configurations.

They come from ``transformers`` and ``timm``, and are built from their configuration:
nothing is downloaded.
"""

from functools import partial
from typing import Any, Callable, List

import timm
from rows import (
    CLASSES,
    DEEPSEEK,
    EXPERTS,
    GROUPED,
    PAIR,
    PATCHES,
    SOUND,
    STAGES,
    T5,
    TEXT,
    VOCABULARY,
    Batch,
    Row,
    from_config,
    itself,
    logits,
    pairs,
    pixels,
    shifted,
    tokens,
    waves,
)
from timm.layers import GatedMlp, GroupNormAct
from timm.models import _efficientnet_builder as efficientnet_builder
from timm.models import (
    convmixer,
    densenet,
    efficientnet,
    levit,
    maxxvit,
    metaformer,
    mlp_mixer,
    nfnet,
    resnetv2,
    tnt,
    volo,
)
from torch.nn import Module

GPT_SIZES = {"n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16}
GPT2 = from_config("CausalLM", "gpt2", **TEXT, **GPT_SIZES)
LLAMA = from_config("CausalLM", "llama", **GROUPED)


def decoder(name: str, model_type: str, config: Batch = TEXT, **more: Any) -> Row:
    """Describe a model that predicts the next token."""
    build = from_config("CausalLM", model_type, **{**config, **more})
    return Row("Decoders", name, build, tokens, shifted)


def encoder(name: str, model_type: str, config: Batch = TEXT, **more: Any) -> Row:
    """Describe a model that predicts masked tokens."""
    build = from_config("MaskedLM", model_type, **{**config, **more})
    return Row("Encoders", name, build, tokens, logits)


def translator(name: str, model_type: str, config: Batch = PAIR, **more: Any) -> Row:
    """Describe a model that writes a text for another."""
    build = from_config("Seq2SeqLM", model_type, **{**config, **more})
    return Row("Encoder-decoders", name, build, pairs, logits)


def image(name: str, model_type: str, size: int = 4, **config: Any) -> Row:
    """Describe a model that classifies images."""
    config = {"image_size": size, "num_labels": CLASSES, **config}
    build = from_config("ImageClassification", model_type, **config)
    return Row("Vision", name, build, pixels(size), logits)


def timm_image(name: str, size: int, build: Callable[..., Module]) -> Row:
    """Describe a model of ``timm`` that classifies images."""
    build = partial(build, num_classes=CLASSES)
    return Row("Vision (timm)", name, build, pixels(size, "x"), itself)


def sound(name: str, model_type: str, **more: Any) -> Row:
    """Describe a model that recognizes speech; one class for each position."""
    build = from_config("CTC", model_type, **{**SOUND, **more})
    return Row("Speech", name, build, waves, logits)


def small_efficientnet(num_classes: int) -> Module:
    """Build an EfficientNet of two blocks."""
    stages = [["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r1_k3_s2_e2_c8_se0.25"]]
    described = efficientnet_builder.decode_arch_def(stages)
    return efficientnet.EfficientNet(
        described, num_classes=num_classes, num_features=8, stem_size=8
    )


DECODERS = [
    Row("Decoders", "GPT-2", GPT2, tokens, shifted),
    decoder("GPT", "openai-gpt", **GPT_SIZES),
    decoder(
        "GPT-Neo",
        "gpt_neo",
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=3,
    ),
    decoder("GPT-J", "gptj", **GPT_SIZES, rotary_dim=2),
    decoder("GPT-NeoX", "gpt_neox"),
    decoder("GPT-BigCode", "gpt_bigcode", **GPT_SIZES),
    decoder("OPT", "opt", ffn_dim=12, word_embed_proj_dim=4),
    decoder("BLOOM", "bloom", n_head=2, n_layer=2),
    decoder(
        "MPT",
        "mpt",
        d_model=8,
        n_heads=2,
        n_layers=2,
        max_seq_len=16,
        expansion_ratio=2,
    ),
    decoder("CTRL", "ctrl", **GPT_SIZES, dff=12),
    Row("Decoders", "Llama", LLAMA, tokens, shifted),
    decoder("Mistral", "mistral", GROUPED, sliding_window=3),
    decoder("Qwen2", "qwen2", GROUPED),
    decoder("Qwen3", "qwen3", GROUPED, head_dim=4),
    decoder("Gemma", "gemma", GROUPED, head_dim=4),
    decoder("Gemma 2", "gemma2", GROUPED, head_dim=4, sliding_window=3),
    decoder("Gemma 3", "gemma3_text", GROUPED, head_dim=4, sliding_window=3),
    decoder("Phi", "phi"),
    decoder("Phi-3", "phi3", GROUPED),
    decoder("Falcon", "falcon", ffn_hidden_size=12),
    decoder(
        "StableLM", "stablelm", GROUPED, use_parallel_residual=True, qk_layernorm=True
    ),
    decoder("Starcoder2", "starcoder2", GROUPED),
    decoder("OLMo2", "olmo2", GROUPED),
    decoder("Cohere", "cohere", GROUPED),
    decoder("Granite", "granite", GROUPED),
    decoder("GLM-4", "glm4", GROUPED, head_dim=4),
    decoder("Nemotron", "nemotron", GROUPED),
    decoder("BioGPT", "biogpt"),
    decoder(
        "XLNet",
        "xlnet",
        {"vocab_size": VOCABULARY},
        d_model=8,
        n_head=2,
        n_layer=2,
        d_inner=12,
    ),
]
STATE_SPACE = [
    decoder("Mamba", "mamba", state_size=4, conv_kernel=3, time_step_rank=2),
    decoder(
        "Mamba-2",
        "mamba2",
        state_size=4,
        conv_kernel=3,
        num_heads=4,
        head_dim=4,
        n_groups=2,
        chunk_size=4,
    ),
    decoder(
        "Falcon-Mamba", "falcon_mamba", state_size=4, conv_kernel=3, time_step_rank=2
    ),
    decoder(
        "RWKV", "rwkv", attention_hidden_size=8, context_length=16, use_cache=False
    ),
    decoder(
        "RecurrentGemma",
        "recurrent_gemma",
        GROUPED,
        lru_width=8,
        num_hidden_layers=3,
        attention_window_size=4,
    ),
    decoder(
        "Jamba",
        "jamba",
        EXPERTS,
        mamba_d_state=4,
        mamba_dt_rank=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
    ),
]
EXPERT_MODELS = [
    decoder("Mixtral", "mixtral", EXPERTS),
    decoder("Qwen2-MoE", "qwen2_moe", EXPERTS),
    decoder("Qwen3-MoE", "qwen3_moe", EXPERTS, head_dim=4),
    decoder("OLMoE", "olmoe", EXPERTS),
    decoder("GraniteMoE", "granitemoe", EXPERTS),
    decoder("DeepSeek-V3", "deepseek_v3", DEEPSEEK),
    decoder("GPT-OSS", "gpt_oss", EXPERTS, head_dim=4, sliding_window=3),
    translator(
        "Switch Transformer",
        "switch_transformers",
        T5,
        num_experts=3,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=64,
    ),
]
ENCODERS = [
    encoder("BERT", "bert"),
    encoder("RoBERTa", "roberta"),
    encoder("DistilBERT", "distilbert", dim=8, n_heads=2, n_layers=2, hidden_dim=12),
    encoder("ALBERT", "albert", embedding_size=4),
    encoder("ELECTRA", "electra", embedding_size=4),
    encoder("DeBERTa", "deberta", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder(
        "DeBERTa-v2",
        "deberta-v2",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        conv_kernel_size=3,
        position_buckets=4,
        norm_rel_ebd="layer_norm",
    ),
    encoder("MPNet", "mpnet"),
    encoder(
        "Funnel",
        "funnel",
        {"vocab_size": VOCABULARY},
        d_model=8,
        n_head=2,
        d_head=4,
        d_inner=12,
        block_sizes=[1, 1],
        num_decoder_layers=1,
    ),
    encoder("ConvBERT", "convbert", embedding_size=8, head_ratio=1, conv_kernel_size=3),
    encoder("Longformer", "longformer", attention_window=4),
    encoder("BigBird", "big_bird", attention_type="original_full"),
    encoder(
        "MobileBERT",
        "mobilebert",
        embedding_size=4,
        intra_bottleneck_size=8,
        true_hidden_size=8,
    ),
    encoder("SqueezeBERT", "squeezebert", embedding_size=8),
    encoder(
        "ModernBERT", "modernbert", local_attention=4, cls_token_id=1, sep_token_id=2
    ),
    encoder("FNet", "fnet"),
    encoder("RoFormer", "roformer", embedding_size=8),
    encoder("XLM", "xlm", emb_dim=8, n_heads=2, n_layers=2, n_langs=1),
    encoder("ESM", "esm", position_embedding_type="rotary"),
    encoder("I-BERT", "ibert"),
]
ENCODER_DECODERS = [
    translator("T5", "t5", T5),
    translator(
        "T5 v1.1", "t5", T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    translator("UMT5", "umt5", T5),
    translator("LongT5", "longt5", T5, local_radius=2),
    translator("BART", "bart"),
    translator("mBART", "mbart"),
    translator("Pegasus", "pegasus"),
    translator("Marian", "marian"),
    translator("Blenderbot", "blenderbot"),
    translator("M2M-100", "m2m_100"),
    translator(
        "LED",
        "led",
        attention_window=[4],
        max_encoder_position_embeddings=16,
        max_decoder_position_embeddings=16,
    ),
    translator(
        "ProphetNet",
        "prophetnet",
        {"vocab_size": VOCABULARY},
        hidden_size=8,
        num_encoder_layers=1,
        num_decoder_layers=1,
        num_encoder_attention_heads=2,
        num_decoder_attention_heads=2,
        encoder_ffn_dim=12,
        decoder_ffn_dim=12,
        max_position_embeddings=16,
        ngram=2,
        num_buckets=4,
    ),
]
VISION = [
    image("ViT", "vit", **PATCHES),
    image("DeiT", "deit", **PATCHES, architectures=["DeiTForImageClassification"]),
    image(
        "BEiT",
        "beit",
        **PATCHES,
        use_relative_position_bias=True,
        use_absolute_position_embeddings=True,
    ),
    image(
        "Data2Vec vision",
        "data2vec-vision",
        **PATCHES,
        use_shared_relative_position_bias=True,
    ),
    image("DINOv2", "dinov2", **PATCHES, mlp_ratio=1),
    image("SigLIP", "siglip", vision_config=PATCHES),
    image(
        "Swin",
        "swin",
        8,
        patch_size=1,
        embed_dim=4,
        depths=[2, 1],
        num_heads=[1, 2],
        window_size=4,
        mlp_ratio=1.0,
    ),
    image(
        "Swin v2",
        "swinv2",
        8,
        patch_size=1,
        embed_dim=4,
        depths=[2, 1],
        num_heads=[1, 2],
        window_size=4,
        mlp_ratio=1.0,
    ),
    image("ConvNeXt", "convnext", 8, **STAGES, num_stages=2, patch_size=2),
    image("ConvNeXt v2", "convnextv2", 8, **STAGES, num_stages=2, patch_size=2),
    image(
        "SegFormer",
        "segformer",
        16,
        **STAGES,
        num_encoder_blocks=2,
        sr_ratios=[2, 1],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[1, 1],
        decoder_hidden_size=8,
    ),
    image(
        "MobileViT",
        "mobilevit",
        32,
        hidden_sizes=[8, 8, 8],
        neck_hidden_sizes=[4, 4, 4, 4, 4, 4, 8],
        num_attention_heads=2,
        expand_ratio=1.0,
        mlp_ratio=1.0,
    ),
    image(
        "PoolFormer",
        "poolformer",
        16,
        **STAGES,
        patch_sizes=[3, 3],
        strides=[2, 2],
        padding=[1, 1],
        num_encoder_blocks=2,
        mlp_ratio=1.0,
    ),
    image(
        "FocalNet",
        "focalnet",
        8,
        **STAGES,
        embed_dim=4,
        patch_size=2,
        focal_levels=[1, 1],
        focal_windows=[3, 3],
        mlp_ratio=1.0,
    ),
    image("ResNet", "resnet", 8, **STAGES, embedding_size=4, layer_type="basic"),
    image("BiT", "bit", 16, **STAGES, embedding_size=4, num_groups=2),
    image("RegNet", "regnet", 8, **STAGES, embedding_size=4, groups_width=4),
]
TIMM = [
    timm_image(
        "ResNet-D",
        16,
        partial(timm.create_model, "resnet10t", channels=(4, 4, 4, 8), stem_width=4),
    ),
    timm_image(
        "ResNetV2 (standardized)",
        16,
        partial(
            resnetv2.ResNetV2,
            layers=(1, 1),
            channels=(8, 16),
            stem_chs=8,
            norm_layer=partial(GroupNormAct, num_groups=2),
        ),
    ),
    timm_image("EfficientNet", 16, small_efficientnet),
    timm_image(
        "MLP-Mixer",
        4,
        partial(
            mlp_mixer.MlpMixer, img_size=4, patch_size=2, num_blocks=2, embed_dim=8
        ),
    ),
    timm_image(
        "gMLP",
        4,
        partial(
            mlp_mixer.MlpMixer,
            img_size=4,
            patch_size=2,
            num_blocks=2,
            embed_dim=8,
            mlp_ratio=2,
            block_layer=mlp_mixer.SpatialGatingBlock,
            mlp_layer=GatedMlp,
        ),
    ),
    timm_image(
        "ResMLP",
        4,
        partial(
            mlp_mixer.MlpMixer,
            img_size=4,
            patch_size=2,
            num_blocks=2,
            embed_dim=8,
            mlp_ratio=2,
            block_layer=mlp_mixer.ResBlock,
            norm_layer=mlp_mixer.Affine,
        ),
    ),
    timm_image(
        "CoAtNet",
        16,
        partial(
            maxxvit.MaxxVit,
            maxxvit.MaxxVitCfg(
                embed_dim=(8, 8),
                depths=(1, 1),
                block_type=("C", "T"),
                stem_width=8,
                transformer_cfg=maxxvit.MaxxVitTransformerCfg(
                    dim_head=4, window_size=(2, 2), grid_size=(2, 2)
                ),
            ),
            img_size=16,
        ),
    ),
    timm_image(
        "MaxViT",
        16,
        partial(
            maxxvit.MaxxVit,
            maxxvit.MaxxVitCfg(
                embed_dim=(8,),
                depths=(1,),
                block_type=("M",),
                stem_width=8,
                transformer_cfg=maxxvit.MaxxVitTransformerCfg(
                    dim_head=4, window_size=(2, 2), grid_size=(2, 2)
                ),
            ),
            img_size=16,
        ),
    ),
    timm_image(
        "XCiT",
        8,
        partial(
            timm.create_model,
            "xcit_nano_12_p8_224",
            img_size=8,
            embed_dim=8,
            depth=2,
            num_heads=2,
            cls_attn_layers=1,
        ),
    ),
    timm_image(
        "ViT (timm)",
        4,
        partial(
            timm.create_model,
            "vit_tiny_patch16_224",
            img_size=4,
            patch_size=2,
            embed_dim=8,
            depth=2,
            num_heads=2,
        ),
    ),
    timm_image(
        "ViT (relative positions)",
        4,
        partial(
            timm.create_model,
            "vit_relpos_small_patch16_224",
            img_size=4,
            patch_size=2,
            embed_dim=8,
            depth=2,
            num_heads=2,
        ),
    ),
    timm_image(
        "EVA-02",
        4,
        partial(
            timm.create_model,
            "eva02_tiny_patch14_224",
            img_size=4,
            patch_size=2,
            embed_dim=8,
            depth=1,
            num_heads=2,
        ),
    ),
    timm_image(
        "CaiT",
        4,
        partial(
            timm.create_model,
            "cait_xxs24_224",
            img_size=4,
            patch_size=2,
            embed_dim=8,
            depth=1,
            num_heads=2,
        ),
    ),
    timm_image(
        "TNT",
        16,
        partial(
            tnt.TNT,
            img_size=16,
            patch_size=8,
            embed_dim=8,
            inner_dim=4,
            depth=2,
            num_heads_inner=2,
            num_heads_outer=2,
        ),
    ),
    timm_image(
        "ConViT",
        4,
        partial(
            timm.create_model,
            "convit_tiny",
            img_size=4,
            patch_size=2,
            embed_dim=4,
            depth=2,
            num_heads=2,
            local_up_to_layer=1,
        ),
    ),
    timm_image(
        "NFNet",
        32,
        partial(
            nfnet.NormFreeNet,
            nfnet.NfCfg(
                depths=(1, 1, 1, 1),
                channels=(4, 4, 8, 8),
                stem_chs=4,
                attn_layer="se",
                attn_kwargs={},
                ch_div=4,
                skipinit=True,
                num_features=8,
            ),
        ),
    ),
    timm_image(
        "DenseNet",
        32,
        partial(
            densenet.DenseNet,
            growth_rate=2,
            block_config=(2, 2),
            bn_size=2,
            stem_type="deep",
        ),
    ),
    timm_image(
        "PiT",
        16,
        partial(
            timm.create_model,
            "pit_ti_224",
            img_size=16,
            patch_size=4,
            stride=2,
            base_dims=(4, 4),
            depth=(1, 1),
            heads=(1, 2),
            mlp_ratio=2,
        ),
    ),
    timm_image(
        "LeViT",
        32,
        partial(
            levit.Levit,
            img_size=32,
            embed_dim=(8, 8),
            key_dim=4,
            depth=(1, 1),
            num_heads=(2, 2),
        ),
    ),
    timm_image(
        "VOLO",
        16,
        partial(
            volo.VOLO,
            [1, 1],
            img_size=16,
            patch_size=4,
            stem_hidden_dim=4,
            embed_dims=[4, 8],
            num_heads=[2, 2],
            use_mix_token=False,
            use_aux_head=False,
        ),
    ),
    timm_image(
        "ConvFormer",
        32,
        partial(
            metaformer.MetaFormer,
            depths=(1, 1),
            dims=(4, 8),
            token_mixers=metaformer.SepConv,
        ),
    ),
    timm_image(
        "ConvMixer",
        8,
        partial(convmixer.ConvMixer, dim=8, depth=2, kernel_size=3, patch_size=2),
    ),
]
SPEECH = [
    sound("Wav2Vec2", "wav2vec2"),
    sound("HuBERT", "hubert"),
    sound("WavLM", "wavlm", num_buckets=4, max_bucket_distance=8),
    sound("SEW", "sew", squeeze_factor=1),
    sound("Wav2Vec2-Conformer", "wav2vec2-conformer"),
    sound("Data2Vec audio", "data2vec-audio", num_conv_pos_embeddings=1),
]


ARCHITECTURES: List[Row] = [
    *DECODERS,
    *(row._replace(kind="State space") for row in STATE_SPACE),
    *(row._replace(kind="Mixtures of experts") for row in EXPERT_MODELS),
    *ENCODERS,
    *ENCODER_DECODERS,
    *VISION,
    *TIMM,
    *SPEECH,
]
