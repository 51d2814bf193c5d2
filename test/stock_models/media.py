"""Further architectures: of detection, depth, video, sound, and several of these."""

from typing import Any, Callable, List

import torch
import transformers
from further import image_and_text
from rows import (
    CLASSES,
    GROUPED,
    PAIR,
    PAIRED_WIDTHS,
    PARTS,
    PATCHES,
    T5,
    TEXT,
    VOCABULARY,
    WIDTHS,
    Batch,
    Row,
    logits,
    pixels,
    tokens,
)
from torch import Tensor
from torch.nn import Module

IMAGE = VOCABULARY - 1  # the token in whose place there is a part of an image


def model(name: str, config: str, **sizes: Any) -> Callable[[], Module]:
    """Describe a model of ``transformers`` by the names of its classes.

    Args:
        name: Name of the model's class.
        config: Name of the configuration's class.
        sizes: The configuration.

    Returns:
        Function that builds it.
    """

    def build() -> Module:
        return getattr(transformers, name)(getattr(transformers, config)(**sizes))

    return build


def some(output: Tensor) -> Tensor:
    """Take 6 numbers of each sample, as 2 predictions of 3 classes."""
    flat = output.flatten(1)
    return flat[:, :: flat.shape[1] // 6][:, :6].unflatten(1, (2, 3))


def normal(**shapes: Any) -> Callable[[int, int], Batch]:
    """Draw numbers: a tensor of each shape for each sample, by name."""

    def draw(num_samples: int, length: int) -> Batch:
        return {
            name: torch.randn(num_samples, *shape, dtype=torch.float64)
            for name, shape in shapes.items()
        }

    return draw


def video(name: str = "pixel_values") -> Callable[[int, int], Batch]:
    """Draw videos of 2 images."""
    return normal(**{name: (2, 3, 4, 4)})


def places(
    count: int, inputs: Callable[[int, int], Batch], token: int = IMAGE
) -> Callable[[int, int], Batch]:
    """Draw texts with places for what is no text, which is drawn as well."""

    def draw(num_samples: int, length: int) -> Batch:
        text = torch.randint(3, min(token, IMAGE - 1), (num_samples, length))
        ids = torch.cat([torch.full((num_samples, count), token), text], 1)
        return {"input_ids": ids, **inputs(num_samples, length)}

    return draw


def behind(output: Any) -> Tensor:
    """Take the logits of the last 3 tokens."""
    return output.logits[:, -3:]


class OfRows(Module):
    """A model with several rows for each sample, on samples that have an axis of rows.

    Attributes:
        inner: The model.
        names: Names of the inputs that have several rows.
    """

    def __init__(self, inner: Module, *names: str):
        """Store the model."""
        super().__init__()
        self.inner, self.names = inner, names

    def forward(self, **batch: Tensor) -> Any:
        """Run the model, on rows that lie one after the other."""
        return self.inner(
            **{
                name: x.flatten(0, 1) if name in self.names else x
                for name, x in batch.items()
            }
        )


def refused(operation: str) -> Any:
    """Name the operation in which samples meet, wherever they are asked for."""
    return {part: f"samples have met in `{operation}`" for part in PARTS}


# Detection

DETECTION = {
    **PAIRED_WIDTHS,
    "decoder_layers": 2,
    "num_queries": 3,
    "num_labels": 2,
    "use_timm_backbone": False,
    "backbone": None,
}


def resnet(*scales: int) -> Any:
    """Describe a small ResNet, and the scales that are taken from it."""
    return transformers.ResNetConfig(
        embedding_size=4,
        hidden_sizes=[4, 4, 4, 8],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=[f"stage{scale}" for scale in scales],
    )


def detector(name: str, classes: str, *scales: int, size: int = 32, **more: Any) -> Row:
    """Describe a model that finds objects; its classes begin with the same name."""
    config = {**DETECTION, "backbone_config": resnet(*scales), **more}
    build = model(f"{classes}ForObjectDetection", f"{classes}Config", **config)
    return Row("Vision", name, build, pixels(size), logits)


WINDOWS = {
    **{"hidden_size": 8, "num_attention_heads": 2, "mlp_ratio": 1},
    **{"image_size": 16, "patch_size": 2},
}
WINDOWED = {
    "d_model": 8,
    "decoder_ffn_dim": 12,
    "decoder_layers": 1,
    "decoder_self_attention_heads": 2,
    "decoder_cross_attention_heads": 2,
    "num_queries": 3,
    "group_detr": 2,
    "dropout": 0.0,
    "num_labels": CLASSES,
    "decoder_n_points": 2,
}


def lw_detr() -> Module:
    """Build a detector whose backbone looks at windows."""
    backbone = transformers.LwDetrViTConfig(
        **WINDOWS,
        num_hidden_layers=2,
        pretrain_image_size=16,
        num_windows=4,
        window_block_indices=[0],
        out_features=["stage1", "stage2"],
    )
    config = transformers.LwDetrConfig(
        backbone_config=backbone, **WINDOWED, projector_scale_factors=[1.0]
    )
    return transformers.LwDetrForObjectDetection(config)


def rf_detr() -> Module:
    """Build a detector whose backbone gives each window a token."""
    backbone = transformers.RfDetrDinov2Config(
        **WINDOWS,
        num_hidden_layers=3,
        num_windows=2,
        out_features=["stage2", "stage3"],
    )
    config = transformers.RfDetrConfig(
        backbone_config=backbone, **WINDOWED, c2f_num_blocks=1
    )
    return transformers.RfDetrForObjectDetection(config)


def grounding_dino() -> Module:
    """Build a detector that is told by a text what to look for."""
    backbone = transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=4,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=2,
        out_features=["stage1", "stage2"],
    )
    config = transformers.GroundingDinoConfig(
        **{**DETECTION, "d_model": 32, "encoder_attention_heads": 4},
        backbone_config=backbone,
        text_config=transformers.BertConfig(**TEXT),
        num_feature_levels=2,
        max_text_len=8,
        disable_custom_kernels=True,
    )
    return transformers.GroundingDinoForObjectDetection(config)


