"""Small models: one forward of a narrow copy records the arguments of each module's call.

[Note: models in small] A trial of one module must call it as its model does: with masks, positions of several kinds,
biases for all heads, states of other layers. So the model's own forward runs once, on a few tokens, in a copy whose
linear layers are products of two narrow matrices and whose embeddings have a few rows: the cost does not depend on the
width or the vocabulary. Of equal blocks only the first two compute; the others return their input. Parameters of other
modules are random; modules with very many (experts) are replaced by a function of their input.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zeroshard.tensor.find.linear import linear_features
from zeroshard.tensor.find.trial import BATCH, TrialWeights, apart, copy_of, first_tensor, taken

RANK, TOKENS, ROWS = 8, 6, 11  # of products; positions of a sequence; of embeddings
MOST, MOST_FLAT = 2**20, 2**22  # parameters of a module that is no linear layer; of one without stacks, as a router
COMPUTED = 2  # of blocks that are alike
DEEPEST = 16  # blocks that are computed where a model needs all of them
OF_LAYERS = ("layer_idx", "layer_id", "layer_number", "layer_index")  # attributes in which equal layers differ
TOKEN_NAMES = ("input_ids", "decoder_input_ids")
Stand = Callable[[str, nn.Module], nn.Module]


class CannotRun(Exception):
    """The small model fails; the message is the reason."""


class _Watched(Tensor):
    """A weight that notes on its stand-in that an operation read it; its shape and type may be read."""

    stand: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation on plain tensors."""
        if func.__name__ not in ("__get__", "size", "dim", "numel", "type", "is_floating_point"):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, _Watched):
                    vars(leaf.stand)["elsewhere"] = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _Recording(nn.Module):
    """A stand-in with a weight of the model's shape, without memory; `elsewhere`: whether an operation read it."""

    weight: Tensor

    def _set_weight(self, weight: Tensor) -> None:
        self.weight = nn.Parameter(torch.zeros(1).expand(tuple(weight.shape)), requires_grad=False)
        self.elsewhere = False

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name == "weight" and isinstance(value, Tensor):
            value = value.detach().as_subclass(_Watched)
            vars(value)["stand"] = self
        return value


class NarrowLinear(_Recording):
    """A stand-in for a linear layer: a product of two matrices of RANK columns and rows.

    Attributes:
        read: [I, RANK]; made: [RANK, O].
    """

    def __init__(self, weights: TrialWeights, path: str, module: Any) -> None:
        super().__init__()
        features = linear_features(module)
        assert features is not None
        inputs, outputs = features.inputs, features.outputs
        self.in_features = self.nx = inputs
        self.out_features = self.nf = outputs
        self.read = nn.Parameter(weights.drawn((path, "read"), (inputs, RANK)) / inputs**0.5)
        self.made = nn.Parameter(weights.drawn((path, "made"), (RANK, outputs)) / RANK**0.5)
        bias = None if module.bias is None else nn.Parameter(weights.drawn((path, "bias"), (outputs,)) * 0.1)
        self._set_weight(module.weight)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        y = x.to(self.read.dtype) @ self.read @ self.made
        return y if self.bias is None else y + self.bias


class FewRows(_Recording, nn.Embedding):
    """A stand-in for an embedding: a few rows, looked up modulo their number."""

    def __init__(self, weights: TrialWeights, path: str, module: nn.Embedding) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.rows = nn.Parameter(weights.drawn((path, "rows"), (ROWS, module.embedding_dim)))
        self._set_weight(module.weight)

    def forward(self, input: Tensor) -> Tensor:
        """[...] to [..., D]."""
        return nn.functional.embedding(input.long() % ROWS, self.rows)


