"""Models of transformers that are no causal language models, with batches for the planner.

A configuration names its class (`architectures`). The class's own auto mapping says which labels it takes: one of each
token (masked and sequence-to-sequence language models, text after images, token classification), one of each row
(classification of text, images and audio), one of each pixel, letters of audio, the two ends of an answer, or none,
where rows are contrasted with each other. Inputs have the sizes of the configuration; where they differ from class to
class, a forward without values is tried. `zeroshard train` trains causal language models; these are trained in a loop
or a Trainer.
"""

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import ModelError
from zeroshard.interop.huggingface.quantized import package
from zeroshard.train.image_inputs import (
    arguments_of,
    image_size,
    images_beside_text,
    patches_of,
    placeholders,
    text_with_images,
    valueless,
)

LABELS = {  # auto mappings of transformers, by the labels of their models
    "token": ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "TOKEN_CLASSIFICATION"),
    "row": ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
    "span": ("QUESTION_ANSWERING",),
    "pixel": ("SEMANTIC_SEGMENTATION",),
    "letter": ("CTC",),
    "image": ("IMAGE_TEXT_TO_TEXT",),
}
BESIDE_TEXT = "contrast", "image"
TRIED = "image", "letter", "pixel"  # labels of classes whose inputs differ
MAPPINGS = "transformers.models.auto.modeling_auto"
LETTERS = 4  # frames of audio for each letter of its text


