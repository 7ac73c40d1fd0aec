"""Draws of modules in training, keyed by (seed, step, module's name, call, draw in the call, row, element).

A dispatch mode of torch receives every operation below autograd, also the parts of composite C++ operations, such as
the dropout of attention. It is on while a module runs in a forward of training, or in a recomputation; so torch's
generators are not used there, and nothing changes elsewhere.

[Note: recomputations] A recomputed region must repeat the draws of its forward, for any region and any number of
microbatches in flight. Every method of recomputation restores torch's default generator to its state at the start of
the region. So in a forward the generator is seeded, before the first draw and after each, with the number of the next
draw; the user's state is restored at the end. A recomputation reads this number.

[Note: parts] If layers are split among ranks, a draw is this rank's part of one process's draw. The part is recorded
with the forward's draw, and used again in a recomputation, whose region may begin anywhere.

[Note: names] A module at several paths of the model, such as one dropout shared by all blocks, is also named after its
caller, so that a pipeline stage with some of the callers counts as one process does. Its calls are counted on entry,
not per draw: a module that a stage skips counts.
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.errors import ModelError, PlanError
from zeroshard.parts.part import MicrobatchRows, RandomNumbers, TorchStreams
from zeroshard.parts.zones import ActivationZones, DividedActivations
from zeroshard.rng.draws import DRAWS, draws
from zeroshard.rng.layout import Stream, UnclearDrawError
from zeroshard.rng.rows import Rows
from zeroshard.rng.streams import RankStreams, equalise
from zeroshard.units.hooks import Hook, listen
from zeroshard.units.materialise import seed_of

MARK, PLACES = 0x5A << 55, 2**24  # prefix of the generator's seed; most draws of one forward
REMEMBERED = 1024  # forwards whose draws can be repeated
CALL, CHECKPOINTS = nn.Module._call_impl.__code__, checkpoints.__file__


@dataclass(slots=True)
class _Forward:
    """The state of the draws of one microbatch.

    Attributes:
        calls: number of calls of each module so far, by name.
        drawn: for each draw, the path of its module, its key, and the division of activations ([Note: parts]).
    """

    number: int
    rows: MicrobatchRows
    calls: Counter[str] = field(default_factory=Counter)
    drawn: list[tuple[str, int, DividedActivations | None]] = field(default_factory=list)

    def seed(self, draw: int) -> int:
        """The seed of torch's generator before this draw ([Note: recomputations])."""
        return MARK | self.number * PLACES + draw


@dataclass(slots=True)
class _Call:
    """A module that is running."""

    module: nn.Module
    name: str
    number: int
    draws: int = 0