class _Same(nn.Module):
    """A stand-in for a module with very many parameters: half of its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """[..., D] to [..., D]."""
        return first_tensor((args, kwargs)) * 0.5


class SmallModel:
    """A small copy of a model.

    Args:
        stand: stand-ins of a trial, by path.
        deep: whether all blocks compute.

    Attributes:
        copy: the copy.
    """

    def __init__(
        self, model: nn.Module, weights: TrialWeights, stand: Mapping[str, nn.Module] | None = None, deep: bool = False
    ) -> None:
        self._model, self._weights, self._outputs = model, weights, dict[Any, Any]()
        given = stand or {}
        first: dict[nn.Module, str] = {}
        replaced: dict[str, nn.Module] = {}
        passing = {} if deep else dict(_passing(model))
        skipped = [f"{path}." for path in passing]
        for path, module in model.named_modules(remove_duplicate=False):
            if any(path.startswith(each) for each in skipped):
                continue
            name = first.setdefault(module, path)
            if path in passing:
                replaced[path] = self._pass(module, passing[path])
            elif path in given:
                replaced[path] = given[path]
            elif (made := self._stand(name, module)) is not None:
                replaced[path] = made
        self.copy: Any = copy_of(model, replaced, self._parameter, tables={})
        for path in {*passing.values()}:
            block = self.copy.get_submodule(path)
            block.register_forward_hook(lambda block, args, output, path=path: self._outputs.update({path: output}))

    def _stand(self, path: str, module: nn.Module) -> nn.Module | None:
        if linear_features(module) is not None:
            return NarrowLinear(self._weights, path, module)
        if type(module).forward is nn.Embedding.forward and isinstance(module, nn.Embedding):
            return FewRows(self._weights, path, module)
        own = list(module.parameters(recurse=False))
        most = MOST if any(parameter.dim() > 2 for parameter in own) else MOST_FLAT
        return _Same() if sum(parameter.numel() for parameter in own) > most else None

    def _pass(self, block: Any, like: str) -> nn.Module:
        """A block that returns its input, in the structure of the output of the equal block at `like`."""
        kind: Any = type(block)
        made: Any = kind.__new__(kind)
        vars(made).update({**vars(block), **vars(nn.Module()), "training": False})

        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, form = tree_flatten(self._outputs[like])
            at = next(n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
            return tree_unflatten([*leaves[:at], first_tensor((args, kwargs)), *leaves[at + 1 :]], form)

        vars(made)["forward"] = forward
        return made  # type: ignore[no-any-return]

    def _parameter(self, path: str, name: str) -> Tensor:
        shape = tuple(getattr(self._model.get_submodule(path), name).shape)
        return self._weights.drawn((path, name), shape)

    def run(self, width: int, begin: Callable[[], None] = lambda: None) -> Any:
        """The output for a few tokens, or for an activation [B, T, `width`] if the model takes no tokens.

        Args:
            begin: called before each try.

        Raises:
            CannotRun: all tries failed.
        """
        tokens = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS).flip(1) % ROWS
        names = inspect.signature(type(self._model).forward).parameters
        named: dict[str, Any] = {name: tokens for name in TOKEN_NAMES if name in names}
        if "use_cache" in names:
            named["use_cache"] = False
        ways: list[Callable[[], Any]] = [lambda: self.copy(**named)] if "input_ids" in names else []
        x = self._weights.drawn("x", (BATCH, TOKENS, width)).clone().requires_grad_()
        plain: list[Callable[[], Any]] = [lambda: self.copy(tokens), lambda: self.copy(x)]
        looks_up = any(isinstance(module, nn.Embedding) for module in self._model.modules())
        ways = ways or plain[:: 1 if looks_up else -1]
        problem: Exception | None = None
        for way in ways:
            begin()
            try:
                return way()
            except Exception as error:
                problem = problem or error
        raise CannotRun(f"{type(problem).__name__}: {problem}"[:120])


def _passing(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Paths of blocks that need not compute, each with the path of an equal block."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) <= COMPUTED:
            continue
        seen: dict[Any, list[str]] = {}
        for name, block in module.named_children():
            if linear_features(block) is None and next(block.children(), None) is not None:
                same = seen.setdefault(likeness(block), [])
                same.append(f"{path}.{name}".strip("."))
        for same in seen.values():
            yield from ((each, same[COMPUTED - 1]) for each in same[COMPUTED:])


def likeness(module: nn.Module) -> tuple[Any, ...]:
    """A key of a module's structure: classes, shapes and plain attributes; equal keys, equal forwards."""
    kinds = []
    for path, inner in module.named_modules():
        shapes = tuple((name, tuple(p.shape)) for name, p in inner.named_parameters(recurse=False))
        plain = {k: v for k, v in vars(inner).items() if isinstance(v, (int, float, str)) and k not in OF_LAYERS}
        kinds.append((path, type(inner), shapes, tuple(plain.items())))
    return tuple(kinds)