@dataclass(frozen=True)
class OtherModel:
    """A model of transformers by its class and configuration.

    Attributes:
        kind: the class.
        labels: a key of `LABELS`, or "contrast".
        sequence: labels of a row of text, patches of an image, or frames of audio; 1 if these are not known.
        image_tokens: tokens of a row of text that stand for its image.
    """

    kind: Any
    config: Any
    labels: str
    sequence: int
    image_tokens: int = 0

    @property
    def name(self) -> str:
        """The name of the class."""
        return str(self.kind.__name__)

    @property
    def tokens(self) -> int:
        """Tokens of a row; 1 where layers have unlike numbers of them, as with audio, or with images beside text."""
        alike = self.kind.main_input_name in ("input_ids", "pixel_values") and self.labels not in BESIDE_TEXT
        return self.sequence if alike else 1

    @property
    def reads_integers(self) -> bool:
        """Whether the model reads values of its inputs: sizes of images, or the letters of audio."""
        return self.labels in ("image", "letter")

    def build(self) -> nn.Module:
        """The model in fp32, with the values that transformers draws."""
        config = copy.deepcopy(self.config)
        config.use_cache = config.get_text_config().use_cache = False  # keys and values are kept for no later token
        if getattr(config, "is_encoder_decoder", False):  # labels are the decoder's inputs, one token later
            for token in ("decoder_start_token_id", "pad_token_id"):
                setattr(config, token, getattr(config, token, None) or 0)
        if self.labels == "row" and getattr(config, "problem_type", "") is None:  # else the loss asks the labels
            config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"
        made: nn.Module = self.kind._from_config(config, dtype=torch.float32)
        return made

    def batch(self, rows: int) -> dict[str, Any]:
        """A batch with labels, as the model takes it: images beside text are ones, all else zeros."""
        if self.labels == "image":
            text = text_with_images(self.kind, self.config, (rows, self.sequence), self.image_tokens)
            return text | self.images(rows) | self._labels(rows)
        main, takes = self.kind.main_input_name, arguments_of(self.kind.forward)
        batch: dict[str, Any] = {}
        if "input_ids" in takes and main == "input_ids":
            batch["input_ids"] = _zeros(rows, self.sequence)
        if main == "pixel_values" or (self.labels == "contrast" and "pixel_values" in takes):
            batch["pixel_values"] = torch.zeros(rows, *image_size(self.config))
        if main in ("input_features", "input_values"):
            batch[main] = torch.zeros(rows, *(_audio(self.config, self.sequence) or ()))
        return batch | self._labels(rows)

    def images(self, rows: int) -> dict[str, Tensor]:
        """An image for each row of text."""
        return images_beside_text(self.kind, self.config, rows)

    def _labels(self, rows: int) -> dict[str, Any]:
        if self.labels == "contrast":
            return {"return_loss": True}
        if self.labels == "span":
            return {"start_positions": _zeros(rows), "end_positions": _zeros(rows)}
        if self.labels == "row":
            return {"labels": torch.zeros(rows) if self.config.num_labels == 1 else _zeros(rows)}
        if self.labels == "pixel":
            return {"labels": _zeros(rows, *image_size(self.config)[1:])}
        if self.labels == "letter":
            letter = int(self.config.pad_token_id != 1)  # the token of padding is no letter
            return {"labels": torch.tensor([[letter] * max(1, self.sequence // LETTERS)] * rows)}
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
    mappings = importlib.import_module(MAPPINGS)
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    kind: Any = getattr(transformers, name, None)
    if not hasattr(kind, "main_input_name") or name in _classes(mappings, "CAUSAL_LM"):
        return None
    labels = next((key for key, names in LABELS.items() for each in names if name in _classes(mappings, each)), None)
    if labels is None and "return_loss" in arguments_of(kind.forward):
        labels = "contrast"
    if labels is None or kind.main_input_name not in ("input_ids", "pixel_values", "input_features", "input_values"):
        return None
    length = min(sequence, _positions(config) or sequence)
    if kind.main_input_name in ("input_features", "input_values") and _audio(config, length) is None:
        return None
    alone = kind.main_input_name == "pixel_values" and labels != "image"
    found = OtherModel(kind, config, labels, patches_of(config) if alone else length)
    return _tried(found) if labels in TRIED else found


def _tried(model: OtherModel) -> OtherModel | None:
    """The model with the tokens that stand for the image of a row.

    None if it makes no loss of its batch, and its family has a causal language model.

    Raises:
        ModelError: the text of a row is too short for its image, or the model makes no loss and has no such family.
    """
    reason = "its output has no loss"
    try:
        with valueless():
            made = model.build()
            if model.labels == "image":
                model = replace(model, image_tokens=placeholders(made, model.config, model.images))
                _check_length(model)
            loss = made(**model.batch(1)).loss
    except ModelError:
        raise
    except Exception as error:  # transformers has no base class of its errors
        loss, reason = None, str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
    if isinstance(loss, Tensor):
        return model
    if model.config.model_type in importlib.import_module(MAPPINGS).MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    raise ModelError(
        f"{model.name} makes no loss of the planner's batch, {', '.join(model.batch(1))}, on tensors without values: "
        f"{reason}; give code of your own with a batch: --model mine.py:Net --batch-of mine.py:batch"
    )


def _check_length(model: OtherModel) -> None:
    if model.image_tokens >= model.sequence:
        raise ModelError(
            f"an image is {model.image_tokens} tokens of a {model.name} and a row {model.sequence}, with its text; "
            f"raise the sequence to more than {model.image_tokens}"
        )


def reads_later_tokens(config: Any) -> str | None:
    """The class that a configuration names, if it is a masked or a sequence-to-sequence language model.

    The causal class of its family would train without its encoder, or with each label among its inputs.
    """
    mappings = importlib.import_module(MAPPINGS)
    named = next(iter(getattr(config, "architectures", None) or ()), "")
    other = _classes(mappings, "MASKED_LM") | _classes(mappings, "SEQ_TO_SEQ_CAUSAL_LM")
    if named not in other - _classes(mappings, "CAUSAL_LM") or getattr(config, "is_decoder", False):
        return None
    return named


def _classes(mappings: Any, task: str) -> set[str]:
    table: Mapping[str, str | tuple[str, ...]] = getattr(mappings, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
    return {name for names in table.values() for name in ((names,) if isinstance(names, str) else names)}


def _positions(config: Any) -> int | None:
    """The most tokens of a row of text, where tables of positions bound it."""
    text = getattr(config, "text_config", config)
    found = (getattr(text, name, None) for name in ("max_target_positions", "max_position_embeddings", "n_positions"))
    return next((int(most) for most in found if isinstance(most, int) and most > 0), None)


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
