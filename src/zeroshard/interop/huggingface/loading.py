"""Engines of pretrained models of transformers, in one call."""

import json
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

import torch
from torch import nn

from zeroshard.access.adapter_export import ADAPTER_CONFIG
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.weights import Shards, files_of
from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh, shared_mesh
from zeroshard.engine import Engine
from zeroshard.engine.engine import LossFunction
from zeroshard.errors import CheckpointError, ConfigError, ModelError, OptimizerError, ZeroshardError
from zeroshard.interop.huggingface.adapter_files import adapter_file, stored_config
from zeroshard.interop.huggingface.conversion import Renamed, pretrained_part
from zeroshard.interop.huggingface.diffusion import built_by_diffusers, diffusion_class, parameters_on_meta
from zeroshard.interop.huggingface.pretrained import MatchedValues, PretrainedFiles
from zeroshard.interop.huggingface.quantized import package, quantise
from zeroshard.interop.huggingface.scaled import quantisation_of
from zeroshard.plan import Plan
from zeroshard.platform.imports import uncollected
from zeroshard.precision.cast import Precision, floating_dtype
from zeroshard.quantized.stacks import stacks_of
from zeroshard.text import format_bytes, format_names
from zeroshard.units.ignored import OptimizerLike
from zeroshard.validation.arguments import check_arguments, check_options

LOG = logging.getLogger(__name__)
CONFIG = "config.json"
MISSING = ("refuse", "initialise")
BUILT = 'To change the model itself, build it under torch.device("meta") and pass it as model=.'
INSTEAD = {  # of options of transformers
    "torch_dtype": "Pass dtype=.",
    "device_map": "The plan says where tensors are.",
    "quantization_config": "Pass quantized=.",
    "load_in_4bit": 'Pass quantized="nf4".',
    "load_in_8bit": 'Pass quantized="int8".',
    "ignore_mismatched_sizes": 'Pass strict=False and missing="initialise".',
    "trust_remote_code": "Code beside a configuration is not run: import its class and pass model=.",
}
DRAWING = ("kaiming_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_")
Result = TypeVar("Result")


class LoadOptions(TypedDict, total=False):
    """How strictly files are matched with a model, and in which dtype the model is built.

    Attributes:
        strict: refuse tensors in the files that the model does not have; True by default.
        missing: "refuse" a parameter without a value, or "initialise" it: a new head, rows of new tokens.
        dtype: of the model's parameters; fp32 by default, "auto" for that of the configuration, else of the files. The
            dtype in which they are computed with is the plan's.
        quantized: "nf4", "fp4" or "int8" for linear layers of bitsandbytes in place of the model's, which are quantised
            while they are read; or a `BitsAndBytesConfig` of transformers. They are frozen.
        adapters: a configuration of peft, such as a `LoraConfig`, for adapters that are put into the model; or a folder
            that peft or `engine.export(adapters=True)` wrote, whose adapters are trained further.
    """

    strict: bool
    missing: Literal["refuse", "initialise"]
    dtype: torch.dtype | str | None
    quantized: Any
    adapters: Any


def from_pretrained(
    path: str | PathLike[str],
    optimizer: OptimizerLike,
    plan: Plan | None = None,
    *,
    model: type | nn.Module | None = None,
    mesh: Mesh | None = None,
    loss: LossFunction | None = None,
    example: Any = None,
    **options: Unpack[LoadOptions],
) -> Engine:
    """An engine of a pretrained model: built on the meta device, with weights read into each rank's slices.

    A collective call. No rank holds the model whole, and no weight is drawn that the files give. `engine.loaded` lists
    the tensors that were read, initialised and left out.

    Args:
        path: a folder with config.json and safetensors files; or such a file, of a model that is given.
        optimizer: a function of the parameters, such as `partial(torch.optim.AdamW, lr=1e-5)`.
        plan: as for `Engine`.
        model: the class, such as `AutoModelForSequenceClassification`; or a model that was built on the meta device, in
            which adapters may have values; by default the class that the configuration names.
        mesh, loss, example: as for `Engine`.
        options: see `LoadOptions`.

    Raises:
        CheckpointError: files that cannot be read, or of another model, with the file and the tensor. ModelError: no
            configuration, or one that transformers refuses; an option that is none. And as `Engine`.
    """
    check_arguments(nn.Module(), optimizer, plan)
    check_options(mesh, loss=loss)
    _check_own(path, optimizer, model, options)
    plan = plan or Plan()
    if mesh is None:
        mesh = shared_mesh(plan.timeout)
    strict, missing = options.get("strict", True), options.get("missing", "refuse")
    with uncollected():
        opened, size = _on_all_ranks(mesh, lambda: _opened(Path(path), model, plan, options, mesh.rank), _size_of_names)
        files, names = opened.files, _names_of_rank_0(mesh, opened.names, size)
        values, _ = _on_all_ranks(mesh, lambda: MatchedValues(files, strict, missing, names))
        engine = Engine(files.model, optimizer, plan, mesh=mesh, loss=loss, initialise=values, example=example)
    engine.load_weights(values)
    engine.loaded = report = values.report
    LOG.info(
        "rank %d read %s of %s: %d tensors, %d initialised, %d unused",
        *(engine.rank, format_bytes(report.bytes_read), path),
        *(len(report.read) + len(report.partly), len(report.initialised), len(report.unused)),
    )
    return engine


