"""Training tasks for the planner: a model of the main job or of the user's code, with its batches and optimizer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroshard.data.tokenizer import load_tokenizer
from zeroshard.errors import ModelError
from zeroshard.plan import Plan
from zeroshard.planner.predict.copies import zeroed_copy
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.torch_internals import fakes
from zeroshard.planner.search.adapted import with_adapters
from zeroshard.planner.search.identity import identity_of
from zeroshard.train.config import OptimizerName, TrainConfig
from zeroshard.train.model import BuiltModel, build_model, takes_tokens
from zeroshard.train.named_models import BATCH, Code, has_weights, model_named
from zeroshard.train.optimizers import make_optimizer
from zeroshard.train.other_models import other_model
from zeroshard.train.own_code import check_arguments, import_code, imported

CHEAPER: tuple[OptimizerName, ...] = ("adamw8bit", "adafactor")
LOSS_CHUNK = 1024  # rows, of models that else hold all logits


def language_task(config: TrainConfig, rows: int) -> TrainingTask:
    """The task of `zeroshard train` with these options.

    Args:
        rows: of one step, over all data ranks.

    Raises:
        ModelError: there is no such model, or it cannot be built.
    """
    vocabulary = load_tokenizer(config.tokenizer).vocabulary

    def built() -> BuiltModel:
        return build_model(config.model, vocabulary, config.sequence, config.dropout, config.mixture)

    with fakes():
        model = built()
    task = _task(config, lambda: built().module, partial(_tokens, model, config.sequence), rows)
    task = replace(task, identity=identity_of(model.module, *_rates(config)))
    if not model.hugging_face:
        return task
    task = replace(_made_aside(task, config), loss_chunk=LOSS_CHUNK)
    return task if config.adapted is None else with_adapters(task, config.adapted)


def other_task(config: TrainConfig, rows: int) -> TrainingTask | None:
    """The task of training the class that a configuration names, where that is no causal language model.

    Its name is that of the model and of the class.

    Args:
        rows: of one step, over all data ranks.

    Returns:
        None for other models, and for classes whose batches are not known.

    Raises:
        ModelError: transformers cannot build it.
    """
    file = model_named(config.model).file
    if file is None or (other := other_model(file, config.sequence)) is None:
        return None
    named = replace(config, model=f"{config.model}:{other.name}", sequence=other.tokens)
    module, build = _built(named.model, other.build)
    task = replace(_task(named, build, other.batch, rows), values="integers" if other.reads_integers else False)
    return _made_aside(replace(task, identity=identity_of(module, *_rates(config))), config)


def _made_aside(task: TrainingTask, config: TrainConfig) -> TrainingTask:
    """The task of a model of transformers, which is made in host memory, or read from files slice by slice."""
    read = config.pretrained and has_weights(config.model)
    identity = task.identity and f"{task.identity}, values from files: {read}"
    return replace(task, made_aside="from files" if read else "whole", identity=identity)


def own_task(config: TrainConfig, rows: int, batch_of: str | None = None, sequence: int | None = None) -> TrainingTask:
    """The task of training the module that a function of the user's code returns.

    Args:
        config: `model` is the name of a class or of a function without arguments.
        rows: of one step, over all data ranks.
        batch_of: the name of a function from a number of rows to a batch as the engine takes it; by default `batch` of
            the model's file. A language model with the arguments of the built-in one or of transformers needs none.
        sequence: tokens of a row of such batches; by default a row counts as one.

    Raises:
        ModelError: a function that cannot be imported, that fails, or that makes no module; no batch.
    """
    code = model_named(config.model).code
    assert code is not None, config.model
    factory = import_code(code)
    check_arguments(config.model, factory)
    module, build = _built(config.model, factory)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(f"{config.model} has no parameter to train; make a model with some of requires_grad=True")
    hugging_face = takes_tokens(module) if batch_of is None else None
    if hugging_face is not None:
        built = BuiltModel(module, config.model, 0, hugging_face)
        task = _task(config, build, partial(_tokens, built, config.sequence), rows)
        return replace(task, identity=identity_of(module, *_rates(config)))
    batch = batches_of(code, batch_of)
    if batch is None:
        raise ModelError(
            f"{config.model} makes a {type(module).__name__}, whose batches are not known; name a function of a "
            f"number of rows that makes one, such as --batch-of {config.model.partition(':')[0]}:{BATCH}"
        )
    task = _task(replace(config, sequence=sequence or 1), build, batch, rows)
    return replace(task, identity=identity_of(module, batch, *_rates(config)))


def batches_of(code: Code, named: str | None) -> Callable[[int], Any] | None:
    """The function that makes batches: the named one, or else `batch` of the model's file; None without any."""
    if named is not None:
        return imported(named)
    beside = code.beside(BATCH)
    return None if beside is None else import_code(beside)


def _task(config: TrainConfig, build: Callable[[], nn.Module], batch: Callable[[int], Any], rows: int) -> TrainingTask:
    on_device, on_host = _makers(config)
    name, length = config.model, config.sequence
    return TrainingTask(build, batch, on_device, rows, length, name, whole_model=True, host_optimizer=on_host)


def with_cheaper(task: TrainingTask, config: TrainConfig) -> TrainingTask:
    """The task with optimizers of smaller states beside AdamW, for plans that may change results."""
    names = CHEAPER if config.optimizer == "adamw" else ()
    return replace(task, others={name: _makers(replace(config, optimizer=name)) for name in names})


def _makers(config: TrainConfig) -> tuple[Callable[[Any], torch.optim.Optimizer], ...]:
    """Functions that make the optimizer of a model, on the device and on the host."""
    return partial(make_optimizer, config), partial(make_optimizer, replace(config, plan=Plan(offload="optimizer")))


def _rates(config: TrainConfig) -> tuple[Any, ...]:
    """The options from which optimizers are made."""
    return config.optimizer, config.learning_rate, config.beta2, config.weight_decay


def _tokens(built: BuiltModel, sequence: int, rows: int) -> dict[str, torch.Tensor]:
    return built.batch(torch.zeros(rows, sequence + 1, dtype=torch.long))


def _built(name: str, factory: Callable[[], Any]) -> tuple[nn.Module, Callable[[], nn.Module]]:
    """A model without values, and the function that made it.

    Raises:
        ModelError: the factory fails, or makes no module.
    """
    with fakes():
        build: Callable[[], Any] = partial(_on_meta, factory)
        try:
            module = build()
        except Exception:
            build = factory  # it reads values or moves to a device; the planner's tensors have no values
            module = _called(name, factory)
        if isinstance(module, nn.Module) and not _fills_itself(module):
            build = partial(_on_host, build)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{name} returned {type(module).__name__}; it must return an nn.Module when it is called without arguments"
        )
    return module, build


def _on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


def _on_host(build: Callable[[], nn.Module]) -> nn.Module:
    """The model in host memory, under `fakes` without values."""
    return zeroed_copy(build(), "cpu")


def _fills_itself(model: nn.Module) -> bool:
    """Whether every module with tensors on the meta device has a function that gives them values."""
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        named = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if named is None and any(tensor.is_meta for tensor in own):
            return False
    return True


def _called(name: str, factory: Callable[[], nn.Module]) -> nn.Module:
    try:
        return factory()
    except Exception as error:
        raise ModelError(
            f"{name} failed on tensors without values ({type(error).__name__}: {error}); it must build the model "
            f"without asking for values of tensors"
        ) from error
