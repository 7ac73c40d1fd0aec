"""Training tasks for the planner: a model of the main job or of the user's code, with its batches and optimizer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroshard.errors import ModelError
from zeroshard.plan import Plan
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.torch_internals import fakes
from zeroshard.train.config import TrainConfig
from zeroshard.train.model import BuiltModel, build_model, takes_tokens
from zeroshard.train.named_models import BATCH, Code, model_named
from zeroshard.train.optimizers import make_optimizer
from zeroshard.train.own_code import check_arguments, import_code, imported
from zeroshard.train.tokenizer import load_tokenizer


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
    return _task(config, lambda: built().module, partial(_tokens, model, config.sequence), rows)


def own_task(config: TrainConfig, rows: int, batch_of: str | None = None) -> TrainingTask:
    """The task of training the module that a function of the user's code returns.

    Args:
        config: `model` is the name of a class or of a function without arguments.
        rows: of one step, over all data ranks.
        batch_of: the name of a function from a number of rows to a batch as the engine takes it; by default `batch` of
            the model's file. A language model with the arguments of the built-in one or of transformers needs none.

    Raises:
        ModelError: a function that cannot be imported, that fails, or that makes no module; no batch.
    """
    code = model_named(config.model).code
    assert code is not None, config.model
    factory = import_code(code)
    check_arguments(config.model, factory)
    with fakes():
        build: Callable[[], Any] = partial(_on_meta, factory)
        try:
            module = build()
        except Exception:
            build = factory  # it reads values or moves to a device; the planner's tensors have no values
            module = _called(config.model, factory)
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"{config.model} returned {type(module).__name__}; it must return an nn.Module when it is called "
                f"without arguments"
            )
    hugging_face = takes_tokens(module) if batch_of is None else None
    if hugging_face is not None:
        built = BuiltModel(module, config.model, 0, hugging_face)
        return _task(config, build, partial(_tokens, built, config.sequence), rows)
    batch = batches_of(code, batch_of)
    if batch is None:
        raise ModelError(
            f"{config.model} makes a {type(module).__name__}, whose batches are not known; name a function of a "
            f"number of rows that makes one, such as --batch-of {config.model.partition(':')[0]}:{BATCH}"
        )
    return _task(config, build, batch, rows)


def batches_of(code: Code, named: str | None) -> Callable[[int], Any] | None:
    """The function that makes batches: the named one, or else `batch` of the model's file; None without any."""
    if named is not None:
        return imported(named)
    beside = code.beside(BATCH)
    return None if beside is None else import_code(beside)


def _task(config: TrainConfig, build: Callable[[], nn.Module], batch: Callable[[int], Any], rows: int) -> TrainingTask:
    optimizer = partial(make_optimizer, config)
    host_optimizer = partial(make_optimizer, replace(config, plan=Plan(offload="optimizer")))
    return TrainingTask(
        build, batch, optimizer, rows, config.sequence, config.model, whole_model=True, host_optimizer=host_optimizer
    )


def _tokens(built: BuiltModel, sequence: int, rows: int) -> dict[str, torch.Tensor]:
    return built.batch(torch.zeros(rows, sequence + 1, dtype=torch.long))


def _on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


def _called(name: str, factory: Callable[[], nn.Module]) -> nn.Module:
    try:
        return factory()
    except Exception as error:
        raise ModelError(
            f"{name} failed on tensors without values ({type(error).__name__}: {error}); it must build the model "
            f"without asking for values of tensors"
        ) from error
