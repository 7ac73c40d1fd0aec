"""Models that are chains in unlike ways, and ways to run them whole, in parts, and on stages that lack each other's
weights."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.pipeline.cut.bypass import Bypass, SentValues
from zeroshard.pipeline.cut.chain import Chain
from zeroshard.schedule.lower import Skip

Run = Callable[[nn.Module, Any], Any]
Outcome = tuple[Tensor, dict[str, Tensor]]  # the loss, and gradients by name


def call(model: nn.Module, batch: Any) -> Any:
    return model(*batch)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def whole(model: nn.Module, batch: Any, run: Run = call) -> Outcome:
    """The model as it is, in one piece."""
    model = copy.deepcopy(model)
    torch.manual_seed(7)
    loss = run(model, batch)
    loss.backward()
    return loss.detach(), gradients(model)


def in_parts(
    chain: Chain, batch: Any, model: nn.Module, firsts: Sequence[int], run: Run = call, stages: int | None = None
) -> Outcome:
    """Parts that begin at layers `firsts`, one after the other, with detached tensors between them.

    Args:
        stages: stages that hold the parts in turn; by default each has one.
    """
    model.zero_grad()
    torch.manual_seed(7)
    loss = _through([(chain, model)] * len(firsts), firsts, batch, run, stages)
    return loss, gradients(model)


def on_stages(
    model: nn.Module,
    example: Any,
    batch: Any,
    firsts: Sequence[int],
    run: Run = call,
    blocks: Sequence[str] | None = None,
) -> Outcome:
    """Each part on a copy of the model that has the weights of its own layers only."""
    stages = []
    for first, last in pairwise([*firsts, 10**6]):
        stage = copy.deepcopy(model)
        forward = lambda stage=stage: run(stage, example)  # type: ignore[misc]  # noqa: E731
        chain = Chain(stage, forward, blocks, device=torch.device("cpu"))
        _remove(chain, first, last)
        stages.append((chain, stage))
    torch.manual_seed(7)
    loss = _through(stages, firsts, batch, run)
    total: dict[str, Tensor] = {}
    for _, stage in reversed(stages):
        for name, gradient in gradients(stage).items():
            total[name] = total[name] + gradient if name in total else gradient
    return loss, total


def _through(
    parts: Sequence[tuple[Chain, nn.Module]], firsts: Sequence[int], batch: Any, run: Run, stages: int | None = None
) -> Tensor:
    ends, stages = [*firsts[1:], len(parts[0][0].layers)], stages or len(firsts)
    entered: list[Tensor | None] = [None]
    left: list[Tensor] = []
    sent: dict[Skip, Tensor] = {}
    for number, ((chain, model), first, last) in enumerate(zip(parts, firsts, ends, strict=True)):
        forward = lambda model=model: run(model, batch)  # type: ignore[misc]  # noqa: E731
        chain.crossing.route([*firsts, ends[-1]], stages, chain.carried.reach if chain.carried.needed else ())
        bypass = Bypass()
        if first:
            standin = chain.boundary(first, forward)
            assert (standin.shape, standin.dtype) == (left[-1].shape, left[-1].dtype)
            entered.append(left[-1].detach().requires_grad_())
            for hop, values in messages_beside(chain, first, forward).items():
                if hop.target == number:
                    bypass.known |= values.unpack(sent.pop(hop))
        left.append(chain.run(first, last, forward, entered[-1], bypass=bypass))
        for hop, values in messages_beside(chain, last, forward).items() if last < ends[-1] else ():
            if hop.source == number:
                sent[hop] = values.pack(bypass.known, left[-1].device)
    assert not sent
    gradient = None
    for output, hidden in zip(reversed(left), reversed(entered), strict=True):
        if output.requires_grad:
            output.backward(gradient)
        gradient = None if hidden is None else torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
    return left[-1].detach()


def messages_beside(chain: Chain, boundary: int, forward: Callable[[], Any]) -> dict[Skip, SentValues]:
    """The messages of values beside the activation that begin or end at a boundary, or pass over it."""
    known = Bypass()
    chain.run_standing_in(boundary, boundary, forward, known)
    return {hop: SentValues.of(groups, known.known) for hop, groups in chain.crossing.routes.items()}


def _remove(chain: Chain, first: int, last: int) -> None:
    """Take the weights of other layers than [first, last) away, as a stage of the engine does."""
    here = {id(p) for layer in chain.layers[first:last] for p in layer.parameters.values()}
    for layer in chain.layers:
        for parameter in layer.parameters.values():
            for module, name in [] if id(parameter) in here else list(chain.sites(parameter)):
                absent = torch.empty_like(parameter, device="meta")
                if module in chain.frames:
                    absent = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(absent, requires_grad=False)
    chain.placeholders.forget()


def vgg(flat: bool) -> nn.Module:
    """A small VGG: one Sequential of unlike layers, or `features` and `classifier`; ReLUs write into their input."""
    features = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    features += [nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    classifier = [nn.Linear(24, 10), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(10, 5)]
    if flat:
        return nn.Sequential(*features, nn.Flatten(), *classifier)
    return FeaturesAndClassifier(nn.Sequential(*features), nn.Sequential(*classifier))


class FeaturesAndClassifier(nn.Module):
    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features, self.classifier = features, classifier

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return x


def classify(model: nn.Module, batch: Any) -> Any:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def pictures(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 8, 8), torch.randint(5, (rows,))


class Angles(nn.Module):
    """A table made of a buffer and the positions, which asks the activation only for its dtype; no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.tensor([1.0, 0.3]), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return (positions[:, None] * self.frequency).cos().to(x.dtype)  # type: ignore[operator]


class Rotated(nn.Module):
    """A block that takes its activation and a table by name and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.2)

    def forward(self, angles: Tensor | None = None, *, x: Tensor, scale: float = 1.0) -> tuple[str, Tensor]:
        assert angles is not None
        y = self.inner(x)
        y = torch.cat((y[..., :2] * angles, y[..., 2:]), dim=-1)
        return "unused", x + self.dropout(y) * scale


class Frame(nn.Module):
    """Parameters of its own before, between and after the blocks, a table for all of them, and modules in between."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.patch = nn.Linear(4, 6)
        self.cls = nn.Parameter(torch.randn(1, 1, 6))
        self.position = nn.Parameter(torch.randn(5, 6))
        self.dropout = nn.Dropout(dropout)
        self.angles = Angles()
        self.blocks = nn.ModuleList([Rotated() for _ in range(3)])
        self.between = nn.ModuleList([nn.Sequential(nn.LayerNorm(6), nn.ReLU(inplace=True))])
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, patches: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(patches)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1)
        x = self.dropout(x + self.position[: x.shape[1]])
        angles = self.angles(x, torch.arange(x.shape[1], device=x.device))
        for number, block in enumerate(self.blocks):
            _, x = block(x=x, scale=0.5, angles=angles) if number else block(angles, x=x)
            if number == 1:
                x = self.between[0](x) * self.gain
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), labels)


def patches(rows: int, count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, count, 4), torch.randint(3, (rows,))
