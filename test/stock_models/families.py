"""Further architectures of ``transformers``: families that differ from the others."""

from typing import Callable, List

import torch
import transformers
from architectures import decoder, encoder, translator
from media import (
    IMAGE,
    QUERIES,
    SEES,
    OfRows,
    behind,
    conditional,
    model,
    normal,
    opt,
    places,
    refused,
    seen,
    some,
    written_by,
)
from rows import (
    CLASSES,
    EXPERTS,
    GROUPED,
    PAIR,
    PATCHES,
    TEXT,
    VOCABULARY,
    WIDTHS,
    Batch,
    Row,
    from_config,
    logits,
    pixels,
    tokens,
)
from torch.nn import Module

# Texts

DELTA = {  # of layers that remember by a rule of their own
    **{"linear_num_value_heads": 2, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 4, "linear_value_head_dim": 4},
    "layer_types": ["linear_attention", "full_attention"],
}
BLOCKS = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}


def long(num_samples: int, length: int) -> Batch:
    """Draw texts that are long enough for blocks, and what is written for them."""
    return {
        **tokens(num_samples, 24),
        "decoder_input_ids": tokens(num_samples, length)["input_ids"],
    }


def table(num_samples: int, length: int) -> Batch:
    """Draw tokens of tables, with rows and columns."""
    kinds = torch.randint(1, 3, (num_samples, length, 7))
    kinds[..., 0] = kinds[..., 3] = 1
    return {**tokens(num_samples, length), "token_type_ids": kinds}


def entities(num_samples: int, length: int) -> Batch:
    """Draw texts, and 2 things that are mentioned in each."""
    mentions = torch.full((num_samples, 2, 3), -1)
    mentions[..., :2] = torch.randint(length, (num_samples, 2, 2))
    return {
        **tokens(num_samples, length),
        "entity_ids": torch.randint(1, 5, (num_samples, 2)),
        "entity_attention_mask": torch.ones(num_samples, 2),
        "entity_position_ids": mentions,
    }


TEXTS = [
    decoder("JetMoE", "jetmoe", {**EXPERTS, "num_key_value_heads": 2}, kv_channels=4),
    decoder("OLMo-Hybrid", "olmo_hybrid", GROUPED, **DELTA),
    decoder("DiffLlama", "diffllama", TEXT, num_key_value_heads=2, head_dim=4),
    encoder("MRA", "mra", block_per_row=1, approx_mode="full"),
    encoder("YOSO", "yoso", use_expectation=True),
    Row(
        "Encoders",
        "LUKE",
        model(
            "LukeForMaskedLM",
            "LukeConfig",
            **{**TEXT, "entity_vocab_size": 5, "entity_emb_size": 4},
        ),
        entities,
        logits,
    ),
    Row(
        "Encoders",
        "TAPAS",
        from_config("MaskedLM", "tapas", **TEXT, type_vocab_sizes=[3] * 7),
        table,
        logits,
    ),
    Row(
        "Encoders",
        "CANINE",
        from_config(
            "SequenceClassification",
            "canine",
            **TEXT,
            num_hash_functions=2,
            num_hash_buckets=8,
            local_transformer_stride=4,
        ),
        lambda n, t: tokens(n, 8),
        logits,
    ),
    translator("FSMT", "fsmt", src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY),
    Row(
        "Encoder-decoders",
        "BigBird-Pegasus",
        from_config(
            "Seq2SeqLM",
            "bigbird_pegasus",
            **{**PAIR, **BLOCKS, "max_position_embeddings": 32},
        ),
        long,
        logits,
    ),
]


# Images