def owl() -> Module:
    """Build a detector that is told by texts what to look for in an image."""
    config = transformers.Owlv2Config(
        text_config={**TEXT, "projection_dim": 8},
        vision_config=PATCHES,
        projection_dim=8,
    )
    return transformers.Owlv2ForObjectDetection(config)


def searched(num_samples: int, length: int) -> Batch:
    """Draw images, and 2 texts for each."""
    texts = tokens(2 * num_samples, length)["input_ids"]
    return {**pixels(4)(num_samples, length), "input_ids": texts.unflatten(0, (-1, 2))}


SAM = model(
    "SamModel",
    "SamConfig",
    vision_config={
        **WIDTHS,
        **{"output_channels": 8, "image_size": 16, "patch_size": 2, "window_size": 4},
        **{"global_attn_indexes": [1], "mlp_dim": 12, "num_pos_feats": 4},
    },
    prompt_encoder_config={
        **{"hidden_size": 8, "image_size": 16, "patch_size": 2},
        "mask_input_channels": 4,
    },
    mask_decoder_config={
        **WIDTHS,
        **{"num_hidden_layers": 1, "mlp_dim": 12},
        **{"iou_head_hidden_dim": 8, "iou_head_depth": 2},
    },
)


def prompted(num_samples: int, length: int) -> Batch:
    """Draw images, and 2 points in each."""
    points = 16 * torch.rand(num_samples, 1, 2, 2, dtype=torch.float64)
    return {**pixels(16)(num_samples, length), "input_points": points}


VISION = [
    detector("Conditional DETR", "ConditionalDetr", 4),
    detector(
        "Deformable DETR",
        "DeformableDetr",
        *(3, 4),
        size=64,
        d_model=32,
        num_feature_levels=2,
        encoder_n_points=2,
        decoder_n_points=2,
        disable_custom_kernels=True,
        two_stage=True,
        two_stage_num_proposals=5,
        with_box_refine=True,
    ),
    Row("Vision", "LW-DETR", lw_detr, pixels(16), logits),
    # tokens that parameters alone determine go to windows of other samples than the
    # rows in which they met positions
    Row(
        "Vision",
        "RF-DETR",
        rf_detr,
        pixels(16),
        logits,
        refused=refused("scaled_dot_product_attention"),
    ),
    Row(
        "Vision",
        "YOLOS",
        model(
            "YolosForObjectDetection",
            "YolosConfig",
            **{**PATCHES, "image_size": [8, 8]},
            num_detection_tokens=3,
            num_labels=2,
        ),
        pixels(8),
        logits,
    ),
    Row("Vision", "SAM", SAM, prompted, lambda out: some(out.pred_masks)),
    Row(
        "Vision",
        "Hiera",
        model(
            "HieraForImageClassification",
            "HieraConfig",
            **{"embed_dim": 4, "image_size": [16, 16], "patch_size": [3, 3]},
            **{"patch_stride": [2, 2], "patch_padding": [1, 1], "mlp_ratio": 1.0},
            **{"depths": [1, 1], "num_heads": [1, 2], "query_stride": [2, 2]},
            **{"masked_unit_size": [2, 2], "masked_unit_attention": [True, False]},
            **{"num_query_pool": 1, "num_labels": CLASSES},
        ),
        pixels(16),
        logits,
    ),
    Row(
        "Vision",
        "Swin2SR",
        model(
            "Swin2SRForImageSuperResolution",
            "Swin2SRConfig",
            **{"image_size": 8, "patch_size": 1, "embed_dim": 8, "depths": [2]},
            **{"num_heads": [2], "window_size": 4, "mlp_ratio": 1.0, "upscale": 2},
        ),
        pixels(8),
        lambda out: some(out.reconstruction),
    ),
]


