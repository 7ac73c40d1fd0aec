"""`zeroshard verify`: a run under a plan beside the same run in one process, down to the module that differs."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from zeroshard.cli.early_options import VerificationOptions
from zeroshard.cli.run import warn_of_few_cores
from zeroshard.errors import ConfigError
from zeroshard.plan import Plan
from zeroshard.train.gpt import GPT
from zeroshard.train.named_models import BATCH, model_named
from zeroshard.train.options import parse
from zeroshard.train.own_code import check_arguments, import_code, imported
from zeroshard.train.sizes import SIZES, GPTConfig
from zeroshard.train.task import batches_of
from zeroshard.verification import Verification, verify
from zeroshard.verification.job import default_ranks
from zeroshard.verification.narrow import ROW, VOCABULARY, depth

HEAD = 16  # elements of a head of a narrowed built-in model
ROWS = 2  # of each microbatch
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}


def run_verify(argv: Sequence[str]) -> None:
    """Verify, and print the screen; exits with 1 where something differs.

    Raises:
        ZeroshardError: options, a plan or a model that cannot be.
    """
    options = parse(VerificationOptions, argv, "zeroshard verify")
    warn_of_few_cores(options.ranks or default_ranks(options.plan), "--ranks")
    console = Console(stderr=True)
    with console.status("Verifying") if console.is_terminal else nullcontext():
        found = verified(options)
    print(json.dumps(found.as_dict(), indent=1, default=str) if options.json else found)
    if not found.ok:
        sys.exit(1)


def verified(options: VerificationOptions) -> Verification:
    """The verdict on the options' model and plan.

    Raises:
        ZeroshardError: as `run_verify`.
    """
    ranks = options.ranks or default_ranks(options.plan)
    optimizer = OPTIMIZERS[options.optimizer] if options.optimizer_of is None else imported(options.optimizer_of)
    loss = None if options.loss_of is None else imported(options.loss_of)
    chosen: dict[str, Any] = {"optimizer": optimizer, "loss": loss, "ranks": ranks}
    chosen |= {"steps": options.steps, "exact": options.exact}
    rows = options.rows or ROWS * ranks * options.plan.microbatches
    code = model_named(options.model).code
    if code is not None:
        factory, batch = import_code(code), batches_of(code, options.batch_of)
        check_arguments(options.model, factory)
        if batch is None:
            file = options.model.partition(":")[0]
            raise ConfigError(
                f"{options.model} needs batches; name a function that makes them: --batch-of {file}:{BATCH}."
            )
        return verify(factory, options.plan, batch(rows), **chosen)
    if options.model not in SIZES:
        return verify(options.model, options.plan, **chosen)
    config = narrow_gpt(SIZES[options.model], options.plan)
    found = verify(partial(build_gpt, config), options.plan, gpt_batch(rows), **chosen)
    before = SIZES[options.model]
    note = (
        f"narrowed: width {before.width} -> {config.width}, heads {before.heads} -> {config.heads}, layers "
        f"{before.layers} -> {config.layers}, vocabulary {before.vocabulary} -> {config.vocabulary}"
    )
    return replace(found, notes=(note, *found.notes))


def narrow_gpt(config: GPTConfig, plan: Plan) -> GPTConfig:
    """A built-in size narrowed: two heads, and the fewest layers that the plan can cut."""
    heads = min(2, config.heads)
    return GPTConfig(VOCABULARY, ROW, HEAD * heads, heads, min(config.layers, depth(plan)))


def build_gpt(config: GPTConfig) -> nn.Module:
    """The built-in model, initialised."""
    return GPT(config)


def gpt_batch(rows: int) -> dict[str, Tensor]:
    """Random tokens [rows, 16] and their targets."""
    tokens = torch.randint(VOCABULARY, (rows, ROW + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
