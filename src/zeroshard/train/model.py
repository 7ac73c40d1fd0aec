"""The model of a run: a built-in size, or a Hugging Face configuration on disk."""

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.data.columns import IGNORED
from zeroshard.errors import ModelError
from zeroshard.interop.huggingface.loading import LoadOptions, build, model_files
from zeroshard.interop.huggingface.pretrained import MatchedValues, PretrainedFiles
from zeroshard.interop.huggingface.quantized import package
from zeroshard.losses.labels import calls_loss_function
from zeroshard.moe.policy import Mixture
from zeroshard.planning.adapters import Adapters
from zeroshard.precision.cast import Precision
from zeroshard.step.batch import loss_in
from zeroshard.train.gpt import GPT
from zeroshard.train.named_models import Code, has_weights, model_named
from zeroshard.train.other_models import reads_later_tokens
from zeroshard.train.own_code import maker_of
from zeroshard.train.sizes import SIZES


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A model to train, with the calls that return its loss or its logits."""

    module: nn.Module
    """On the meta device when built-in or pretrained; on the CPU, with its values drawn, when from a configuration."""
    name: str
    """As the user named it."""
    parameters: int
    """Number of distinct parameters (a tied weight counts once), without those of adapters."""
    hugging_face: bool
    """Whether the module has the arguments and outputs of a transformers model."""
    values: MatchedValues | None = None
    """The pretrained values of a module on the meta device."""
    origin: str = ""
    """Of values from files, and of adapters beside them: the end of a text about the parameters."""

    @property
    def shifts(self) -> bool:
        """Whether the module compares the output at a token with the label of the next one, as most of transformers."""
        own = self.hugging_face and getattr(self.module, "loss_function", None) is None  # of the user's code
        return own or (self.hugging_face and calls_loss_function(self.module))

    def batch(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """The model's arguments, loss included, for `tokens` and `labels` [B, T + 1]; without labels, the tokens.

        Most Hugging Face models shift their labels themselves and so predict T - 1 tokens of each row.
        """
        inputs, labels = tokens[:, :-1], tokens if labels is None else labels
        if self.hugging_face and not self.shifts:  # whose losses take views of them
            return {"input_ids": inputs.contiguous(), "labels": labels[:, 1:].contiguous()}
        if self.hugging_face:
            return {"input_ids": inputs, "labels": labels[:, :-1]}
        return {"tokens": inputs, "targets": labels[:, 1:]}

    def loss(self, model: Callable[..., Any], tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats of `tokens` [B, T + 1]; `model` is `module` or an engine around it."""
        output = model(**self.batch(tokens, labels))
        loss: Tensor = getattr(output, "loss", output) if self.hugging_face else output
        return loss

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of tokens in a batch that are predicted and have a label, a scalar."""
        labels = batch["labels" if self.hugging_face else "targets"]
        return (labels[:, int(self.shifts) :] != IGNORED).sum()

    def summed(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of a batch as a sum with its count, for batches in which some labels are ignored."""
        count = self.count(batch)
        return loss_in(output) * count, count

    def logits(self, model: Callable[..., Any], tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of `tokens` [B, T]; `model` is `module` or an engine around it."""
        if not self.hugging_face:
            return model(tokens)  # type: ignore[no-any-return]
        output = model(input_ids=tokens)
        logits: Tensor = getattr(output, "logits", output)
        return logits


def build_model(
    spec: str,
    vocabulary: int,
    context: int,
    dropout: float = 0.0,
    mixture: Mixture | None = None,
    pretrained: bool = False,
    adapters: Adapters | None = None,
    precision: str = "fp32",
) -> BuiltModel:
    """The model `spec` names: a size, a Hugging Face `config.json` or its folder, or a class or function of the user.

    A built-in size takes the `context` and `dropout` asked for, and as many tokens as it or the tokenizer has,
    whichever is more. A Hugging Face model is the unmodified class of the configuration; the network is not read. It
    has the values of the safetensors files in the folder, if there are any and they are asked for. Otherwise its values
    come from torch's global generator, so seed it equally on every rank; so do those of a model of the user's code,
    which has the arguments of the built-in model (tokens, targets) or those of transformers (input_ids, labels), and
    returns a loss. Mixtures of experts replace feed-forward layers where they are asked for. Adapters are those of
    peft, beside the frozen weights of a pretrained model, which have the dtype of a plan of this precision, or 4 bits.

    Raises:
        ModelError: `spec` names no model, transformers is not installed or refuses the configuration, or the model
            is too small for `vocabulary` or `context`. CheckpointError: files of another model.
    """
    named = model_named(spec)
    if named.kind == "size":
        size = SIZES[spec]
        most = max(size.vocabulary, vocabulary)
        with torch.device("meta"):
            module = GPT(dataclasses.replace(size, vocabulary=most, context=context, dropout=dropout))
        (mixture or Mixture()).put_into(module)
        return BuiltModel(module, spec, _count(module), hugging_face=False)
    if named.code is not None:
        return _own_model(spec, named.code, vocabulary, context, dropout, mixture or Mixture())
    if dropout:
        raise ModelError(f"--dropout {dropout} is for built-in models; for {spec} set the rates in its config.json")
    assert named.file is not None
    if pretrained and has_weights(spec):
        return _pretrained(spec, named.file, vocabulary, context, mixture or Mixture(), adapters, precision)
    hugging_face = _hugging_face(named.file, vocabulary, context)
    (mixture or Mixture()).put_into(hugging_face)
    return BuiltModel(hugging_face, spec, _count(hugging_face), hugging_face=True)


def takes_tokens(module: nn.Module) -> bool | None:
    """Whether a language model has the arguments of transformers (True) or of the built-in model (False).

    None for a module with neither, whose batches are not known.
    """
    parameters = inspect.signature(module.forward).parameters
    if {"input_ids", "labels"} <= parameters.keys():
        return True
    return False if {"tokens", "targets"} <= parameters.keys() else None


def _own_model(spec: str, code: Code, vocabulary: int, context: int, dropout: float, mixture: Mixture) -> BuiltModel:
    if dropout:
        raise ModelError(f"a dropout of {dropout} was given for {spec}, whose code sets its own; set it there")
    module = maker_of(code)()
    hugging_face = takes_tokens(module)
    if hugging_face is None:
        raise ModelError(
            f"{spec} makes a {type(module).__name__}, whose forward takes {_arguments(module)}; a language model takes "
            f"tokens and targets, or input_ids and labels, [rows, tokens] each, and returns a loss"
        )
    own = getattr(getattr(module, "config", None), "vocab_size", vocabulary)
    if isinstance(own, int) and own < vocabulary:
        raise ModelError(
            f"{spec} has a vocabulary of {own} and the tokenizer one of {vocabulary}; raise that of {spec}"
        )
    positions = getattr(getattr(module, "config", None), "max_position_embeddings", context)
    if isinstance(positions, int) and 0 < positions < context:  # families without a bound, as XLNet, have -1
        raise ModelError(
            f"{spec} has {positions} positions and the sequence is {context} tokens; shorten the sequence, or raise "
            f"the positions of {spec}"
        )
    mixture.put_into(module)
    return BuiltModel(module, spec, _count(module), hugging_face)


def _arguments(module: nn.Module) -> str:
    return ", ".join(inspect.signature(module.forward).parameters) or "nothing"


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _pretrained(
    spec: str, file: Path, vocabulary: int, context: int, mixture: Mixture, adapters: Adapters | None, precision: str
) -> BuiltModel:
    """The causal language model of a folder on the meta device, with the values of its files."""
    count = mixture.experts
    if count:
        raise ModelError(
            f"experts={count} were asked for, and {spec} holds pretrained weights of a model without them; "
            f"leave experts out, or say --no-pretrained to train from scratch"
        )
    dtype = None if adapters is None else Precision.named(precision).compute
    module = build(Path(spec), _transformers(file).AutoModelForCausalLM, dtype)
    config: Any = module.config
    _check_size(config, file, vocabulary, context)
    config.use_cache = False
    numbers, origin = _count(module), ", pretrained"
    if adapters is None:
        files = PretrainedFiles(Path(spec), module)
    else:
        files = _beside_adapters(Path(spec), module, adapters, precision)
        trained = sum(parameter.numel() for parameter in files.model.parameters() if parameter.requires_grad)
        origin = f", frozen; {adapters}, {trained:,} parameters"
    values = MatchedValues(files, strict=True, missing="refuse")
    return BuiltModel(files.model, spec, numbers, hugging_face=True, values=values, origin=origin)


def _beside_adapters(folder: Path, module: nn.Module, adapters: Adapters, precision: str) -> PretrainedFiles:
    """The files of a model on the meta device, which gets adapters, and layers of 4 bits for QLoRA."""
    package("peft", f"adapters={adapters.name}", "peft")
    options: LoadOptions = {"adapters": adapters.config()}
    stated = getattr(module.config, "quantization_config", None)
    if adapters.name == "qlora" and stated is None:
        options["quantized"] = "nf4"
    return model_files(folder, module, options, precision)


def _hugging_face(file: Path, vocabulary: int, context: int) -> nn.Module:
    """The causal language model of a configuration, in float32 on the CPU."""
    transformers = _transformers(file)
    with _refusals(file):
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    _check_size(config, file, vocabulary, context)
    config.use_cache = False  # a cache of keys and values would take memory besides the activations
    with _refusals(file, _class_named(config)):
        # Not on meta: there the buffers that no state dict holds (rotary frequencies, masks) would be lost, and
        # `_init_weights` of a module may set parameters of its children, so modules cannot be drawn one at a time.
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    return module


def _transformers(file: Path) -> Any:
    """The optional package transformers."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(
            f"building {file} needs the package transformers, which is not installed; "
            f'run pip install "zeroshard[hf]", or use one of {", ".join(SIZES)}'
        ) from error


