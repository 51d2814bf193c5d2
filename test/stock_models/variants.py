"""The same architectures in other settings: padded, cached, in training, adapted."""

from functools import partial
from typing import Any, Callable, List

import peft
import timm
import torch
import transformers
from architectures import ARCHITECTURES, GPT2, GPT_SIZES, LLAMA
from families import FAMILIES
from further import FURTHER
from geometry import GEOMETRY
from handwritten import HANDWRITTEN
from media import MEDIA
from rows import (
    CLASSES,
    GROUPED,
    PAIR,
    PARTS,
    PATCHES,
    SOUND,
    STAGES,
    T5,
    TEXT,
    VOCABULARY,
    WIDTHS,
    Batch,
    Row,
    choices,
    from_config,
    itself,
    logits,
    padded,
    padded_left,
    padded_pairs,
    pairs,
    pixels,
    shifted,
    tokens,
    waves,
    with_labels,
)
from torch import Tensor
from torch.nn import Module

BERT = from_config("MaskedLM", "bert", **TEXT)
T5_MODEL = from_config("Seq2SeqLM", "t5", **T5)


def checkpointed(
    build: Callable[[], Module], use_reentrant: bool = False
) -> Callable[[], Module]:
    """Describe a model that repeats its blocks instead of keeping activations."""

    def build_checkpointed() -> Module:
        model = build()
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:  # such a block needs an input that requires a gradient
            model.enable_input_require_grads()
        return model

    return build_checkpointed


def cached(num_samples: int, length: int) -> Batch:
    """Draw tokens, and pass an empty cache that is filled."""
    cache = transformers.DynamicCache()
    return {**tokens(num_samples, length), "past_key_values": cache}


def in_two_steps(model: Module, batch: Batch) -> Any:
    """Run the first half of a text, and go on with its keys and values."""
    first, second = batch["input_ids"].tensor_split(2, dim=1)
    start = model(input_ids=first, use_cache=True)
    rest = model(input_ids=second, past_key_values=start.past_key_values)
    rest.logits = torch.cat([start.logits, rest.logits], 1)
    return rest


def embedded(num_samples: int, length: int) -> Batch:
    """Draw vectors ``[N, T, 8]`` in place of tokens."""
    shape = (num_samples, length, 8)
    return {"inputs_embeds": torch.randn(shape, dtype=torch.float64)}


def segments(num_samples: int, length: int) -> Batch:
    """Draw tokens with segments and positions of their own."""
    shape = (num_samples, length)
    return {
        **padded(num_samples, length),
        "token_type_ids": torch.randint(2, shape),
        "position_ids": torch.randint(length, shape),
    }


def answers(num_samples: int, length: int) -> Batch:
    """Draw tokens, and where the answer begins and ends."""
    ends = torch.randint(length, (2, num_samples))
    return {
        **tokens(num_samples, length),
        "start_positions": ends[0],
        "end_positions": ends[1],
    }


def answer_logits(output: Any) -> Tensor:
    """Take where an answer begins and ends, as classes ``[N, 2, T]``."""
    return torch.stack([output.start_logits, output.end_logits], 1)


def ended(num_samples: int, length: int) -> Batch:
    """Draw tokens with one token at the end of a text."""
    batch = tokens(num_samples, length)
    batch["input_ids"][:, -1] = TEXT["eos_token_id"]
    return batch


def spectrogram(num_samples: int, length: int) -> Batch:
    """Draw a spectrogram ``[N, 4, 8]`` and tokens, for Whisper."""
    return {
        "input_features": torch.randn(num_samples, 4, 8, dtype=torch.float64),
        "decoder_input_ids": tokens(num_samples, length)["input_ids"],
    }


def features(num_samples: int, length: int) -> Batch:
    """Draw a sequence of features ``[N, 4 T, 4]`` and tokens, for Speech2Text."""
    shape = (num_samples, 4 * length, 4)
    return {
        "input_features": torch.randn(shape, dtype=torch.float64),
        "attention_mask": torch.ones(shape[:2], dtype=torch.long),
        "decoder_input_ids": tokens(num_samples, length)["input_ids"],
    }