# Video

CLIPS = {**PATCHES, "num_labels": CLASSES}


def in_pairs(output: Any) -> Tensor:
    """Take the features of each sample's 2 frames."""
    return output.pooler_output.unflatten(0, (-1, 2))


X_CLIP = model(
    "XCLIPVisionModel",
    "XCLIPVisionConfig",
    **PATCHES,
    num_frames=2,
    mit_hidden_size=8,
    mit_intermediate_size=8,
    mit_num_hidden_layers=1,
    mit_num_attention_heads=2,
)


def frames(num_samples: int, length: int) -> Batch:
    """Draw the images of videos, one after the other."""
    return {"pixel_values": video()(num_samples, length)["pixel_values"].flatten(0, 1)}


VIDEO = [
    Row(
        "Video",
        "VideoMAE",
        model(
            "VideoMAEForVideoClassification",
            "VideoMAEConfig",
            **{**CLIPS, "num_frames": 2, "tubelet_size": 1},
        ),
        video(),
        logits,
    ),
    Row(
        "Video",
        "ViViT",
        model(
            "VivitForVideoClassification",
            "VivitConfig",
            **{**CLIPS, "num_frames": 2, "tubelet_size": [1, 2, 2]},
        ),
        video(),
        logits,
    ),
    Row(
        "Video",
        "V-JEPA 2",
        model(
            "VJEPA2ForVideoClassification",
            "VJEPA2Config",
            **{**WIDTHS, "num_hidden_layers": 1, "patch_size": 2, "crop_size": 4},
            **{"frames_per_clip": 2, "tubelet_size": 1, "mlp_ratio": 1},
            **{"pred_hidden_size": 8, "pred_num_attention_heads": 2},
            **{"pred_num_hidden_layers": 1, "num_pooler_layers": 1},
            num_labels=CLASSES,
        ),
        video("pixel_values_videos"),
        logits,
    ),
    # the token of each frame is computed from parameters alone; those that are kept
    # are the ones of the first rows, which are frames of the first samples
    Row(
        "Video",
        "TimeSformer",
        model(
            "TimesformerForVideoClassification",
            "TimesformerConfig",
            **{**CLIPS, "num_frames": 2},
        ),
        video(),
        logits,
        refused=refused("matmul"),
    ),
    Row("Video", "X-CLIP", lambda: OfRows(X_CLIP(), "pixel_values"), video(), in_pairs),
    Row(
        "Video",
        "X-CLIP",
        X_CLIP,
        frames,
        in_pairs,
        "frames on axis 0",
        run=lambda module, batch: module(**batch),
        refused=refused("scaled_dot_product_attention"),
    ),
    Row(
        "Video",
        "Video-LLaVA",
        lambda: transformers.VideoLlavaForConditionalGeneration(
            transformers.VideoLlavaConfig(
                text_config=transformers.LlamaConfig(**GROUPED),
                vision_config=transformers.CLIPVisionConfig(**PATCHES),
                image_token_index=IMAGE,
                video_token_index=IMAGE - 1,
                vision_feature_layer=-1,
            )
        ),
        places(10, video("pixel_values_videos"), IMAGE - 1),
        behind,
    ),
]


# Sound