IMAGES = [
    Row(
        "Vision",
        "LeViT of transformers",
        model(
            "LevitForImageClassification",
            "LevitConfig",
            **{"image_size": 32, "hidden_sizes": [8, 8, 8], "depths": [1, 1, 1]},
            **{"num_attention_heads": [1, 2, 2], "key_dim": [4, 4, 4]},
            **{"mlp_ratio": [1, 1, 1], "num_labels": CLASSES},
        ),
        pixels(32),
        logits,
    ),
    Row(
        "Vision",
        "CvT",
        model(
            "CvtForImageClassification",
            "CvtConfig",
            **{"embed_dim": [4, 8, 8], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
            **{"mlp_ratio": [1.0, 1.0, 1.0], "drop_path_rate": [0.0, 0.0, 0.0]},
            num_labels=CLASSES,
        ),
        pixels(32),
        logits,
    ),
    Row(
        "Vision",
        "GLPN",
        model(
            "GLPNForDepthEstimation",
            "GLPNConfig",
            **{"hidden_sizes": [4, 4, 4, 8], "depths": [1, 1, 1, 1]},
            **{"num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [1, 1, 1, 1]},
            decoder_hidden_size=4,
        ),
        pixels(32),
        lambda out: some(out.predicted_depth),
    ),
    Row(
        "Vision",
        "MGP-STR",
        model(
            "MgpstrForSceneTextRecognition",
            "MgpstrConfig",
            **{**WIDTHS, "image_size": [4, 8], "patch_size": 2, "mlp_ratio": 1.0},
            **{"max_token_length": 3, "num_character_labels": CLASSES},
            **{"num_bpe_labels": 4, "num_wordpiece_labels": 5},
        ),
        normal(pixel_values=(3, 4, 8)),
        lambda out: out.logits[0],
    ),
    # patches that are seen are picked by an order of their own for each sample
    Row(
        "Vision",
        "ViT-MAE",
        model(
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            **{**PATCHES, "image_size": 8, "mask_ratio": 0.5},
            **{"decoder_hidden_size": 8, "decoder_num_attention_heads": 2},
            **{"decoder_num_hidden_layers": 1, "decoder_intermediate_size": 12},
        ),
        normal(pixel_values=(3, 8, 8), noise=(16,)),
        lambda out: some(out.logits),
    ),
    # images lie one after the other in one sequence, and a mask keeps them apart
    Row(
        "Vision",
        "Pixtral",
        model("PixtralVisionModel", "PixtralVisionConfig", **PATCHES, head_dim=4),
        pixels(4),
        lambda out: some(out.last_hidden_state.unflatten(1, (-1, 4))[0]),
    ),
]


# Images and texts


def qwen() -> Module:
    """Build a model that reads flat patches, and looks at windows of them."""
    positions = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
    sizes = {"hidden_size": 8, "intermediate_size": 12, "out_hidden_size": 8}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**GROUPED, "rope_parameters": positions},
        vision_config={
            **sizes,
            **{"depth": 2, "num_heads": 2, "patch_size": 2, "window_size": 4},
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
        vision_start_token_id=1,
        vision_end_token_id=2,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def flat_patches(num_samples: int, length: int) -> Batch:
    """Draw texts with places for images, which are rows of patches."""
    batch = places(4, normal(pixel_values=(16, 24)))(num_samples, length)
    return {
        **batch,
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(num_samples, 1),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).long(),
    }


def with_kinds(inputs: Callable[[int, int], Batch]) -> Callable[[int, int], Batch]:
    """Draw which tokens belong to images, too."""

    def draw(num_samples: int, length: int) -> Batch:
        batch = inputs(num_samples, length)
        kinds = (batch["input_ids"] == IMAGE).long()
        return {**batch, "token_type_ids": kinds}

    return draw


def questions(num_samples: int, length: int) -> Batch:
    """Draw images, texts with places for them, and texts that ask about them."""
    batch = places(2, pixels(4))(num_samples, length)
    return {**batch, "qformer_input_ids": tokens(num_samples, 3)["input_ids"]}


def rendered(num_samples: int, length: int) -> Batch:
    """Draw patches with their places, and what is written about them."""
    patches = torch.randn(num_samples, 6, 10, dtype=torch.float64)
    patches[..., 0] = 1 + torch.arange(6) // 3
    patches[..., 1] = 1 + torch.arange(6) % 3
    return {
        "flattened_patches": patches,
        "attention_mask": torch.ones(num_samples, 6),
        "decoder_input_ids": tokens(num_samples, length)["input_ids"],
    }


X_CLIP = model(
    "XCLIPModel",
    "XCLIPConfig",
    text_config=TEXT,
    vision_config={
        **{
            **PATCHES,
            "num_frames": 2,
            "mit_hidden_size": 8,
            "mit_num_hidden_layers": 1,
        },
        **{"mit_intermediate_size": 8, "mit_num_attention_heads": 2},
    },
    **{"projection_dim": 8, "prompt_layers": 1, "prompt_num_attention_heads": 2},
)


def films(num_samples: int, length: int) -> Batch:
    """Draw texts and films."""
    return {
        **tokens(num_samples, length),
        **normal(pixel_values=(2, 3, 4, 4))(num_samples, length),
    }


TOGETHER = [
    Row(
        "Mixed",
        "Qwen2.5-VL",
        lambda: OfRows(qwen(), "pixel_values"),
        flat_patches,
        behind,
    ),
    Row(
        "Mixed",
        "Gemma 3 with images",
        lambda: conditional(
            "Gemma3",
            text_config=written_by("Gemma3TextConfig", head_dim=4, sliding_window=3),
            vision_config=transformers.SiglipVisionConfig(**PATCHES),
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
        )(),
        with_kinds(places(4, pixels(4))),
        behind,
    ),
    seen(
        "Idefics2",
        3,
        lambda: conditional(
            "Idefics2",
            **SEES,
            text_config=written_by("MistralConfig", head_dim=4),
            perceiver_config={
                **{"hidden_size": 8, "resampler_n_latents": 3, "resampler_depth": 1},
                **{"resampler_n_heads": 2, "resampler_head_dim": 4},
                "num_key_value_heads": 1,
            },
            image_token_id=IMAGE,
        )(),
        *(1, 3, 4, 4),
    ),
    Row(
        "Mixed",
        "InstructBLIP",
        lambda: conditional("InstructBlip", **QUERIES, text_config=opt())(),
        questions,
        behind,
    ),
    Row(
        "Mixed",
        "VisualBERT",
        model(
            "VisualBertForQuestionAnswering",
            "VisualBertConfig",
            **{**TEXT, "visual_embedding_dim": 6},
        ),
        lambda n, t: {
            **tokens(n, t),
            **normal(visual_embeds=(3, 6))(n, t),
            "attention_mask": torch.ones(n, t).long(),
            "visual_attention_mask": torch.ones(n, 3).long(),
        },
        logits,
    ),
    Row(
        "Mixed",
        "LXMERT",
        model(
            "LxmertModel",
            "LxmertConfig",
            **{name: x for name, x in TEXT.items() if name != "num_hidden_layers"},
            **{"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 6},
        ),
        lambda n, t: {
            **tokens(n, t),
            **normal(visual_feats=(3, 6), visual_pos=(3, 4))(n, t),
        },
        lambda out: some(out.vision_output),
    ),
    Row(
        "Mixed",
        "Pix2Struct",
        conditional(
            "Pix2Struct",
            text_config={
                **{"hidden_size": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1},
                **{"num_heads": 2, "vocab_size": VOCABULARY},
            },
            vision_config={
                **{**WIDTHS, "patch_embed_hidden_size": 8, "d_ff": 12, "d_kv": 4},
                "seq_len": 8,
            },
        ),
        rendered,
        logits,
    ),
    # each text looks at all films
    Row(
        "Mixed",
        "X-CLIP with texts",
        X_CLIP,
        films,
        lambda out: some(out.text_embeds),
        refused=refused("scaled_dot_product_attention"),
    ),
]


# Sound

CONFORMER = {
    **WIDTHS,
    **{"intermediate_size": 12, "subsampling_factor": 4, "num_mel_bins": 8},
    **{"subsampling_conv_channels": 4, "conv_kernel_size": 3},
    **{"max_position_embeddings": 16, "num_key_value_heads": 2},
}

HEARD: List[Row] = [
    Row(
        "Sound",
        "Parakeet",
        model(
            "ParakeetForCTC",
            "ParakeetCTCConfig",
            encoder_config=CONFORMER,
            **{"vocab_size": VOCABULARY, "pad_token_id": 0},
        ),
        normal(input_features=(16, 8)),
        logits,
    ),
]

FAMILIES: List[Row] = [*TEXTS, *IMAGES, *TOGETHER, *HEARD]