@contextlib.contextmanager
def _refusals(file: Path, named: str = "") -> Iterator[None]:
    """Raise `ModelError` for any exception of transformers, which has no base class for them.

    Args:
        named: the class that the configuration names.
    """
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0].partition(". This could be")[0].rstrip(".")
        if reason.startswith("Unrecognized configuration class"):
            raise ModelError(_no_language_model(file, named)) from error
        if "custom code" in reason:
            raise ModelError(
                f"{file} names code of its own, which is not run; import it in code of yours, whose model returns the "
                f"loss, and give that: mine.py or mine.py:Net"
            ) from error
        raise ModelError(
            f"transformers cannot build a causal language model from {file}: {reason}; correct the configuration, or "
            f"update transformers"
        ) from error


def _class_named(config: Any) -> str:
    """The class that a configuration names; empty if there is none."""
    return next(iter(getattr(config, "architectures", None) or ()), "")


def _no_language_model(file: Path, named: str = "") -> str:
    kind = f"{named}, which is no" if named else "no"
    return (
        f"{file} configures {kind} causal language model; make the model by code of your own, whose forward returns "
        f"the loss, and give that: mine.py or mine.py:Net"
    )


def _check_size(config: Any, file: Path, vocabulary: int, context: int) -> None:
    if (named := reads_later_tokens(config)) is not None:
        raise ModelError(_no_language_model(file, named))
    whole = _class_named(config)
    with _refusals(file):
        config = config.get_text_config()
    if not hasattr(config, "vocab_size"):
        raise ModelError(_no_language_model(file, whole))
    if config.vocab_size < vocabulary:
        raise ModelError(
            f"the model of {file} has a vocabulary of {config.vocab_size} and the tokenizer one of {vocabulary}; "
            f'use the tokenizer of this model, or raise "vocab_size" in the configuration'
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and 0 < positions < context:
        raise ModelError(
            f"the model of {file} has {positions} positions and the sequence is {context} tokens; "
            f"shorten the sequence, or raise the positions in the configuration"
        )
