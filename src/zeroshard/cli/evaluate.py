"""`zeroshard evaluate`: loss, perplexity and bits per byte of the model of a run folder."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import ConfigError
from zeroshard.train.early_checks import check_checkpoint, check_data, check_device, check_tokenizer, run_folder_of
from zeroshard.train.option_tree import Positional
from zeroshard.train.option_values import check_least


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Measure the loss of the model of a run: on data of yours, or on those that the run held out."""

    path: Positional[Path]
    """The run folder that `zeroshard train` named, for its newest checkpoint; or one of its checkpoints."""
    data: tuple[Path, ...] = ()
    """Data as `zeroshard train` takes them, all documents of which are read; by default the rows that the run held out
    for its last validation."""
    columns: tuple[str, ...] = ()
    """Column of text or of messages, or the two of prompt and completion."""
    truncate: bool = False
    """Cut examples of messages and completions that are longer than a row, instead of refusing them."""
    batch: int = 8
    """Rows of one forward."""
    rows: int | None = None
    """Rows to read, at most; by default all."""
    tokenizer: str | None = None
    """Path of the tokenizer, where it is no longer at that of the run's options."""
    device: str = "auto"
    """Device to compute on: cpu, cuda, or another accelerator by torch's name; auto takes an accelerator if there is
    one."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        check_least(self, {"batch": 1, "rows": 1})
        if not self.data and (self.columns or self.truncate):
            raise ConfigError("columns and truncate have no effect without data; give data, or leave them out.")


def run_evaluate(argv: Sequence[str]) -> None:
    """Evaluate, and print the numbers.

    Raises:
        ConfigError: a wrong option, or no run folder. CheckpointError: no checkpoint there, or a damaged one.
        DataError: data that cannot be used.
    """
    from zeroshard.train.options import parse

    options = parse(EvaluateOptions, argv, "zeroshard evaluate")
    check_checkpoint(run_folder_of(options.path))
    check_tokenizer(options.tokenizer)
    check_device(options.device)
    check_data(options.data)
    from zeroshard.comm.mesh import init_mesh
    from zeroshard.train.trained import load_trained

    mesh = init_mesh(device=None if options.device == "auto" else options.device)
    trained = load_trained(options.path, mesh.device, options.tokenizer)
    found = trained.evaluate(options.data, options.columns, options.truncate, options.batch, options.rows)
    if options.json:
        finite = {name: None if value == math.inf else value for name, value in found.items()}
        print(json.dumps(finite, indent=1))
        return
    rows, tokens = found["rows"], found["tokens"]
    counts = f"{rows:,} row{'s' * (rows != 1)}, {tokens:,} token{'s' * (tokens != 1)}"
    print(f"step {found['step']} of {found['checkpoint']}: {counts}")
    print(f"loss          {found['loss']:.4f} nats per token")
    print(f"perplexity    {found['perplexity']:.4g}")
    bits = found["bits_per_byte"]
    print(f"bits per byte {'unknown' if bits is None else f'{bits:.4f}'}")