class ExactNumbers:
    """The random numbers of one model; a `parts.part.RandomNumbers`.

    Args:
        rows: numbers the rows of the batches.
        zones: division of activations among ranks; None without.

    Raises:
        ModelError: the model has compiled or scripted modules, whose draws cannot be replaced.
    """

    def __init__(self, model: nn.Module, seed: int, rows: Rows, zones: ActivationZones | None = None) -> None:
        self._rows, self._zones = rows, zones
        self._paths = {module: path for path, module in model.named_modules()}
        places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
        self._shared = {module for module, count in places.items() if count > 1}
        self._running: list[_Call] = []
        self._mode = _Draws(self._draw)
        self._forwards: OrderedDict[int, _Forward] = OrderedDict()
        self._forward: _Forward | None = None
        self._given = False  # whether `microbatch` has set the forward
        self._count = 0
        self._state: torch.Tensor | None = None
        self._key = lru_cache(maxsize=2**16)(lambda *names: seed_of(seed, "draw", *names))
        for module, path in self._paths.items():
            _refuse_graphs(module, path)
            module.register_forward_pre_hook(Hook(self._enter), with_kwargs=True)
            module.register_forward_hook(Hook(self._leave), always_call=True)

    def number(self, parts: Sequence[Any]) -> list[MicrobatchRows | None]:
        """The rows of each microbatch of this data rank's batch; a collective call with several data ranks."""
        return [*self._rows.of_batch(parts)]

    def microbatch(self, rows: MicrobatchRows | None) -> AbstractContextManager[None]:
        """Forwards inside are of these rows."""
        return nullcontext() if rows is None else self._of_order(rows)

    @contextmanager
    def again(self, module: nn.Module) -> Iterator[None]:
        """Recompute a module's own forward inside ([Note: recomputations])."""
        self._enter(module, (), {})
        try:
            yield
        finally:
            self._leave(module, (), None)

    def discard(self) -> None:
        """Forget the microbatches of the step so far."""
        self._rows.discard()

    def end_step(self) -> None:
        """Check the row numbers of a loop by hand; a collective call with several ranks.

        Raises:
            BatchError: the ranks had unequal numbers of rows or of microbatches.
        """
        self._rows.check()

    @contextmanager
    def _of_order(self, rows: MicrobatchRows) -> Iterator[None]:
        before = self._forward
        self._forward, self._given = self._begin(rows), True
        try:
            yield
        finally:
            self._forward, self._given = before, False

    def _begin(self, rows: MicrobatchRows) -> _Forward:
        """Begin the forward of a microbatch."""
        if self._zones is not None:
            self._zones.reset()
        self._count += 1
        forward = self._forwards[self._count] = _Forward(self._count, rows)
        if len(self._forwards) > REMEMBERED:
            self._forwards.popitem(last=False)
        return forward

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        recomputes = torch._C._current_graph_task_id() != -1
        if not self._running:
            if not recomputes and not (module.training and (self._given or torch.is_grad_enabled())):
                return
            _refuse_graphs(module, self._paths[module])
            if not recomputes:
                self._begin_forward(args, kwargs)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        name = self._paths[module]
        if module in self._shared and self._running:
            name = f"{self._running[-1].name}>{name}"
        number = 0
        if not recomputes and self._forward is not None:
            number = self._forward.calls[name]
            self._forward.calls[name] += 1
        self._running.append(_Call(module, name, number))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._running or self._running[-1].module is not module:
            return  # it was entered outside of training
        self._running.pop()
        if self._running:
            return
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._state is not None:
            torch.default_generator.set_state(self._state)
            self._state = None
            listen(output, self._rows.backward_began, first=True)

    def _begin_forward(self, args: Any, kwargs: Any) -> None:
        """Seed the generator as the outermost module of a forward is entered."""
        if not self._given:
            rows = self._rows.of_forward(args, kwargs)
            if rows is not None:
                self._forward = self._begin(rows)
        assert self._forward is not None
        self._state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._forward.seed(len(self._forward.drawn)))

    def _draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a random operation."""
        own = kwargs.get("generator")
        if own is not None or _draws_nothing(operation, args, kwargs):
            return operation(*args, **kwargs)
        call = self._running[-1]
        recomputes = torch._C._current_graph_task_id() != -1
        forward, key, divided = self._drawn_before(call) if recomputes else self._drawn_now(call)
        known = DRAWS.get(operation)
        rows = forward.rows
        parameters = tuple(tuple(p.shape) for p in call.module._parameters.values() if p is not None)
        stream = Stream(key, rows.step, rows.count, rows.first, parameters, self._rows.drew, divided)
        try:
            if known is None:
                raise NotImplementedError(operation)
            return known(stream, *args, **kwargs)
        except NotImplementedError as error:
            raise PlanError(_refusal(operation, self._paths[call.module], call.module)) from error
        except UnclearDrawError as error:
            raise PlanError(_unclear(error, self._paths[call.module], call.module)) from error

    def _drawn_now(self, call: _Call) -> tuple[_Forward, int, DividedActivations | None]:
        forward = self._forward
        assert forward is not None
        self._refuse_bare_checkpoints()
        key = self._key(call.name, call.number, call.draws)
        call.draws += 1
        divided = None if self._zones is None else self._zones.divided
        forward.drawn.append((self._paths[call.module], key, divided))
        torch.default_generator.manual_seed(forward.seed(len(forward.drawn)))
        return forward, key, divided

    def _drawn_before(self, call: _Call) -> tuple[_Forward, int, DividedActivations | None]:
        """The forward, the key and the part of a repeated draw ([Note: recomputations], [Note: parts])."""
        path, seed = self._paths[call.module], torch.default_generator.initial_seed()
        forward = self._forwards.get((seed ^ MARK) // PLACES)
        draw = (seed ^ MARK) % PLACES
        if forward is None or draw >= len(forward.drawn) or forward.drawn[draw][0] != path:
            raise PlanError(
                f"rng='exact': '{path}' draws in a recomputation and the draw of its forward is not known. Recompute "
                f"with preserve_rng_state=True, in regions inside of the model, with the same modules in the same "
                f"order; or use rng='fast'."
            )
        torch.default_generator.manual_seed(forward.seed(draw + 1))
        return forward, *forward.drawn[draw][1:]

    def _refuse_bare_checkpoints(self) -> None:
        """Refuse a draw whose recomputation would bypass the model's modules.

        Raises:
            PlanError: with the module.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (frame.f_code is CALL and frame.f_locals["self"] in self._paths):
            if frame.f_code.co_filename == CHECKPOINTS:
                call = self._running[-1]
                raise PlanError(
                    f"rng='exact': '{self._paths[call.module]}' recomputes a function that draws by itself, outside "
                    f"of any module, so its draws cannot be made again. Give torch.utils.checkpoint a module, or use "
                    f"rng='fast'."
                )
            frame = frame.f_back