class Calls:
    """The arguments of each module's call in a forward of the small model.

    Attributes:
        problem: why the forward failed; "" if it ran.
        embeddings: paths of embeddings that look up the tokens.
        outputs: paths of linear layers whose output is the model's.
        elsewhere: paths of embeddings and linear layers whose weight is read outside of their forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._key, self.problem = model, likeness(model), ""
        self.embeddings: list[str] = []
        self.outputs: list[str] = []
        self.elsewhere: set[str] = set()
        self._calls: dict[str, tuple[Any, Any]] = {}
        self._made: dict[str, Tensor] = {}
        self._left: dict[str, Tensor] = {}  # first tensors of the outputs of blocks
        widths = [found.inputs for found in map(linear_features, model.modules()) if found is not None]
        deepest = max((len(each) for each in model.modules() if isinstance(each, nn.ModuleList)), default=0)
        with apart():
            for deep in (False, True)[: 2 if deepest <= DEEPEST else 1]:
                try:
                    return self._run(SmallModel(model, TrialWeights(), deep=deep), widths[0] if widths else 1)
                except Exception as error:
                    self.problem = self.problem or str(error).partition("\n")[0]
                    self._calls.clear()

    def _run(self, small: SmallModel, width: int) -> None:
        for path, module in small.copy.named_modules():
            if isinstance(module, NarrowLinear):
                module.register_forward_hook(lambda m, a, y, path=path: self._made.update({path: y}))
            elif path:
                module.register_forward_pre_hook(lambda m, a, k, path=path: self._note(path, m, a, k), with_kwargs=True)
                if path.rpartition(".")[2].isdigit():
                    module.register_forward_hook(lambda m, a, y, path=path: self._leave(path, y))
        output = small.run(width, self._begin)
        self.problem = ""
        ends = {id(leaf) for leaf in tensors(output)}
        self.elsewhere = {path for path, module in small.copy.named_modules() if vars(module).get("elsewhere")}
        self.outputs = [path for path, made in self._made.items() if id(made) in ends]
        self._made.clear()

    def _begin(self) -> None:
        self._calls.clear()
        self._made.clear()
        self._left.clear()
        self.embeddings.clear()

    def _note(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if (
            isinstance(module, FewRows)
            and isinstance(args[0] if args else None, Tensor)
            and args[0].shape[-1] == TOKENS
        ):
            values = args[0].flatten().tolist()
            if len(set(values)) > TOKENS:  # and not positions
                self.embeddings.append(path)
        self._calls.setdefault(path, taken(args, kwargs))

    def _leave(self, path: str, output: Any) -> None:
        left = next(iter(tensors(output)), None)
        if left is not None:
            self._left.setdefault(path, left.detach().clone())

    def changes_between(self, before: str, after: str) -> bool:
        """Whether the activation that a block gets is not the one that the block before returned; False if unknown."""
        left, call = self._left.get(before), self._calls.get(after)
        got = None if call is None else next((x for x in tree_leaves(call) if isinstance(x, Tensor)), None)
        with apart():
            return left is not None and got is not None and not (left.shape == got.shape and torch.equal(left, got))

    def vocabulary(self, modules: Mapping[str, nn.Module]) -> list[str]:
        """Embeddings of tokens and the output layer of the same vocabulary, if no other code reads their weights."""
        found: list[str] = []
        for path in dict.fromkeys(self.embeddings):
            rows = [
                n
                for n in self.outputs
                if getattr(modules[n], "out_features", 0) == vars(modules[path]).get("num_embeddings")
            ]
            if len(rows) == 1 and not self.elsewhere & {path, *rows}:
                found += [each for each in (path, *rows) if each not in found]
        return found

    def of(self, path: str) -> tuple[Any, Any] | None:
        """Arguments of a module's call, for `taken` to copy; None if unknown."""
        return self._calls.get(path)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of an output; also of a dataclass or an output of transformers."""
    leaves = tree_flatten(dict(tree) if isinstance(tree, Mapping) else tree)[0]
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return found or [value for leaf in leaves if hasattr(leaf, "__dict__") for value in vars(leaf).values()
                     if isinstance(value, Tensor)]  # fmt: skip
