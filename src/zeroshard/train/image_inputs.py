"""Images as the models of transformers take them, and the tokens of text that stand for an image.

A model of images takes an image for each row. Models of images beside text differ in how: as they are, several to a row
with a mask of their pixels or of the texts that see them, once more in a higher resolution, in tiles with the size of
the whole, or as patches of all images in one tensor, with the patches of each. Its arguments say which.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.planner.predict.shallow import quiet
from zeroshard.planner.predict.torch_internals import Results, fakes, ones
from zeroshard.units.hooks import tensors_in

CHANNELS, SIDE = 3, 224  # where a configuration does not say
SEEN = "image_attention_mask"  # 1 where a token sees an image
SEVERAL = {"pixel_attention_mask", SEEN}  # arguments of models with several images to a row
FINE = "high_res_pixel_values"
FEATURES = "get_image_features"
GRIDS = "image_grid_thw"  # patches of each image over time, down and across
TYPES = "mm_token_type_ids", "token_type_ids"  # 1 where a token stands for a part of an image


def arguments_of(function: Callable[..., Any]) -> set[str]:
    """The names of a function's arguments."""
    return set(inspect.signature(function).parameters)


def image_size(config: Any, part: str = "vision_config") -> tuple[int, int, int]:
    """Channels, height and width of an image, of the part of a configuration that has one."""
    config = getattr(config, part, config)
    side = getattr(config, "image_size", None) or SIDE
    height, width = (side, side) if isinstance(side, int) else side
    return int(_channels(config)), int(height), int(width)


def patches_of(config: Any) -> int:
    """Patches of an image; 1 for models that do not cut it, or whose layers have fewer and fewer of them."""
    _, height, width = image_size(config)
    if hasattr(config, "depths"):
        return 1
    side = getattr(getattr(config, "vision_config", config), "patch_size", None)
    if not side:
        return 1
    down, across = (side, side) if isinstance(side, int) else side
    return max(1, height // down * (width // across))


def images_beside_text(kind: Any, config: Any, rows: int) -> dict[str, Tensor]:
    """An image for each row of text, all of ones; those of zeros may count as padding."""
    takes, (channels, height, width) = arguments_of(kind.forward), image_size(config)
    if GRIDS in takes:
        vision = config.vision_config
        down, across = height // vision.patch_size, width // vision.patch_size
        numbers = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        grid = torch.tensor([[1, down, across]] * rows)
        return {"pixel_values": ones(rows * down * across, numbers), GRIDS: grid}
    tiles_of = getattr(sys.modules[kind.__module__], "image_size_to_num_patches", None)
    shape: tuple[int, ...] = (channels, height, width)
    if tiles_of is not None:
        shape = (tiles_of((height, width), config.image_grid_pinpoints, height), *shape)
    elif takes & SEVERAL:
        shape = (1, *shape)
    images = {"pixel_values": ones(rows, *shape)}
    if FINE in takes:
        images[FINE] = ones(rows, *image_size(config, "high_res_vision_config"))
    features = getattr(kind, FEATURES, kind.forward)
    sizes = inspect.signature(features).parameters.get("image_sizes")
    if sizes is not None and sizes.default is sizes.empty:
        images["image_sizes"] = torch.tensor([[height, width]] * rows)
    return images


@contextmanager
def valueless() -> Iterator[None]:
    """Inside, tensors have no values but those of integers that are inputs, and models make no graph."""
    with fakes(True) as mode, quiet(), Tracker(answers=True, results=Results(mode)), torch.no_grad():
        yield


def placeholders(model: Any, config: Any, images: Callable[[int], dict[str, Tensor]]) -> int:
    """Tokens that stand for the image of one row, as many as the model makes features of it; 0 without any."""
    if placeholder(config) is None:
        return 0
    make = getattr(model, FEATURES, None) or getattr(model.base_model, FEATURES, None)
    if make is None:
        return 0
    takes = arguments_of(make)
    given = {name: value for name, value in images(1).items() if name in takes}
    features = tensors_in(make(**given, return_dict=True).pooler_output)
    return sum(one.numel() // one.shape[-1] for one in features)


def placeholder(config: Any) -> int | None:
    """The token that stands for a part of an image."""
    found: int | None = getattr(config, "image_token_id", None)
    return getattr(config, "image_token_index", None) if found is None else found


def text_with_images(kind: Any, config: Any, shape: tuple[int, int], tokens: int) -> dict[str, Tensor]:
    """Rows of text that begin with the tokens of an image, and their types."""
    rows, length = shape
    stands = placeholder(config) if tokens else None
    other = 1 if stands == 0 else 0
    types = [1] * tokens + [0] * (length - tokens)
    ids = torch.tensor([[stands if each else other for each in types]] * rows)
    takes = arguments_of(kind.forward)
    masks = {SEEN: torch.ones(rows, length, 1, dtype=torch.long)} if SEEN in takes else {}
    return {"input_ids": ids, **{name: torch.tensor([types] * rows) for name in TYPES if name in takes}} | masks


def _channels(config: Any) -> int:
    names = "num_channels", "in_channels", "in_chans"
    return next((found for name in names if (found := getattr(config, name, None))), CHANNELS)
