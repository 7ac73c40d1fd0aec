"""The weights of a DeepSpeed ZeRO checkpoint by parameter name, joined from the slices of its ranks.

Files of DeepSpeed's `save_checkpoint(folder, tag)`:

    folder/latest                                                  the newest tag
    folder/tag/mp_rank_00_model_states.pt                          stages 0 to 2: weights, buffers, names, shapes
    folder/tag/zero_pp_rank_R_mp_rank_00_model_states.pt           stage 3: the same by rank, frozen weights in slices
    folder/tag/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    rank R's slice of the fp32 weights

Stages 1 and 2 lay the parameters of an optimizer group end to end and cut the whole once per rank. Stage 3 cuts every
parameter by itself, padded to a multiple of the ranks, and lays a rank's pieces end to end over one or more tensors.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.errors import CheckpointError
from zeroshard.interop.inert_pickle import load_inert
from zeroshard.text import format_names

SLICE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
FOREIGN = {
    r"(?:.*_)?mp_rank_(?!00)\d+_\w+\.pt": "tensor parallelism",
    r"(?:layer_\d+_)?expert_\d+.*|expp_rank_\d+.*": "a mixture of experts",
    r"layer_\d+.*": "pipeline stages",
}


class DeepSpeedWeights(Mapping[str, torch.Tensor]):
    """The model of a DeepSpeed checkpoint as a mapping from names to tensors, each joined when it is read.

    Floating-point parameters are fp32: the master weights where the checkpoint has them, else the model's own values
    (frozen parameters, and stage 0). Buffers are as they were saved. No code that the files name is run.

    Give it to `model.load_state_dict` before the engine is made; for a model on the meta device, give
    `initialiser(model)` to the engine.

    Args:
        path: the folder that was given to DeepSpeed's `save_checkpoint`, or the folder of one tag in it.
        tag: of a checkpoint in the folder; by default the one in its file `latest`.

    Attributes:
        stage: the ZeRO stage that wrote it.
        ranks: number of ranks that sliced it.
        step: number of updates before it was written.

    Raises:
        CheckpointError: it is incomplete or damaged, was written under parallelism other than ZeRO, or names classes
            that are not known to be harmless.
    """

    def __init__(self, path: str | Path, tag: str | None = None) -> None:
        self._folder = _folder(Path(path), tag)
        slices = [_Slice(load_inert(file), file) for file in _slice_files(self._folder)]
        self.stage = slices[0].stage if slices else 0
        self.ranks = len(slices) or 1
        prefixes = [f"zero_pp_rank_{rank}_" for rank in range(self.ranks)] if self.stage == 3 else [""]
        files = [self._folder / f"{prefix}mp_rank_00_model_states.pt" for prefix in prefixes]
        models = [load_inert(file) for file in files]
        model = models[0]
        self._check(model, slices)
        for held, file in zip(models, files, strict=True):
            _check_types(held, MODEL, file)
        self.step = int(model.get("global_steps", 0))
        self._parts: dict[str, Callable[[], torch.Tensor]] = {}
        buffers = set(model.get("buffer_names") or ())
        for name, tensor in model["module"].items():
            if self.stage < 3 or name in buffers:
                self._parts[name] = tensor.detach if name in buffers else partial(_fp32, tensor)
        if slices:
            _check_types(
                {"param_shapes": model.get("param_shapes")}, {"param_shapes": (_shape_tables, SHAPES)}, files[0]
            )
            flats = [part.flats for part in slices]
            shapes = model["param_shapes"]
            parts = _cut_singly(shapes, flats, self._folder) if self.stage == 3 else _cut_whole(shapes, flats)
            self._parts.update(parts)
        if self.stage == 3:
            self._parts.update(_frozen(models))
        for alias, name in (model.get("shared_params") or {}).items():
            if name in self._parts:
                self._parts[alias] = self._parts[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that name, on the CPU; where it lies in one file, it is mapped from there.

        Raises:
            KeyError: the checkpoint has none of that name.
        """
        part = self._parts[name]
        try:
            return part()
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(
                f"{self._folder} cannot be put together at {name!r} ({error}). Copy it again."
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def initialiser(self, model: nn.Module) -> Callable[[nn.Module], None]:
        """For `Engine(..., initialise=...)`, where `model` is on the meta device: gives each module its weights.

        No rank holds more than one whole module besides its slices.

        Raises:
            CheckpointError: names or shapes differ between the model and the checkpoint.
        """
        wanted = model.state_dict(keep_vars=True)
        missing, extra = sorted(wanted.keys() - self.keys()), sorted(self.keys() - wanted.keys())
        if missing or extra:
            raise CheckpointError(
                f"{self._folder} is of another model: it lacks {format_names(missing)} and has {format_names(extra)} "
                f"too many. Build the model that was trained there."
            )
        paths = {module: f"{path}." if path else "" for path, module in model.named_modules()}

        def fill(module: nn.Module) -> None:
            own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            for name, tensor in ((paths[module] + name, tensor) for name, tensor in own):
                if name not in self:
                    continue  # a buffer that is not persistent
                value = self[name]
                if value.shape != tensor.shape:
                    raise CheckpointError(
                        f"{self._folder} is of another model: {name!r} is {tuple(value.shape)} there and "
                        f"{tuple(tensor.shape)} here. Build the model that was trained there."
                    )
                with torch.no_grad():
                    tensor.copy_(value)

        return fill

    def _check(self, model: Mapping[str, Any], slices: Sequence["_Slice"]) -> None:
        """Refuse an incomplete checkpoint, or one that is not of ZeRO alone."""
        for key in ("module", "buffer_names"):
            if model.get(key) is None:
                raise CheckpointError(f"{self._folder} holds no {key!r}; it is no checkpoint of a DeepSpeed engine.")
        if model.get("ds_autoep_layers") or model.get("autoep_layers"):
            raise CheckpointError(f"{self._folder} was written under a mixture of experts. {_CONVERT}")
        if model.get("param_shapes") is not None and not slices:
            raise CheckpointError(
                f"{self._folder} holds 16-bit weights without the files *_optim_states.pt, in which their fp32 values "
                f"are. Copy those too."
            )
        for part in slices:
            if part.stage != self.stage or set(part.ranks) != {len(slices)}:
                raise CheckpointError(
                    f"{self._folder} holds slices of {len(slices)} ranks, and {part.file.name} is of "
                    f"{max(part.ranks)} ranks under stage {part.stage}. Copy the whole folder, without remains of "
                    f"another run."
                )


_CONVERT = "Let DeepSpeed write plain weights (zero_to_fp32.py or ds_to_universal.py), and load those."


class _Slice:
    """One rank's file of fp32 weights."""

    def __init__(self, held: Mapping[str, Any], file: Path) -> None:
        self.file = file
        state = held.get("optimizer_state_dict") or {}
        if not isinstance(state, Mapping) or "zero_stage" not in state:
            raise CheckpointError(f"{file} names no ZeRO stage; it is no checkpoint of DeepSpeed's ZeRO.")
        _check_types(state, SLICES, file)
        self.stage = int(state["zero_stage"])
        count = state["partition_count"]
        self.ranks: list[int] = list(count) if isinstance(count, (list, tuple)) else [count]
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        if key not in state:
            raise CheckpointError(f"{file} holds no {key!r}, the fp32 weights of stage {self.stage}. Copy it again.")
        _check_types(state, {key: (_flats, "a list of flat tensors of floating-point numbers")}, file)
        self.flats: list[torch.Tensor] = list(state[key])


def _check_types(held: Mapping[str, Any], fields: "Fields", file: Path) -> None:
    """Refuse an entry whose type differs from DeepSpeed's."""
    for key, (fits, expected) in fields.items():
        if key in held and not fits(held[key]):
            raise CheckpointError(
                f"{file} holds {key!r} as something else (a {type(held[key]).__name__}) than {expected}, which "
                f"DeepSpeed writes there. Copy it again."
            )


def _names(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


def _table(value: Any, kind: type) -> bool:
    return isinstance(value, Mapping) and _names(list(value)) and all(isinstance(v, kind) for v in value.values())


def _shape_tables(value: Any) -> bool:
    return isinstance(value, Sequence) and all(_shapes(group) for group in value)


def _shapes(value: Any) -> bool:
    return _table(value, torch.Size) and all(size >= 0 for shape in value.values() for size in shape)


def _flats(value: Any) -> bool:
    tensors = isinstance(value, Sequence) and all(isinstance(flat, torch.Tensor) for flat in value)
    return tensors and all(flat.dim() == 1 and flat.is_floating_point() for flat in value)


def _count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _counts(value: Any) -> bool:
    several = isinstance(value, (list, tuple)) and len(value) > 0
    return all(_count(count, 1) for count in (value if several else [value]))


Fields = Mapping[str, tuple[Callable[[Any], bool], str]]
SHAPES = "a list of tables of shapes"
MODEL: Fields = {
    "module": (lambda v: _table(v, torch.Tensor), "a table of tensors"),
    "buffer_names": (_names, "a list of names"),
    "global_steps": (lambda v: _count(v, 0), "a whole number of 0 or more"),
    "frozen_param_shapes": (lambda v: v is None or _shapes(v), "a table of shapes"),
    "frozen_param_fragments": (lambda v: v is None or _table(v, torch.Tensor), "a table of tensors"),
    "shared_params": (lambda v: v is None or _table(v, str), "a table of names"),
}
SLICES: Fields = {
    "zero_stage": (lambda v: _count(v, 1) and v <= 3, "1, 2 or 3"),
    "partition_count": (_counts, "one or more whole numbers of 1 or more"),
}


def _folder(path: Path, tag: str | None) -> Path:
    if tag is None and (path / "latest").is_file():
        tag = (path / "latest").read_text(errors="replace").strip().replace("\0", "?")
    folder = path / tag if tag is not None else path
    if not any(folder.glob("*_model_states.pt")):
        raise CheckpointError(
            f"{folder} holds no checkpoint of DeepSpeed (no *_model_states.pt). Give the folder that was given to "
            f"save_checkpoint, or name the tag."
        )
    return folder


def _slice_files(folder: Path) -> list[Path]:
    """The files of the slices in the order of their ranks."""
    found = {}
    for file in folder.glob("*.pt"):
        for pattern, technique in FOREIGN.items():
            if re.fullmatch(pattern, file.name):
                raise CheckpointError(f"{file} was written under {technique}, and only ZeRO can be read. {_CONVERT}")
        if match := SLICE.fullmatch(file.name):
            found[int(match[1])] = file
    if sorted(found) != list(range(len(found))):
        raise CheckpointError(f"{folder} holds the slices of ranks {sorted(found)}; some are missing. Copy them too.")
    return [found[rank] for rank in range(len(found))]


def _cut_whole(
    shapes: Sequence[Mapping[str, torch.Size]], flats: Sequence[Sequence[torch.Tensor]]
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Parameters of stages 1 and 2: an optimizer group end to end, padded by less than 2N, in one slice per rank."""
    counts = {len(flat) for flat in flats}
    if counts != {len(shapes)}:
        raise CheckpointError(
            f"There are shapes of {len(shapes)} optimizer groups and slices of {sorted(counts)}; the checkpoint is "
            f"damaged. Copy it again."
        )
    for number, group in enumerate(shapes):
        pieces = [flat[number] for flat in flats]
        start = 0
        for name, shape in group.items():
            yield name, partial(_joined, [(pieces, start, start + shape.numel())], shape)
            start += shape.numel()
        held = sum(piece.numel() for piece in pieces)
        if not start <= held < start + 2 * len(pieces):
            raise CheckpointError(
                f"Optimizer group {number} has {start} elements by the shapes of its parameters and {held} in the "
                f"slices; the checkpoint is damaged, or of a layout that is not known here. {_CONVERT}"
            )


def _cut_singly(
    shapes: Sequence[Mapping[str, torch.Size]], flats: Sequence[Sequence[torch.Tensor]], folder: Path
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Parameters of stage 3: the same interval of every rank, in rank order, without the padding at the end."""
    start = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        stop = start + math.ceil(shape.numel() / len(flats))
        yield name, partial(_joined, [(flat, start, stop) for flat in flats], shape)
        start = stop
    sizes = {sum(piece.numel() for piece in flat) for flat in flats}
    if sizes != {start}:
        raise CheckpointError(
            f"{folder} has {start} elements per rank by the shapes of its parameters and {sorted(sizes)} in the "
            f"slices; it is damaged, or of a layout that is not known here. {_CONVERT}"
        )


def _frozen(models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Frozen parameters of stage 3: a slice in every rank's file."""
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        if any(name not in (model.get("frozen_param_fragments") or {}) for model in models):
            raise CheckpointError(f"Some rank's file holds no slice of the frozen parameter {name!r}. Copy it again.")
        pieces = [model["frozen_param_fragments"][name].flatten() for model in models]
        yield name, partial(_joined, [(pieces, 0, shape.numel())], shape)


def _joined(intervals: Sequence[tuple[Sequence[torch.Tensor], int, int]], shape: torch.Size) -> torch.Tensor:
    """The elements [start, stop) of each list of pieces laid end to end, one after the other, in `shape`, as fp32."""
    found: list[torch.Tensor] = []
    for pieces, start, stop in intervals:
        for piece in pieces:
            if start < piece.numel() and stop > 0:
                found.append(piece[max(start, 0) : stop])
            start, stop = start - piece.numel(), stop - piece.numel()
    whole = found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)
    return _fp32(whole[: shape.numel()].view(shape))


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
