"""Parameters that an engine leaves to the user: `Plan(ignored=...)`.

[Note: ignored parameters] As with FSDP2's `ignored_params`, they stay the user's own objects on every rank: whole, on
their device, in their dtype, in no flat buffer. Their gradients are torch's own, of this rank's backwards alone: never
reduced, clipped or unscaled. No update changes them. Like buffers, they start with rank 0's values, and each rank has
its own from then on; state dicts and files hold them under their names, and a checkpoint those of every rank. In a
pipeline they are on the ranks of each stage that uses them, and parameters on the meta device stand for them on others.
A mark on the parameter says so, until the next engine is made.
"""

import difflib
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from zeroshard.errors import ModelError, OptimizerError, PlanError
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.text import format_names

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MARK = "ignored_by_engine"  # an attribute of ignored parameters
GIVEN, MADE = "given", "made"  # its values: by the user, or by the engine in place of one on the meta device
ELSEWHERE = "elsewhere"  # its value where the parameter itself is on other stages


def is_ignored(parameter: torch.Tensor) -> bool:
    """Whether the engine leaves a parameter to the user ([Note: ignored parameters])."""
    return MARK in vars(parameter)


def ignored_in(model: nn.Module) -> dict[str, nn.Parameter]:
    """The ignored parameters of a model on this rank, by the first name of each."""
    marks = ((name, parameter, vars(parameter).get(MARK)) for name, parameter in model.named_parameters())
    return {name: parameter for name, parameter, mark in marks if mark not in (None, ELSEWHERE)}


def ignored_names(model: nn.Module, further: Container[str]) -> list[str]:
    """The first names of all ignored parameters of a model, those of other stages included, in order.

    Args:
        further: names of parameters that have others before.
    """
    return sorted(name for name, parameter in model.named_parameters() if is_ignored(parameter) and name not in further)


def mark_ignored(model: nn.Module, wanted: Sequence[str]) -> None:
    """Mark the parameters that a plan ignores, and no others.

    Args:
        wanted: names of parameters, paths or classes of modules, or patterns of names (`blocks.*.gate`).

    Raises:
        PlanError: one fits no parameter, or all parameters are ignored.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for parameter in named.values():
        vars(parameter).pop(MARK, None)
    for want in wanted:
        found = list(_named(model, named, want))
        if not found:
            names = [*named, *(path for path, _ in model.named_modules()), *_classes(model)]
            near = difflib.get_close_matches(want, names, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Its parameters are {format_names(list(named))}."
            raise PlanError(f"ignored names {want!r}, which is no parameter, module, class or pattern of them. {hint}")
        for parameter in found:
            vars(parameter)[MARK] = GIVEN
    if wanted and all(map(is_ignored, named.values())):
        raise PlanError(f"ignored={tuple(wanted)!r} names every parameter of the model, so there is nothing to train.")


def note_made(parameter: nn.Parameter) -> None:
    """Note that the engine has made an ignored parameter."""
    vars(parameter)[MARK] = MADE


def note_elsewhere(parameter: nn.Parameter) -> None:
    """Note that a parameter stands for an ignored one of other stages."""
    vars(parameter)[MARK] = ELSEWHERE


def trained_by(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model for an optimizer: all that are not ignored."""
    return [parameter for parameter in model.parameters() if not is_ignored(parameter)]


def made_for(model: nn.Module, optimizer: OptimizerLike, ignored: Sequence[str]) -> torch.optim.Optimizer:
    """The optimizer itself, or the one that a function makes, over the parameters that are not ignored.

    Ignored ones are taken out of its groups, with a warning where they require gradients.

    Args:
        ignored: as of `mark_ignored`.

    Raises:
        PlanError: as `mark_ignored`. ModelError: there are no parameters. OptimizerError: the function returned
            something else.
    """
    mark_ignored(model, ignored)
    if not isinstance(optimizer, torch.optim.Optimizer):
        trained = trained_by(model)  # of all stages; a list may be walked more than once
        if not trained:
            raise ModelError(f"The model, a {type(model).__name__}, has no parameters, so there is nothing to train.")
        made = optimizer(trained)
        if not isinstance(made, torch.optim.Optimizer):
            raise OptimizerError(
                f"The function of the parameters returned {made!r}, and it must return a torch.optim optimizer; write "
                f"for example functools.partial(torch.optim.AdamW, lr=1e-3)."
            )
        optimizer = made
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = [parameter for parameter in every if is_ignored(parameter)]
    for group in optimizer.param_groups if found else ():
        group["params"] = [parameter for parameter in group["params"] if not is_ignored(parameter)]
    if any(parameter.requires_grad for parameter in found):
        warnings.warn(
            f"{len(found)} parameters that the plan ignores were taken out of the {type(optimizer).__name__}, which "
            f"updates slices of the others. Train them with an optimizer of their own.",
            stacklevel=4,
        )
    return optimizer


def place_ignored(model: nn.Module, device: torch.device, ledger: Ledger) -> None:
    """Count ignored parameters on the device, and bring those there that the engine has made; others stay."""
    for name, parameter in ignored_in(model).items():
        if vars(parameter)[MARK] == MADE:
            parameter.data = parameter.data.to(device)
        if parameter.device.type == device.type:
            ledger.take(Category.PARAMETERS, parameter.nbytes, f"ignored {name}")
            ledger.remember(parameter)


def kept_by_rank(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The tensors of a module of which each rank has its own: persistent buffers, None included, and ignored ones.

    Ignored ones of other stages are on the meta device.
    """
    for name, buffer in module._buffers.items():
        if name not in module._non_persistent_buffers_set:
            yield name, buffer
    for name, parameter in module._parameters.items():
        if parameter is not None and is_ignored(parameter):
            yield name, parameter.to("meta") if vars(parameter)[MARK] == ELSEWHERE else parameter


def _named(model: nn.Module, named: dict[str, nn.Parameter], want: str) -> Iterator[nn.Parameter]:
    if want in named:
        yield named[want]
    for path, module in model.named_modules():
        if want == path or want == type(module).__name__:
            yield from module.parameters()
    if any(sign in want for sign in "*?["):
        yield from (parameter for name, parameter in named.items() if fnmatchcase(name, want))


def _classes(model: nn.Module) -> list[str]:
    return sorted({type(module).__name__ for module in model.modules()})
