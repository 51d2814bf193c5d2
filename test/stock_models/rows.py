"""What a row of the table of stock models is, and what goes in and comes out.

Sizes are as small as an architecture allows, and such that axes have the same size as
often as possible: 4 patches, heads of 4 features.
"""

from typing import Any, Callable, Dict, NamedTuple, Optional

import torch
import transformers
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

Batch = Dict[str, Any]

VOCABULARY = 7
CLASSES = 3
IGNORED = -100  # the target of a row that does not count

# What is tested, and may be refused
PARTS = ["first order", "side effects", "DiagGGNExact", "Kronecker"]


class Row(NamedTuple):
    """A row: a model in a setting.

    Attributes:
        kind: What sort of model it is, a heading in the documentation.
        name: Name of the architecture.
        build: Makes the model, with random parameters.
        inputs: Draws a batch of N samples of length T: keyword arguments of the model.
        predict: Maps the model's output to predictions ``[N, *, C]``.
        setting: In which way the model is used.
        run: Runs the model on a batch; ``None`` to call it.
        train: Whether the model is in training mode, but for BatchNorm.
        own_loss: Whether the model computes the loss, the mean over all samples.
        refused: For one of the ``PARTS``, what the error that refuses it says.
    """

    kind: str
    name: str
    build: Callable[[], Module]
    inputs: Callable[[int, int], Batch]
    predict: Callable[[Any], Tensor]
    setting: str = ""
    run: Optional[Callable[[Module, Batch], Any]] = None
    train: bool = False
    own_loss: bool = False
    refused: Dict[str, str] = {}  # noqa: B006

    @property
    def id(self) -> str:
        """Name the row."""
        return "-".join(filter(None, [self.name, self.setting])).replace(" ", "_")

    def model(self) -> Module:
        """Build the model; equal parameters every time.

        Initializations of zero and one are moved: they would hide mistakes.

        Returns:
            The model in double precision.
        """
        torch.manual_seed(0)
        model = self.build().double().train(self.train)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.1 * torch.randn_like(param))
        return model

    def output(self, model: Module, batch: Batch) -> Any:
        """Run the model; equal random numbers every time.

        Args:
            model: The model, or one that computes the same.
            batch: What it is called with.

        Returns:
            Its output.
        """
        torch.manual_seed(1)
        return model(**batch) if self.run is None else self.run(model, batch)


# What goes in


def tokens(num_samples: int, length: int) -> Batch:
    """Draw tokens ``[N, T]``; the first ones of the vocabulary have a meaning."""
    return {"input_ids": torch.randint(3, VOCABULARY, (num_samples, length))}


def padded(num_samples: int, length: int) -> Batch:
    """Draw tokens of different lengths, with a mask; padding is on the right."""
    batch = tokens(num_samples, length)
    lengths = length - torch.arange(num_samples) % (length - 1)
    mask = torch.arange(length) < lengths.unsqueeze(1)
    ids = batch["input_ids"].where(mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long()}


def padded_left(num_samples: int, length: int) -> Batch:
    """Draw tokens of different lengths, with a mask; padding is on the left."""
    batch = padded(num_samples, length)
    return {name: value.flip(1) for name, value in batch.items()}


def choices(num_samples: int, length: int) -> Batch:
    """Draw as many texts per sample as there are classes, ``[N, 3, T]``."""
    shape = (num_samples, CLASSES, length)
    return {"input_ids": torch.randint(3, VOCABULARY, shape)}


def pairs(num_samples: int, length: int) -> Batch:
    """Draw tokens for encoder and decoder, of different lengths."""
    decoder = tokens(num_samples, length - 1)["input_ids"]
    return {**tokens(num_samples, length), "decoder_input_ids": decoder}


def padded_pairs(num_samples: int, length: int) -> Batch:
    """Draw tokens for encoder and decoder, with a mask for the encoder."""
    decoder = tokens(num_samples, length)["input_ids"]
    return {**padded(num_samples, length), "decoder_input_ids": decoder}


def pixels(size: int, name: str = "pixel_values") -> Callable[[int, int], Batch]:
    """Draw images ``[N, 3, size, size]``; the length plays no role."""

    def draw(num_samples: int, length: int) -> Batch:
        images = torch.randn(num_samples, 3, size, size, dtype=torch.float64)
        return {name: images}

    return draw


def waves(num_samples: int, length: int) -> Batch:
    """Draw sound ``[N, L]`` that becomes a sequence of T features."""
    values = torch.randn(num_samples, 8 * length + 8, dtype=torch.float64)
    return {"input_values": values}


def with_labels(
    inputs: Callable[[int, int], Batch], high: int, per_token: bool
) -> Callable[[int, int], Batch]:
    """Draw labels, too, from which the model computes its loss."""

    def draw(num_samples: int, length: int) -> Batch:
        shape = (num_samples, length) if per_token else (num_samples,)
        return {**inputs(num_samples, length), "labels": torch.randint(high, shape)}

    return draw


# What comes out


def logits(output: Any) -> Tensor:
    """Take the logits."""
    return output.logits


def shifted(output: Any) -> Tensor:
    """Take the logits of all tokens but the last, for which there is no next one."""
    return output.logits[:, :-1]


def itself(output: Tensor) -> Tensor:
    """Take the output as it is."""
    return output


# Where models come from


def from_config(task: str, model_type: str, **config: Any) -> Callable[[], Module]:
    """Describe a model of ``transformers``.

    Args:
        task: What it is made for, as in ``AutoModelFor<task>``.
        model_type: Name of the architecture.
        config: Its configuration.

    Returns:
        Function that builds it.
    """

    def build() -> Module:
        auto = getattr(transformers, f"AutoModelFor{task}")
        described = transformers.AutoConfig.for_model(model_type, **config)
        # the only implementation of routed experts that knows double precision
        return auto.from_config(described, experts_implementation="eager")

    return build


# Sizes, by the names that most configurations use
WIDTHS = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = {
    **WIDTHS,
    "intermediate_size": 12,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 1}
PAIRED_WIDTHS = {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
}
PAIR = {
    **PAIRED_WIDTHS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
T5 = {
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "vocab_size": VOCABULARY,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
EXPERTS = {
    **GROUPED,
    "num_experts": 3,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 6,
}
DEEPSEEK = {
    **TEXT,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
}
PATCHES = {**WIDTHS, "intermediate_size": 12, "image_size": 4, "patch_size": 2}
STAGES = {"depths": [1, 1], "hidden_sizes": [4, 8]}
SOUND = {
    **WIDTHS,
    "intermediate_size": 12,
    "vocab_size": VOCABULARY,
    "conv_dim": (4, 4),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 4,
    "num_labels": CLASSES,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "pad_token_id": 0,
}
