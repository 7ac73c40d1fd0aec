"""A trained model: that of a run folder's checkpoint, with its options and its tokenizer, in one process."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import Reader, find_checkpoint
from zeroshard.data.evaluation import EvaluationData
from zeroshard.data.tokenizer import Tokenizer, load_tokenizer
from zeroshard.data.training import DataOptions, open_training
from zeroshard.errors import CheckpointError, DataError
from zeroshard.interop.huggingface.stored_adapters import merged_base
from zeroshard.train.config import TrainConfig
from zeroshard.train.early_checks import CONFIG, run_folder_of
from zeroshard.train.gpt import generate
from zeroshard.train.model import BuiltModel, build_model
from zeroshard.train.toml_config import load_toml

FINAL = 4  # times validation_rows, of the validation at the end of a run


@dataclass(frozen=True)
class Trained:
    """A model with the weights of a checkpoint, in fp32 and for evaluation.

    Attributes:
        config: the options of the run.
        checkpoint: whose weights it has.
        step: of the checkpoint.
        corpus: the digest of the data that it was trained on; None if it has none.
    """

    config: TrainConfig
    built: BuiltModel
    tokenizer: Tokenizer
    checkpoint: Path
    step: int
    device: torch.device
    corpus: str | None = None

    def generate(
        self, prompt: str, tokens: int, temperature: float, top_k: int | None = None, seed: int = 0, chat: bool = False
    ) -> str:
        """The text that follows `prompt`, up to the end of a text or `tokens` tokens; the likeliest at temperature 0.

        Args:
            chat: the prompt is the message of a user, which the tokenizer's chat template goes around.

        Raises:
            ConfigError: a chat without a chat template. DataError: the prompt has no token.
        """
        text = self.tokenizer.chat([{"role": "user", "content": prompt}], reply=True) if chat else prompt
        found = generate(
            lambda window: self.built.logits(self.built.module, window),
            self.tokenizer.encode(text.encode(errors="replace")).tolist(),
            tokens,
            temperature=temperature,
            top_k=top_k,
            generator=torch.Generator().manual_seed(seed),
            context=self.config.sequence,
            device=self.device,
        )
        end = self.tokenizer.end[0] if self.tokenizer.name != "bytes" and len(self.tokenizer.end) == 1 else None
        return self.tokenizer.decode(found[: found.index(end)] if end in found else found)

    def evaluate(
        self,
        data: tuple[Path, ...] = (),
        columns: tuple[str, ...] = (),
        truncate: bool = False,
        batch: int = 8,
        rows: int | None = None,
    ) -> dict[str, Any]:
        """Loss in nats per token, perplexity, and bits per byte where the bytes are known.

        Args:
            data: of which every document is read; by default the rows that the run held out for its last validation.
            rows: that are read, at most.

        Raises:
            DataError, ConfigError: data that cannot be used, or held-out rows of data that have changed since.
        """
        if not data:
            return self._held_out(batch, rows)
        own = EvaluationData(data, self.tokenizer, self.config.sequence, columns, truncate)
        loss, predicted = self._loss(own.batches(batch, rows))
        nbytes = own.nbytes() if rows is None else None
        bits = loss / math.log(2) * own.tokens / nbytes if nbytes else None
        return self._measured(loss, predicted, own.rows, bits)

    def _held_out(self, batch: int, rows: int | None) -> dict[str, Any]:
        config = self.config
        names = ("data", "tokenizer", "sequence", "columns", "truncate")
        known = open_training(DataOptions(seed=config.plan.seed, **{name: getattr(config, name) for name in names}))
        if self.corpus not in (None, known.digest):
            raise DataError(
                f"{known.name} has the digest {known.digest[:12]}, and {self.checkpoint.name} was trained on data with "
                f"{str(self.corpus)[:12]}, so rows that are held out now were trained on; set data to other files, "
                f"or put back those of the run"
            )
        found = list(known.validation(batch, 0, 1, rows or FINAL * config.validation_rows))
        loss, predicted = self._loss(found)
        return self._measured(loss, predicted, sum(len(each.tokens) for each in found), known.bits_per_byte(loss))

    def _measured(self, loss: float, tokens: int, rows: int, bits: float | None) -> dict[str, Any]:
        perplexity = math.exp(loss) if loss < 700 else math.inf
        numbers = {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits, "tokens": tokens, "rows": rows}
        return {**numbers, "step": self.step, "checkpoint": str(self.checkpoint)}

    @torch.no_grad()
    def _loss(self, batches: Any) -> tuple[float, int]:
        """The mean over all tokens that are predicted, with their number."""
        total, count = 0.0, 0
        for each in batches:
            moved = each.to(self.device)
            number = int(self.built.count(self.built.batch(*moved)))
            if number:
                total += float(self.built.loss(self.built.module, *moved)) * number
                count += number
        return total / max(count, 1), count


def load_trained(path: Path, device: torch.device, tokenizer: str | None = None) -> Trained:
    """The model of a run folder's newest checkpoint, or of one of its checkpoints; adapters are added to their base.

    Args:
        tokenizer: by default that of the run's options, whose path is one seen from where the run was started.

    Raises:
        ConfigError: no run folder there, or no tokenizer. CheckpointError: no checkpoint, or one of another model.
    """
    folder = run_folder_of(path)
    config = replace(load_toml(folder / CONFIG, TrainConfig), dropout=0.0)
    known = load_tokenizer(tokenizer or config.tokenizer)
    found = find_checkpoint(path)
    if found == folder:
        raise CheckpointError(
            f"{path} holds no checkpoint to take weights from; train without --no-checkpoint, or give another run"
        )
    reader = Reader(found)
    built = build_model(config.model, known.vocabulary, config.sequence, 0.0, config.mixture)
    if config.adapted is None:
        _fill(built.module, reader)
    else:
        built.module.load_state_dict(dict(merged_base(reader)), assign=True)
    built.module.to(device).eval()
    return Trained(config, built, known, found, int(reader.facts["step"]), device, reader.facts["extra"].get("corpus"))


def _fill(module: torch.nn.Module, reader: Reader) -> None:
    """Load the weights and buffers of a checkpoint.

    Raises:
        CheckpointError: it is one of another model.
    """
    reader.refuse_without_base()
    names = {name: f"{kind}:{name}" for kind in ("weight", "buffer") for name in reader.names(kind)}
    tied = reader.facts.get("tied", {})
    names |= {name: names[first] for name, first in tied.items() if first in names}
    state: dict[str, torch.Tensor] = {}
    read: dict[str, torch.Tensor] = {}  # by name in the checkpoint, so that tied parameters share memory
    for name, slot in module.state_dict().items():
        source = names.get(name)
        shape = None if source is None else tuple(reader.tensors[source].shape)
        if source is None or shape != tuple(slot.shape):
            there = "is not there" if shape is None else f"has the shape {list(shape)}"
            raise CheckpointError(
                f"{reader.path} is one of another model: {name} {there}, and {list(slot.shape)} is needed; give the "
                f"run of this model, and the tokenizer that it was trained with"
            )
        if source not in read:
            values = torch.empty(slot.shape, dtype=slot.dtype)
            if source.startswith("buffer:"):
                values.view(-1).copy_(reader.whole(source))
            else:
                reader.read(source, values.view(-1), 0)
            read[source] = values
        state[name] = read[source]
    module.load_state_dict(state, assign=True)