def image_and_text(num_samples: int, length: int) -> Batch:
    """Draw images and texts; the last token ends the text."""
    return {**ended(num_samples, length), **pixels(4)(num_samples, length)}


def both_embeddings(output: Any) -> Tensor:
    """Take the embeddings of images and texts, ``[N, 2, D]``."""
    return torch.stack([output.image_embeds, output.text_embeds], 1)


def captions(num_samples: int, length: int) -> Batch:
    """Draw images and texts that describe them."""
    texts = tokens(num_samples, length)["input_ids"]
    return {**pixels(4)(num_samples, length), "decoder_input_ids": texts}


def vision_encoder_decoder() -> Module:
    """Build a model that describes images."""
    encoder = transformers.ViTConfig(**PATCHES)
    decoder = transformers.GPT2Config(**TEXT, **GPT_SIZES, add_cross_attention=True)
    return transformers.VisionEncoderDecoderModel(
        transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            encoder, decoder
        )
    )


def small_clip() -> Module:
    """Build the two towers of CLIP."""
    config = transformers.CLIPConfig(
        text_config=TEXT, vision_config=PATCHES, projection_dim=4
    )
    return transformers.CLIPModel(config)


def trained_in_part() -> Module:
    """Build a GPT-2 whose last block alone is trained."""
    model = GPT2()
    model.requires_grad_(False)
    model.transformer.h[-1].requires_grad_(True)
    return model


def contrasted(num_samples: int, length: int) -> Batch:
    """Draw images and texts, and have each told from those of all other samples."""
    return {**image_and_text(num_samples, length), "return_loss": True}


CHECKPOINTS = {part: "use_reentrant=False" for part in PARTS}
COUPLED = {part: "sample" for part in PARTS}

