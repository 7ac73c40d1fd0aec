"""The inverse of the cut into stages: the parameters and buffers of all stages in the modules of every rank."""

from collections.abc import Mapping

import torch
from torch import nn

from zeroshard.pipeline.buffers import Buffers, whole_state_dict
from zeroshard.pipeline.stage import Stage
from zeroshard.pipeline.whole import WholeModel
from zeroshard.units import set_values
from zeroshard.units.hooks import in_place_of
from zeroshard.units.ignored import ignored_in, is_ignored

Parameters = dict[str, nn.Parameter]  # by first name


def parameters_before(stage: Stage | WholeModel) -> Parameters:
    """The parameters that the layers of all stages had before the cut; none of a model in one stage."""
    if not isinstance(stage, Stage):
        return {}
    return {name: parameter for layer in stage.chain.layers for name, parameter in layer.parameters.items()}


def with_values(parameter: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """A parameter with values in host memory: the same object, unless it is on the meta device."""
    values = values.cpu()  # where a second engine's buffers are not in the way
    if parameter.is_meta:
        return in_place_of(parameter, values)
    set_values(parameter, values)
    return parameter


def undo_cut(
    model: nn.Module,
    stage: Stage | WholeModel,
    buffers: Buffers,
    parameters: Parameters,
    trained: Mapping[str, bool],
    tied: Mapping[str, str],
) -> None:
    """Give every module its parameters and buffers; a collective call of the ranks of all stages.

    Args:
        buffers: of the model.
        parameters: of all stages, with values; those that the plan ignores get theirs here.
        trained: whether each of this rank's parameters requires gradients.
        tied: for parameters with several names, each further name and the first.
    """
    if not isinstance(stage, Stage):
        return
    for theirs in stage.world.agree_on(dict(trained), "parameters that require gradients"):
        for name, requires in theirs.items():
            parameters[name].requires_grad_(requires)
    ignored = {tied.get(name, name): parameter for name, parameter in ignored_in(model).items()}
    kept = dict(model.named_buffers(remove_duplicate=False)) | {name: p.detach() for name, p in ignored.items()}
    whole = whole_state_dict(kept, stage, buffers)
    for name in [name for name, parameter in parameters.items() if is_ignored(parameter)]:
        parameters[name] = ignored[name] if name in ignored else with_values(parameters[name], whole[name])
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            first = tied.get(f"{prefix}{name}", f"{prefix}{name}")
            if parameter is not None:
                module._parameters[name] = parameters.get(first, parameter)  # one of no layer stays
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = whole[f"{prefix}{name}"]