CODES = {
    **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"ffn_dim": 12, "vocab_size": VOCABULARY, "num_codebooks": 2},
    **{"pad_token_id": IMAGE, "bos_token_id": IMAGE, "max_position_embeddings": 16},
}
BARK = {
    **{"block_size": 16, "input_vocab_size": VOCABULARY, "num_layers": 1},
    **{"output_vocab_size": VOCABULARY, "num_heads": 2, "hidden_size": 8},
}
DIA = {
    **{"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4},
    "vocab_size": VOCABULARY,
}


def musicgen() -> Module:
    """Build a model that composes music for a text."""
    config = transformers.MusicgenConfig(
        text_encoder=transformers.T5Config(**{**T5, "num_layers": 1}),
        audio_encoder=transformers.EncodecConfig(
            **{"num_filters": 4, "hidden_size": 8, "codebook_size": 8},
            **{"upsampling_ratios": [2, 2], "num_lstm_layers": 1},
        ),
        decoder=transformers.MusicgenDecoderConfig(**CODES),
    )
    return transformers.MusicgenForConditionalGeneration(config)


def score(num_samples: int, length: int) -> Batch:
    """Draw texts, and music in 2 codebooks."""
    codes = torch.randint(IMAGE, (num_samples, 2, length))
    return {**tokens(num_samples, length), "decoder_input_ids": codes}


def books(output: Any) -> Tensor:
    """Take the logits of each sample's 2 codebooks, at the last 2 positions."""
    return output.logits[:, -2:].unflatten(0, (-1, 2))


def spoken(num_samples: int, length: int) -> Batch:
    """Draw texts, and what is said in 2 channels."""
    codes = torch.randint(VOCABULARY, (num_samples, length, 2))
    return {**tokens(num_samples, length), "decoder_input_ids": codes}


SOUND = [
    Row(
        "Sound",
        "MusicGen",
        lambda: OfRows(musicgen(), "decoder_input_ids"),
        score,
        books,
    ),
    Row(
        "Sound",
        "MusicGen",
        model("MusicgenForCausalLM", "MusicgenDecoderConfig", **CODES),
        lambda n, t: {"input_ids": torch.randint(IMAGE, (2 * n, t))},
        books,
        "codebooks on axis 0",
        run=lambda module, batch: module(**batch),
        refused=refused("add"),
    ),
    Row(
        "Sound",
        "Bark (fine)",
        model(
            "BarkFineModel",
            "BarkFineConfig",
            **{**BARK, "n_codes_total": 3, "n_codes_given": 1},
        ),
        lambda n, t: {"input_ids": torch.randint(VOCABULARY, (n, t, 3))},
        behind,
        run=lambda module, batch: module(codebook_idx=1, **batch),
    ),
    Row(
        "Sound",
        "Dia",
        model(
            "DiaForConditionalGeneration",
            "DiaConfig",
            encoder_config=DIA,
            decoder_config={
                **{**DIA, "cross_num_attention_heads": 2, "cross_head_dim": 4},
                **{"cross_num_key_value_heads": 2, "cross_hidden_size": 8},
                "num_channels": 2,
            },
            delay_pattern=[0, 1],
        ),
        spoken,
        books,
    ),
    Row(
        "Sound",
        "Moshi",
        model("MoshiForCausalLM", "MoshiConfig", **GROUPED, head_dim=4, ffn_dim=12),
        tokens,
        behind,
    ),
    Row(
        "Sound",
        "EnCodec",
        model(
            "EncodecModel",
            "EncodecConfig",
            **{"num_filters": 4, "hidden_size": 8, "codebook_size": 8},
            **{"upsampling_ratios": [2, 2], "num_lstm_layers": 1},
        ),
        normal(input_values=(1, 32)),
        lambda out: some(out.audio_values),
    ),
    Row(
        "Sound",
        "DAC",
        model(
            "DacModel",
            "DacConfig",
            **{"encoder_hidden_size": 4, "downsampling_ratios": [2, 2]},
            **{"decoder_hidden_size": 8, "n_codebooks": 2, "codebook_size": 8},
            **{"codebook_dim": 4, "upsampling_ratios": [2, 2]},
        ),
        normal(input_values=(1, 64)),
        lambda out: some(out.audio_values),
    ),
    Row(
        "Sound",
        "UnivNet",
        model(
            "UnivNetModel",
            "UnivNetConfig",
            **{"model_in_channels": 4, "model_hidden_channels": 4, "num_mel_bins": 4},
            **{"resblock_kernel_sizes": [3], "resblock_stride_sizes": [2]},
            **{"resblock_dilation_sizes": [[1, 3]], "kernel_predictor_num_blocks": 1},
            **{"kernel_predictor_hidden_channels": 4, "kernel_predictor_conv_size": 3},
        ),
        normal(input_features=(4, 4), noise_sequence=(4, 4)),
        lambda out: some(out.waveforms),
    ),
    Row(
        "Sound",
        "CLAP",
        model(
            "ClapAudioModelWithProjection",
            "ClapAudioConfig",
            **{"window_size": 2, "num_mel_bins": 8, "spec_size": 16, "patch_size": 2},
            **{"patch_stride": [2, 2], "patch_embeds_hidden_size": 4, "depths": [1, 1]},
            **{"num_attention_heads": [1, 2], "hidden_size": 8, "projection_dim": 4},
        ),
        normal(input_features=(1, 16, 8)),
        lambda out: out.audio_embeds,
    ),
]


# Images and texts

SEES = {"vision_config": PATCHES}
QUERIES = {
    **SEES,
    "qformer_config": {**TEXT, "encoder_hidden_size": 8},
    "num_query_tokens": 2,
    "image_token_index": IMAGE,
}


def written_by(config: str, **more: Any) -> Any:
    """Describe the part of a model that writes; its sizes are the usual ones."""
    return getattr(transformers, config)(**{**GROUPED, **more})


def opt() -> Any:
    """Describe a decoder that knows no groups of heads."""
    return transformers.OPTConfig(**TEXT, ffn_dim=12, word_embed_proj_dim=8)


def seen(name: str, count: int, build: Callable[[], Module], *shape: int) -> Row:
    """Describe a model that reads images, in the place of some tokens."""
    images = normal(pixel_values=shape or (3, 4, 4))
    return Row("Mixed", name, build, places(count, images), behind)


def conditional(name: str, **config: Any) -> Callable[[], Module]:
    """Describe a model for texts about something else."""
    return model(f"{name}ForConditionalGeneration", f"{name}Config", **config)


MIXED = [
    Row(
        "Mixed",
        "Grounding DINO",
        grounding_dino,
        lambda n, t: {**pixels(16)(n, t), **tokens(n, t)},
        lambda out: out.logits[..., :4],
        refused=refused("max"),
    ),
    Row(
        "Mixed",
        "OWLv2",
        lambda: OfRows(owl(), "input_ids"),
        searched,
        lambda out: some(out.logits),
    ),
    seen("BLIP-2", 2, lambda: conditional("Blip2", **QUERIES, text_config=opt())()),
    seen(
        "PaliGemma",
        4,
        lambda: conditional(
            "PaliGemma",
            text_config=written_by("GemmaConfig", head_dim=4),
            vision_config=transformers.SiglipVisionConfig(**PATCHES),
            image_token_index=IMAGE,
            projection_dim=8,
        )(),
    ),
    seen(
        "Idefics3",
        1,
        lambda: conditional(
            "Idefics3",
            **SEES,
            text_config=written_by("LlamaConfig"),
            scale_factor=2,
            image_token_id=IMAGE,
        )(),
        *(1, 3, 4, 4),
    ),
    Row(
        "Mixed",
        "GIT",
        model("GitForCausalLM", "GitConfig", **TEXT, **SEES),
        image_and_text,
        behind,
    ),
    Row(
        "Mixed",
        "FLAVA",
        model(
            "FlavaModel",
            "FlavaConfig",
            text_config=TEXT,
            image_config=PATCHES,
            multimodal_config={**WIDTHS, "intermediate_size": 12},
            hidden_size=8,
            projection_dim=4,
        ),
        image_and_text,
        lambda out: some(out.multimodal_embeddings),
    ),
    Row(
        "Mixed",
        "UDOP",
        conditional(
            "Udop", **T5, image_size=4, patch_size=2, max_2d_position_embeddings=16
        ),
        lambda n, t: {
            **image_and_text(n, t),
            "bbox": torch.rand(n, t, 4).sort(-1)[0],
            "decoder_input_ids": tokens(n, 3)["input_ids"],
        },
        logits,
    ),
    Row(
        "Mixed",
        "Florence-2",
        lambda: conditional(
            "Florence2",
            text_config=transformers.BartConfig(**PAIR),
            vision_config={
                **{"depths": [1, 1], "patch_size": [3, 3], "patch_stride": [2, 2]},
                **{"patch_padding": [1, 1], "patch_prenorm": [False, True]},
                **{"embed_dim": [4, 8], "num_heads": [1, 2], "num_groups": [1, 2]},
                **{"window_size": 2, "projection_dim": 8},
                **{"max_position_embeddings": 10, "max_temporal_embeddings": 4},
            },
            image_token_id=IMAGE,
        )(),
        lambda n, t: {
            **places(5, pixels(8))(n, t),
            "decoder_input_ids": tokens(n, 3)["input_ids"],
        },
        logits,
    ),
    Row(
        "Mixed",
        "Autoformer",
        model(
            "AutoformerModel",
            "AutoformerConfig",
            **PAIRED_WIDTHS,
            **{"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
            **{"num_time_features": 2, "moving_average": 3, "label_length": 4},
        ),
        normal(
            past_values=(10,),
            past_time_features=(10, 2),
            past_observed_mask=(10,),
            future_values=(4,),
            future_time_features=(4, 2),
        ),
        lambda out: some(out.last_hidden_state),
        refused=refused("mul"),  # of a head's values with another sample's weights
    ),
]

MEDIA: List[Row] = [*VISION, *VIDEO, *SOUND, *MIXED]
