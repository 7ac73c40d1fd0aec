"""fp32 master weights in the place of a model's parameters, for averages of weights under 16-bit plans."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zeroshard.engine import Engine


class MasterWeights:
    """Whole master weights of a model, where a copy of the model is averaged.

    A 16-bit plan computes with rounded copies of the fp32 master weights, and an average of rounded weights loses most
    updates. This object has `parameters()` and `buffers()` in the model's order, which is all that
    `torch.optim.swa_utils.AveragedModel.update_parameters` asks of a model. Making one is a collective call, and each
    rank holds the whole weights in fp32 as long as the object lives.

    Args:
        engines: one engine, or those of the parts of a model.
        model: whose parameters are listed; by default that of the engine. Parameters of no engine are themselves.
    """

    def __init__(self, engines: Engine | Sequence[Engine], model: nn.Module | None = None) -> None:
        self._engines = [engines] if isinstance(engines, Engine) else list(engines)
        self._model = self._engines[0].model if model is None else model
        self._whole = [dict(engine.weights(dtype=torch.float32)) for engine in self._engines]
        self._masters = {
            id(parameter): whole[name]
            for engine, whole in zip(self._engines, self._whole, strict=True)
            for name, parameter in engine.model.named_parameters()
            if name in whole
        }

    def parameters(self) -> Iterator[torch.Tensor]:
        """Whole fp32 values, in the order of the model's parameters."""
        for parameter in self._model.parameters():
            yield self._masters.get(id(parameter), parameter)

    def buffers(self) -> Iterator[torch.Tensor]:
        """The model's own buffers."""
        return self._model.buffers()

    def write_back(self) -> None:
        """Make the values of `parameters()` the engine's weights; optimizer states stay.

        A collective call between two steps: gradients since the last one are discarded.
        """
        for engine, whole in zip(self._engines, self._whole, strict=True):
            names = {name for name, _ in engine.model.named_parameters()}
            engine.load_state_dict({name: value for name, value in whole.items() if name in names}, strict=False)