SETTINGS = [
    Row("Decoders", "GPT-2", GPT2, padded, shifted, "padded"),
    Row("Decoders", "GPT-2", GPT2, padded_left, shifted, "padded on the left"),
    Row("Decoders", "GPT-2", GPT2, cached, shifted, "with a cache"),
    Row("Decoders", "GPT-2", GPT2, tokens, logits, "in two steps", run=in_two_steps),
    Row("Decoders", "GPT-2", GPT2, tokens, shifted, "with dropout", train=True),
    Row(
        "Decoders",
        "GPT-2",
        checkpointed(GPT2),
        tokens,
        shifted,
        "checkpointed",
        train=True,
    ),
    Row(
        "Decoders",
        "GPT-2",
        checkpointed(GPT2, True),
        tokens,
        shifted,
        "re-entrant checkpoints",
        train=True,
        refused=CHECKPOINTS,
    ),
    Row(
        "Decoders",
        "GPT-2",
        GPT2,
        with_labels(tokens, VOCABULARY, True),
        shifted,
        "loss inside",
        own_loss=True,
    ),
    Row(
        "Decoders",
        "GPT-2",
        from_config("CausalLM", "gpt2", **TEXT, **GPT_SIZES, tie_word_embeddings=False),
        tokens,
        shifted,
        "untied",
    ),
    Row(
        "Decoders",
        "GPT-2",
        from_config(
            "CausalLM",
            "gpt2",
            **TEXT,
            **GPT_SIZES,
            attn_implementation="eager",
            scale_attn_by_inverse_layer_idx=True,
            reorder_and_upcast_attn=True,
        ),
        padded,
        shifted,
        "eager attention",
    ),
    Row(
        "Decoders",
        "GPT-2",
        from_config("SequenceClassification", "gpt2", **TEXT, **GPT_SIZES),
        padded,
        logits,
        "classification",
    ),
    Row("Decoders", "GPT-2", GPT2, embedded, shifted, "from embeddings"),
    Row("Decoders", "Llama", LLAMA, padded_left, shifted, "padded on the left"),
    Row("Decoders", "Llama", LLAMA, cached, shifted, "with a cache"),
    Row("Decoders", "Llama", LLAMA, tokens, logits, "in two steps", run=in_two_steps),
    Row(
        "Decoders",
        "Llama",
        from_config("CausalLM", "llama", **GROUPED, tie_word_embeddings=True),
        tokens,
        shifted,
        "tied",
    ),
    Row(
        "Decoders",
        "Llama",
        from_config(
            "CausalLM",
            "llama",
            **GROUPED,
            attn_implementation="eager",
            attention_dropout=0.2,
        ),
        tokens,
        shifted,
        "with dropout",
        train=True,
    ),
    Row(
        "Decoders",
        "Llama",
        checkpointed(LLAMA),
        tokens,
        shifted,
        "checkpointed",
        train=True,
    ),
    Row(
        "Decoders",
        "Llama",
        LLAMA,
        with_labels(tokens, VOCABULARY, True),
        shifted,
        "loss inside",
        own_loss=True,
    ),
    Row(
        "Decoders",
        "Llama",
        from_config("SequenceClassification", "llama", **GROUPED),
        padded,
        logits,
        "classification",
    ),
    Row(
        "Decoders",
        "OPT",
        from_config("CausalLM", "opt", **TEXT, ffn_dim=12, word_embed_proj_dim=8),
        padded,
        shifted,
        "padded, with dropout",
        train=True,
    ),
    Row(
        "Decoders",
        "BLOOM",
        from_config("CausalLM", "bloom", **TEXT, n_head=2, n_layer=2),
        padded_left,
        shifted,
        "padded on the left",
    ),
    Row("Encoders", "BERT", BERT, segments, logits, "padded, with segments"),
    Row("Encoders", "BERT", BERT, padded, logits, "padded, with dropout", train=True),
    Row(
        "Encoders",
        "BERT",
        checkpointed(BERT),
        padded,
        logits,
        "checkpointed",
        train=True,
    ),
    Row(
        "Encoders",
        "BERT",
        from_config("SequenceClassification", "bert", **TEXT),
        padded,
        logits,
        "classification",
    ),
    Row(
        "Encoders",
        "BERT",
        from_config("SequenceClassification", "bert", **TEXT),
        with_labels(tokens, CLASSES, False),
        logits,
        "classification, loss inside",
        own_loss=True,
    ),
    Row(
        "Encoders",
        "BERT",
        from_config("TokenClassification", "bert", **TEXT),
        tokens,
        logits,
        "token classification",
    ),
    Row(
        "Encoders",
        "BERT",
        from_config("MultipleChoice", "bert", **TEXT),
        choices,
        logits,
        "multiple choice",
    ),
    Row(
        "Encoders",
        "BERT",
        from_config("QuestionAnswering", "bert", **{**TEXT, "num_labels": 2}),
        tokens,
        answer_logits,
        "question answering",
    ),
    Row(
        "Encoders",
        "BERT",
        from_config("QuestionAnswering", "bert", **{**TEXT, "num_labels": 2}),
        answers,
        answer_logits,
        "question answering, loss inside",
        own_loss=True,
    ),
    Row(
        "Encoders",
        "RoBERTa",
        from_config("SequenceClassification", "roberta", **TEXT),
        tokens,
        logits,
        "classification, with dropout",
        train=True,
    ),
    Row(
        "Encoders",
        "DeBERTa-v2",
        from_config(
            "SequenceClassification",
            "deberta-v2",
            **TEXT,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            share_att_key=True,
        ),
        padded,
        logits,
        "classification, padded",
    ),
    Row(
        "Encoders",
        "BigBird",
        from_config(
            "MaskedLM",
            "big_bird",
            **{**TEXT, "max_position_embeddings": 64},
            block_size=2,
            num_random_blocks=1,
        ),
        lambda n, t: tokens(n, 8 * t),
        lambda out: out.logits[:, ::8],
        "sparse attention",
    ),
    Row(
        "Encoder-decoders",
        "T5",
        T5_MODEL,
        padded_pairs,
        logits,
        "padded, with dropout",
        train=True,
    ),
    Row(
        "Encoder-decoders",
        "T5",
        checkpointed(T5_MODEL),
        padded_pairs,
        logits,
        "checkpointed",
        train=True,
    ),
    Row(
        "Encoder-decoders",
        "T5",
        T5_MODEL,
        with_labels(tokens, VOCABULARY, True),
        logits,
        "loss inside",
        own_loss=True,
    ),
    Row(
        "Encoder-decoders",
        "BART",
        from_config("Seq2SeqLM", "bart", **PAIR),
        padded_pairs,
        logits,
        "padded, with dropout",
        train=True,
    ),
    Row(
        "Encoder-decoders",
        "BART",
        from_config("SequenceClassification", "bart", **PAIR),
        ended,
        logits,
        "classification",
    ),
    Row(
        "Vision",
        "ViT",
        from_config(
            "ImageClassification",
            "vit",
            **PATCHES,
            num_labels=CLASSES,
            hidden_dropout_prob=0.2,
            attention_probs_dropout_prob=0.2,
        ),
        pixels(4),
        logits,
        "with dropout",
        train=True,
    ),
    Row(
        "Vision",
        "ViT",
        from_config("ImageClassification", "vit", **PATCHES, num_labels=CLASSES),
        with_labels(pixels(4), CLASSES, False),
        logits,
        "loss inside",
        own_loss=True,
    ),
    Row(
        "Vision",
        "SegFormer",
        from_config(
            "SemanticSegmentation",
            "segformer",
            **STAGES,
            num_labels=CLASSES,
            num_encoder_blocks=2,
            sr_ratios=[2, 1],
            patch_sizes=[3, 3],
            strides=[2, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[1, 1],
            decoder_hidden_size=8,
        ),
        pixels(8),
        lambda out: out.logits.movedim(1, -1)[:, :2],
        "segmentation",
    ),
    Row(
        "Speech",
        "Wav2Vec2",
        from_config(
            "AudioClassification", "wav2vec2", **{**SOUND, "hidden_dropout": 0.2}
        ),
        waves,
        logits,
        "classification, with dropout",
        train=True,
    ),
    Row(
        "Speech",
        "Whisper",
        from_config(
            "SpeechSeq2Seq",
            "whisper",
            **PAIR,
            num_mel_bins=4,
            max_source_positions=4,
            max_target_positions=16,
        ),
        spectrogram,
        logits,
    ),
    Row(
        "Speech",
        "Speech2Text",
        from_config(
            "SpeechSeq2Seq",
            "speech_to_text",
            **PAIR,
            input_feat_per_channel=4,
            conv_channels=8,
            num_conv_layers=2,
            conv_kernel_sizes=[3, 3],
        ),
        features,
        logits,
    ),
    Row(
        "Speech",
        "AST",
        from_config(
            "AudioClassification",
            "audio-spectrogram-transformer",
            **WIDTHS,
            intermediate_size=12,
            num_labels=CLASSES,
            patch_size=2,
            frequency_stride=2,
            time_stride=2,
            max_length=4,
            num_mel_bins=4,
        ),
        lambda n, t: {"input_values": torch.randn(n, 4, 4, dtype=torch.float64)},
        logits,
    ),
    Row("Mixed", "CLIP", small_clip, image_and_text, both_embeddings),
    Row(
        "Mixed",
        "CLIP",
        small_clip,
        contrasted,
        both_embeddings,
        "contrastive loss",
        own_loss=True,
        refused=COUPLED,
    ),
    Row("Decoders", "GPT-2", trained_in_part, tokens, shifted, "trained in part"),
    Row(
        "Vision (timm)",
        "ViT (timm)",
        partial(
            timm.create_model,
            "vit_tiny_patch16_224",
            img_size=4,
            patch_size=2,
            embed_dim=8,
            depth=2,
            num_heads=2,
            num_classes=CLASSES,
            drop_path_rate=0.5,
        ),
        pixels(4, "x"),
        itself,
        "with stochastic depth",
        train=True,
    ),
    Row("Mixed", "ViT and GPT-2", vision_encoder_decoder, captions, logits),
]

# Adapters


def adapted(base: Callable[[], Module], config: Callable) -> Callable[[], Module]:
    """Describe a frozen model with an adapter.

    Args:
        base: Builds the model.
        config: Makes the configuration of the adapter.

    Returns:
        Function that builds it.
    """
    return lambda: peft.get_peft_model(base(), config())


LORA = {"r": 2, "lora_alpha": 4}


def adapter(
    setting: str,
    config: Callable[..., Any],
    base: Callable[[], Module] = LLAMA,
    task: str = "CAUSAL_LM",
    train: bool = False,
    **options: Any,
) -> Row:
    """Describe an adapter of a frozen model."""
    name = "GPT-2" if base is GPT2 else "T5" if base is T5_MODEL else "Llama"
    inputs, predict = (pairs, logits) if base is T5_MODEL else (tokens, shifted)
    build = adapted(base, partial(config, task_type=task, **options))
    return Row("Adapters", name, build, inputs, predict, setting, train=train)


ADAPTERS = [
    adapter("LoRA", peft.LoraConfig, **LORA),
    adapter("LoRA", peft.LoraConfig, GPT2, **LORA, fan_in_fan_out=True),
    adapter(
        "LoRA, all layers, with dropout",
        peft.LoraConfig,
        train=True,
        **LORA,
        target_modules="all-linear",
        lora_dropout=0.2,
        bias="lora_only",
    ),
    adapter(
        "LoRA, embeddings",
        peft.LoraConfig,
        **LORA,
        target_modules=["embed_tokens", "q_proj"],
    ),
    adapter("LoRA, trained head", peft.LoraConfig, **LORA, modules_to_save=["lm_head"]),
    adapter("DoRA", peft.LoraConfig, **LORA, use_dora=True),
    adapter("LoRA", peft.LoraConfig, T5_MODEL, "SEQ_2_SEQ_LM", **LORA),
    adapter("AdaLoRA", peft.AdaLoraConfig, init_r=2, total_step=10),
    adapter("IA3", peft.IA3Config),
    adapter("LoHa", peft.LoHaConfig, r=2, target_modules=["q_proj", "v_proj"]),
    adapter("LoKr", peft.LoKrConfig, r=2, target_modules=["q_proj", "v_proj"]),
    adapter("OFT", peft.OFTConfig, oft_block_size=4, target_modules=["q_proj"]),
    adapter("VeRA", peft.VeraConfig, r=2, target_modules=["q_proj", "o_proj"]),
    adapter("HRA", peft.HRAConfig, r=2, target_modules=["q_proj", "v_proj"]),
    adapter("FRoD", peft.FrodConfig, target_modules=["q_proj", "v_proj"]),
    adapter(
        "VeLoRA", peft.LoraConfig, **LORA, velora_config=peft.VeloraConfig(num_groups=2)
    ),
    adapter("Lily", peft.LilyConfig, r=2, target_modules=["q_proj", "v_proj"])._replace(
        refused={part: "samples have met in `mean`" for part in PARTS}
    ),
    adapter("layer norms", peft.LNTuningConfig),
    adapter("prompt", peft.PromptTuningConfig, num_virtual_tokens=2),
    adapter(
        "P-tuning",
        peft.PromptEncoderConfig,
        num_virtual_tokens=2,
        encoder_hidden_size=4,
    ),
    adapter("prefix", peft.PrefixTuningConfig, num_virtual_tokens=2),
    adapter(
        "prefix, projected",
        peft.PrefixTuningConfig,
        num_virtual_tokens=2,
        prefix_projection=True,
        encoder_hidden_size=4,
    ),
    adapter(
        "Llama-Adapter", peft.AdaptionPromptConfig, adapter_len=2, adapter_layers=1
    ),
]

ROWS: List[Row] = [
    *ARCHITECTURES,
    *FURTHER,
    *MEDIA,
    *FAMILIES,
    *SETTINGS,
    *ADAPTERS,
    *HANDWRITTEN,
    *GEOMETRY,
]