def _check_own(path: Any, optimizer: Any, model: Any, options: LoadOptions) -> None:
    """Check the arguments that `Engine` does not have.

    Raises:
        ModelError, OptimizerError: with the way out.
    """
    if unknown := sorted(options.keys() - LoadOptions.__annotations__.keys()):
        raise ModelError(
            f"from_pretrained has no option {unknown[0]!r}; it has {', '.join(LoadOptions.__annotations__)}. "
            f"{INSTEAD.get(unknown[0], BUILT)}"
        )
    if not isinstance(path, str | PathLike):
        raise ModelError(
            f"path is a {type(path).__name__}; give the folder of a model that save_pretrained wrote. A model that has "
            f"its values goes to zs.Engine(model, optimizer, plan)."
        )
    if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(model, nn.Module):
        raise OptimizerError(
            f"The {type(optimizer).__name__} holds parameters of another model, since from_pretrained makes its own. "
            f"Give a function of the parameters, such as functools.partial(torch.optim.AdamW, lr=1e-5)."
        )
    strict, missing = options.get("strict", True), options.get("missing", "refuse")
    if not isinstance(strict, bool):
        raise ModelError(f"strict is {strict!r}; it is True or False.")
    if missing not in MISSING:
        raise ModelError(f"missing is {missing!r}; it is one of {', '.join(map(repr, MISSING))}.")


class _Opened(NamedTuple):
    """Files with their model on the meta device; and on rank 0 the names in both, as JSON."""

    files: PretrainedFiles
    names: bytes


