"""Training tasks for the planner: a model of the main job or of the user's code, with its batches and optimizer."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.errors import ModelError
from zeroshard.plan import Plan
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.torch_internals import fakes
from zeroshard.train.config import TrainConfig
from zeroshard.train.gpt import GPT
from zeroshard.train.model import BuiltModel, build_model
from zeroshard.train.optimizers import make_optimizer
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
        config: `model` is `module:function`, of a function without arguments.
        rows: of one step, over all data ranks.
        batch_of: `module:function`, of a function from a number of rows to a batch as the engine takes it; a language
            model of this package or of transformers needs none.

    Raises:
        ModelError: a function that cannot be imported, that fails, or that makes no module; no batch.
    """
    factory = imported(config.model)
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
    if batch_of is not None:
        return _task(config, build, imported(batch_of), rows)
    hugging_face = hasattr(getattr(module, "config", None), "vocab_size")
    if not hugging_face and not isinstance(module, GPT):
        raise ModelError(
            f"{config.model} makes a {type(module).__name__}, whose batches are not known; name a function of a "
            f"number of rows that makes one, such as --batch-of {config.model.partition(':')[0]}:batch"
        )
    built = BuiltModel(module, config.model, 0, hugging_face)
    return _task(config, build, partial(_tokens, built, config.sequence), rows)


def imported(name: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules of the current folder are found.

    Raises:
        ModelError: it cannot be imported, or is no function.
    """
    module_name, _, path = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ModelError(
            f"{name} cannot be imported ({type(error).__name__}: {error}); write module:function, of a module that "
            f"Python finds from {folder}"
        ) from error
    if not callable(found):
        raise ModelError(f"{name} is {type(found).__name__}; it must be a function")
    function: Callable[..., Any] = found
    return function


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