class _Draws(TorchDispatchMode):
    """Passes random operations to a function, and runs all others."""

    def __init__(self, draw: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw, self._known = draw, dict[Any, bool]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: skips torch's guard against compilation, a sixth of an operation's cost; nothing is compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._known.get(func)
        if found is None:
            found = self._known[func] = draws(func)
        if found:
            return self._draw(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


@lru_cache(maxsize=256)
def _switches(operation: Any) -> list[tuple[int, str, Any]]:
    """The arguments that switch off an operation's draw: place, name and default."""
    names = ("dropout_p", "dropout", "train", "training")
    arguments = enumerate(operation._schema.arguments)
    return [(place, a.name, a.default_value) for place, a in arguments if a.name in names]


def _draws_nothing(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operation does not draw: in evaluation, or with a dropout of 0."""
    given = [
        args[place] if place < len(args) else kwargs.get(name, default) for place, name, default in _switches(operation)
    ]
    return any(value is not None and not value for value in given)


def _refusal(operation: Any, path: str, module: nn.Module) -> str:
    """The message for an unsupported operation, with the way out."""
    name = operation._schema.name.removeprefix("aten::")
    way_out = "use rng='fast'"
    if "attention" in name:
        way_out = (
            "call it inside `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, set its dropout to 0, or use "
            "rng='fast'"
        )
    return (
        f"rng='exact': {type(module).__name__} at '{path or 'the model itself'}' draws by torch's {name}, whose random "
        f"numbers cannot be replaced; {way_out}."
    )


def _unclear(error: UnclearDrawError, path: str, module: nn.Module) -> str:
    """The message for an ambiguous draw between split layers, with the way out."""
    return (
        f"rng='exact': {type(module).__name__} at '{path or 'the model itself'}' draws {error}. Draw numbers for each "
        f"element of the activation, leave the layers around it whole, or use rng='fast'."
    )


def _refuse_graphs(module: nn.Module, path: str) -> None:
    scripted = isinstance(module, torch.jit.ScriptModule)
    compiled = not scripted and (module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule")
    if compiled or scripted:
        raise ModelError(
            f"rng='exact': '{path or 'the model itself'}' is {'compiled' if compiled else 'scripted'}, and what a "
            f"graph draws cannot be replaced. Leave it as it is in Python, or use rng='fast'."
        )


def random_numbers_of(
    model: nn.Module, exact: bool, seed: int, rows: Rows, zones: ActivationZones | None = None
) -> RandomNumbers:
    """Random numbers keyed by step, row and module if `exact`, else torch's streams.

    A collective call if activations are divided: ranks with the same data get equal generators.

    Args:
        rows: numbers the rows of the batches.
        zones: division of activations among ranks; None without.

    Raises:
        ModelError: `exact`, and the model has modules whose draws cannot be replaced.
    """
    if zones is None or zones.axis is None:
        return ExactNumbers(model, seed, rows) if exact else TorchStreams()
    equalise(zones.axis.comm)
    if exact:
        return ExactNumbers(model, seed, rows, zones)
    return RankStreams(model, zones, zones.axis.comm)