def _opened(path: Path, model: type | nn.Module | None, plan: Plan, options: LoadOptions, rank: int) -> _Opened:
    """The model on the meta device, with its files.

    Raises:
        CheckpointError, ModelError: as `from_pretrained`.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give a folder with {CONFIG} and safetensors files. Names on a model hub are not "
            f"looked up: download the folder first."
        )
    built = model if isinstance(model, nn.Module) else build(path, model, options.get("dtype"))
    files = model_files(path, built, options, plan.precision)
    return _Opened(files, b"" if rank else json.dumps(files.renamed()).encode())


def model_files(path: Path, built: nn.Module, options: LoadOptions, precision: str) -> PretrainedFiles:
    """The files of a model on the meta device, which gets quantised layers and adapters as the options say.

    Args:
        precision: of the plan, in whose dtype quantised layers compute.

    Raises:
        CheckpointError, ModelError: as `from_pretrained`.
    """
    stored = quantisation_of(getattr(pretrained_part(built)[1], "config", None))
    quantise(built, path, options.get("quantized"), Precision.named(precision).compute)
    adapters, file = options.get("adapters"), None
    if isinstance(adapters, str | PathLike):
        adapters, file = stored_config(Path(adapters)), adapter_file(Path(adapters))
    if adapters is not None:
        peft = package("peft", "adapters=", "peft")
        if not isinstance(adapters, peft.PeftConfig):
            raise ModelError(
                f"adapters is a {type(adapters).__name__}; give a configuration of peft, such as "
                f"peft.LoraConfig(r=16, target_modules='all-linear'), or a folder of adapters."
            )
        if asked := _stacks_named(built, getattr(adapters, "target_parameters", None)):
            raise ModelError(
                f"target_parameters names {format_names(asked)}, which quantized= turns into codes, and adapters lie "
                f"beside weights in floating point. Leave the names out, or train without quantized=."
            )
        try:
            built = peft.get_peft_model(built, adapters)
        except Exception as error:  # of any class, as of no module with one of the given names
            raise ModelError(
                f"peft refuses adapters={type(adapters).__name__}(...): {error}. The base is on the meta device; where "
                f"its values are needed, attach the adapters to a base that has them, and give the model to zs.Engine."
            ) from error
        # By families of transformers, peft adds names to those that were given.
        if bare := _stacks_named(built, getattr(adapters, "target_parameters", None)):
            warnings.warn(
                f"No adapters lie beside {format_names(bare)}, which are quantised stacks of experts; without "
                f"quantized= those have adapters too.",
                stacklevel=2,
            )
    return PretrainedFiles(path, built, stored, file)


def _stacks_named(model: nn.Module, targets: Collection[str] | None) -> list[str]:
    """The quantised stacks of experts whose names end with those of parameters to adapt."""
    return [name for name in stacks_of(model) if any(name.endswith(f".{target}") for target in targets or ())]


def build(folder: Path, kind: type | None, dtype: torch.dtype | str | None = None) -> nn.Module:
    """The model of a folder's configuration, on the meta device.

    Args:
        kind: an auto class of transformers, a `PreTrainedModel`, or a class of diffusers; by default as the
            configuration says.
        dtype: as in `LoadOptions`.

    Raises:
        ModelError: there is no configuration, or transformers refuses it.
    """
    chosen = floating_dtype(None if dtype == "auto" else dtype)
    if folder.is_file():
        raise ModelError(f"{folder} is a file of weights without a {CONFIG}; give its folder, or pass model= too.")
    if folder.is_dir() and not (folder / CONFIG).is_file():
        raise _without_config(folder)
    if of_diffusers := diffusion_class(folder / CONFIG, kind):
        chosen = _dtype_of_files(folder) if dtype == "auto" else chosen
        with _undrawn():
            return built_by_diffusers(folder, of_diffusers, chosen)
    transformers = package("transformers", f"building the model of {folder}", "hf")
    config = _config_of(folder, kind, transformers)
    kind = _class_of(config, folder, transformers) if kind is None else kind
    make = getattr(kind, "_from_config", None) or getattr(kind, "from_config", None)
    if make is None:
        raise ModelError(
            f"model is {kind!r}; give an auto class of transformers, such as AutoModelForCausalLM, a PreTrainedModel, "
            f"or a model that was built on the meta device."
        )
    expected = getattr(kind, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        raise ModelError(
            f"{folder / CONFIG} is of the family {config.model_type!r}, and {kind.__name__} needs a configuration of "
            f"{expected.model_type!r}. Give the class of that family, or leave model out."
        )
    if dtype == "auto":
        chosen = config.dtype or _dtype_of_files(folder)
    try:
        with torch.device("meta"), _undrawn(), parameters_on_meta():  # some constructors draw on the host
            built: nn.Module = make(config, dtype=chosen or torch.float32)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"transformers cannot build {kind.__name__} from {folder / CONFIG}: {reason}") from error
    config = getattr(built, "config", config)
    config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file() and hasattr(built, "generation_config"):
        built.generation_config = transformers.GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return built


def _without_config(folder: Path) -> ModelError:
    """The error about a folder that holds no model, with the call that takes it."""
    adapters = _table_in(folder / ADAPTER_CONFIG)
    if adapters:
        base = adapters.get("base_model_name_or_path") or "BASE"
        found, way = "is a folder of adapters", f"call zs.from_pretrained({base!r}, ..., adapters={str(folder)!r})"
    elif (folder / MANIFEST).is_file():
        found, way = "is a checkpoint of an engine", "call engine.load() with it, or `zeroshard export` it first"
    elif (folder / "model_index.json").is_file():
        found, way = "is a pipeline of diffusers", "give the folder of one model in it"
    else:
        found, way = f"has no {CONFIG}", "give the folder of a model that save_pretrained wrote, or a model"
    return ModelError(f"{folder} {found}; {way}.")


def _config_of(folder: Path, kind: type | None, transformers: Any) -> Any:
    """The configuration of a folder; where transformers has no such family, by the class of the model.

    Raises:
        ModelError: neither reads it.
    """
    own = getattr(kind, "config_class", None)
    try:
        return transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers has no base class of its errors
        table = _table_in(folder / CONFIG)
        if own is not None and own.model_type == table.get("model_type"):
            return own.from_pretrained(str(folder))
        reason = str(error).partition("\n")[0].partition(". This could be")[0].rstrip(".")
        way = "give the folder of a model that save_pretrained wrote, or update transformers"
        if "auto_map" in table:
            reason = "it names code of its own, which is not run"
            way = "import the class of the model from it and pass model=, or a model that was built on the meta device"
        raise ModelError(f"transformers reads no configuration from {folder}: {reason}; {way}.") from error


def _table_in(file: Path) -> dict[str, Any]:
    """A table in a JSON file; empty if there is none."""
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _dtype_of_files(folder: Path) -> torch.dtype | None:
    """The first floating-point dtype of more than 8 bits in the files of a model."""
    shards = Shards(folder, files_of(folder))
    dtypes = (shards.dtype(name) for name in shards.shapes if not shards.code(name).startswith(("F8", "F4")))
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def _class_of(config: Any, folder: Path, transformers: Any) -> type:
    """The class that a configuration names."""
    names = getattr(config, "architectures", None) or []
    kind: type | None = next((found for name in names if (found := getattr(transformers, name, None))), None)
    kind = kind or _registered(config, names, transformers)
    if kind is None:
        named = f"names {', '.join(names)}, which transformers does not have" if names else "names no class"
        raise ModelError(f"{folder / CONFIG} {named}. Pass model=, such as transformers.AutoModelForCausalLM.")
    return kind


def _registered(config: Any, names: Sequence[str], transformers: Any) -> type | None:
    """The class of a model among those that `AutoModel.register` and its like were called with."""
    tables = [getattr(auto, "_model_mapping", None) for auto in vars(transformers.models.auto.modeling_auto).values()]
    found = (getattr(table, "_extra_content", {}).get(type(config)) for table in tables)
    return next((kind for kind in found if kind is not None and kind.__name__ in names), None)


@contextmanager
def _undrawn() -> Iterator[None]:
    """Torch's functions of initial values leave tensors on the meta device alone, over which they take long."""
    own = {name: getattr(nn.init, name) for name in DRAWING}
    try:
        for name, function in own.items():
            setattr(nn.init, name, partial(_drawn, function))
        yield
    finally:
        for name, function in own.items():
            setattr(nn.init, name, function)


