"""Models of transformers that are no causal language models, with batches for the planner.

A configuration names its class (`architectures`). The class's own auto mapping says which labels it takes: one of each
token (masked and sequence-to-sequence language models, token classification), one of each row (classification of
text, images and audio), the two ends of an answer, or none, where rows are contrasted with each other. Inputs have the
sizes of the configuration. `zeroshard train` trains causal language models; these are trained in a loop or a Trainer.
"""

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.interop.huggingface.quantized import package

LABELS = {  # auto mappings of transformers, by the labels of their models
    "token": ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "TOKEN_CLASSIFICATION"),
    "row": ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
    "span": ("QUESTION_ANSWERING",),
}
CHANNELS = 3


@dataclass(frozen=True)
class OtherModel:
    """A model of transformers by its class and configuration.

    Attributes:
        kind: the class.
        labels: "token", "row", "span" or "contrast".
        sequence: labels of a row of text, patches of an image, or frames of audio; 1 if these are not known.
    """

    kind: Any
    config: Any
    labels: str
    sequence: int

    @property
    def name(self) -> str:
        """The name of the class."""
        return str(self.kind.__name__)

    @property
    def tokens(self) -> int:
        """Tokens of a row; 1 where layers have unlike numbers of them, as with audio, or with images beside text."""
        alike = self.kind.main_input_name in ("input_ids", "pixel_values") and self.labels != "contrast"
        return self.sequence if alike else 1

    def build(self) -> nn.Module:
        """The model in fp32, with the values that transformers draws."""
        config = copy.deepcopy(self.config)
        config.use_cache = False  # keys and values are kept for no later token
        if getattr(config, "is_encoder_decoder", False):  # labels are the decoder's inputs, one token later
            for token in ("decoder_start_token_id", "pad_token_id"):
                setattr(config, token, getattr(config, token, None) or 0)
        if self.labels == "row" and getattr(config, "problem_type", "") is None:  # else the loss asks the labels
            config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"
        made: nn.Module = self.kind._from_config(config, dtype=torch.float32)
        return made

    def batch(self, rows: int) -> dict[str, Any]:
        """A batch of zeros with labels, as the model takes it."""
        main, takes = self.kind.main_input_name, _arguments(self.kind)
        batch: dict[str, Any] = {}
        if "input_ids" in takes and main == "input_ids":
            batch["input_ids"] = _zeros(rows, self.sequence)
        if main == "pixel_values" or (self.labels == "contrast" and "pixel_values" in takes):
            batch["pixel_values"] = torch.zeros(rows, *_image(self.config))
        if main in ("input_features", "input_values"):
            batch[main] = torch.zeros(rows, *(_audio(self.config, self.sequence) or ()))
        return batch | self._labels(rows)

    def _labels(self, rows: int) -> dict[str, Any]:
        if self.labels == "contrast":
            return {"return_loss": True}
        if self.labels == "span":
            return {"start_positions": _zeros(rows), "end_positions": _zeros(rows)}
        if self.labels == "row":
            return {"labels": torch.zeros(rows) if self.config.num_labels == 1 else _zeros(rows)}
        return {"labels": _zeros(rows, self.sequence)}


def other_model(file: Path, sequence: int) -> OtherModel | None:
    """The model of a configuration, if that names a class which is no causal language model and whose labels are known.

    Args:
        file: config.json.
        sequence: tokens of a row, for models of text.
    """
    transformers = package("transformers", f"building the model of {file}", "hf")
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception:  # transformers has no base class of its errors; the caller's next reading raises it in words
        return None
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    kind: Any = getattr(transformers, name, None)
    if not hasattr(kind, "main_input_name") or name in _classes(mappings, "CAUSAL_LM"):
        return None
    labels = next((key for key, names in LABELS.items() for each in names if name in _classes(mappings, each)), None)
    if labels is None and "return_loss" in _arguments(kind):
        labels = "contrast"
    if labels is None or kind.main_input_name not in ("input_ids", "pixel_values", "input_features", "input_values"):
        return None
    length = min(sequence, _positions(config) or sequence)
    if kind.main_input_name in ("input_features", "input_values") and _audio(config, length) is None:
        return None
    return OtherModel(kind, config, labels, _patches(config) if kind.main_input_name == "pixel_values" else length)


def reads_later_tokens(config: Any) -> str | None:
    """The class that a configuration names, if it is a masked or a sequence-to-sequence language model.

    The causal class of its family would train without its encoder, or with each label among its inputs.
    """
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    named = next(iter(getattr(config, "architectures", None) or ()), "")
    other = _classes(mappings, "MASKED_LM") | _classes(mappings, "SEQ_TO_SEQ_CAUSAL_LM")
    if named not in other - _classes(mappings, "CAUSAL_LM") or getattr(config, "is_decoder", False):
        return None
    return named


def _classes(mappings: Any, task: str) -> set[str]:
    table: Mapping[str, str | tuple[str, ...]] = getattr(mappings, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
    return {name for names in table.values() for name in ((names,) if isinstance(names, str) else names)}


def _arguments(kind: Any) -> set[str]:
    forward: Callable[..., Any] = kind.forward
    return set(inspect.signature(forward).parameters)


def _positions(config: Any) -> int | None:
    """The most tokens of a row of text, where tables of positions bound it."""
    text = getattr(config, "text_config", config)
    found = (getattr(text, name, None) for name in ("max_target_positions", "max_position_embeddings", "n_positions"))
    return next((int(most) for most in found if isinstance(most, int) and most > 0), None)


def _image(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image."""
    config = getattr(config, "vision_config", config)
    side = getattr(config, "image_size", None) or 224
    height, width = (side, side) if isinstance(side, int) else side
    return int(getattr(config, "num_channels", None) or CHANNELS), int(height), int(width)


def _patches(config: Any) -> int:
    """Patches of an image; 1 for models that do not cut it, or whose layers have fewer and fewer of them."""
    _, height, width = _image(config)
    if hasattr(config, "depths"):
        return 1
    side = getattr(getattr(config, "vision_config", config), "patch_size", None)
    if not side:
        return 1
    down, across = (side, side) if isinstance(side, int) else side
    return max(1, height // down * (width // across))


def _audio(config: Any, sequence: int) -> tuple[int, ...] | None:
    """The shape of one row of audio: mel bands by frames, frames by bands, or samples; None if it is not known."""
    bands = getattr(config, "num_mel_bins", None)
    if bands and getattr(config, "max_source_positions", None):  # the encoder's convolutions halve the frames
        return int(bands), 2 * int(config.max_source_positions)
    if bands and getattr(config, "max_length", None):
        return int(config.max_length), int(bands)
    strides = getattr(config, "conv_stride", None)
    return (prod(strides) * (sequence + 1),) if strides else None


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)