def _drawn(function: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return tensor if tensor.is_meta else function(tensor, *args, **options)


def _size_of_names(opened: _Opened) -> int:
    return len(opened.names)


def _names_of_rank_0(mesh: Mesh, names: bytes, size: int) -> list[Renamed]:
    """The names in files and model that rank 0 has matched: transformers takes long over its table of all families.

    Args:
        names: on rank 0, as JSON.
        size: of that in bytes.
    """
    content = torch.empty(size, dtype=torch.uint8, device=mesh.device)
    if mesh.rank == 0:
        content.copy_(torch.frombuffer(bytearray(names), dtype=torch.uint8))
    Comm(mesh).broadcast(content, "names in the files")
    return [(name, own, pattern) for name, own, pattern in json.loads(content.cpu().numpy().tobytes())]


def _on_all_ranks(
    mesh: Mesh, make: Callable[[], Result], number: Callable[[Result], int] = lambda result: 0
) -> tuple[Result, int]:
    """A result of each rank's own, with a number of rank 0's; an error of one rank is raised on all."""
    result: Result | None = None
    problem: list[str] | None = None
    own = 0
    try:
        result = make()
        own = number(result)
    except ZeroshardError as error:
        problem = [type(error).__name__, str(error)]
    answers = Comm(mesh).agree_on([problem, own], "the files of a pretrained model")
    problems = [found for found, _ in answers if found]
    if problems:
        name, text = problems[0]
        raise {"ModelError": ModelError, "ConfigError": ConfigError}.get(name, CheckpointError)(text)
    assert result is not None
    return result, answers[0][1]
