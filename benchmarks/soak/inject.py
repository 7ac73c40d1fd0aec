"""The main job with a fault put into one of its ranks: inject.py FAULT RANK [NUMBER] -- train ...

slow RANK SECONDS    every step of the rank takes so much longer
nan RANK STEP        the loss of a step is NaN there, in the first attempt and in all others
infinite RANK EVERY  every so many steps the rank's gradient is infinite
flip RANK STEP       one bit of one weight is turned over after a step, in the first attempt
load RANK KILLS      the rank kills itself while it reads a checkpoint, so many times over all attempts
samples -1 0         every rank writes down which samples it took, into samples.jsonl beside the metrics
"""

import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import Reader
from zeroshard.cli.main import main
from zeroshard.engine import Engine
from zeroshard.train.run import Run


def slow(seconds: float) -> None:
    """Sleep in every step."""
    step = Run._train_step

    def slowly(self: Run, at: int, batch: Any) -> Any:
        time.sleep(seconds)
        return step(self, at, batch)

    Run._train_step = slowly  # type: ignore[method-assign]


def nan(number: float) -> None:
    """Make the rank's loss of a step NaN, for as long as the samples of that step are not left out."""
    step = Run._step
    train_step = Engine.train_step
    first: list[int] = []

    def watching(self: Run, at: int, samples: list[int]) -> Any:
        size = self.config.batch_per_rank * self.engine.data_ranks
        first[:] = [sample for sample in samples if (number - 1) * size <= sample < number * size]
        return step(self, at, samples)

    def poisoned(self: Engine, batch: Any) -> Any:
        result = train_step(self, batch)
        return replace(result, loss=torch.tensor(math.nan)) if first else result

    Run._step, Engine.train_step = watching, poisoned  # type: ignore[method-assign, assignment]


def infinite(every: float) -> None:
    """Multiply the gradient of the loss by infinity; the loss itself stays."""
    train_step = Engine.train_step

    def overflowing(self: Engine, batch: Any) -> Any:
        loss = self._loss

        def overflow(output: Any, of: Any) -> torch.Tensor:
            value = loss(output, of)
            value.register_hook(lambda gradient: gradient * math.inf)
            return value

        self._loss = overflow if (self.steps + 1) % every == 0 else loss
        try:
            return train_step(self, batch)
        finally:
            self._loss = loss

    Engine.train_step = overflowing  # type: ignore[method-assign]


def flip(number: float) -> None:
    """Turn over the highest bit of the mantissa of one weight."""
    train_step = Engine.train_step

    def flipping(self: Engine, batch: Any) -> Any:
        result = train_step(self, batch)
        if result.step == number and os.environ.get("ZEROSHARD_ATTEMPT") == "0":
            weights = max(self.model.parameters(), key=lambda p: p.numel()).detach().view(-1).view(torch.int32)
            weights[5] ^= 1 << 22
        return result

    Engine.train_step = flipping  # type: ignore[method-assign]


def load(kills: float) -> None:
    """Die at a drawn one of the reads of the first checkpoint that is read."""
    read = Reader.read
    count = [0]
    note = Path(os.environ["TMPDIR"]) / "kills-while-loading"

    def dying(self: Reader, *words: Any, **named: Any) -> None:
        done = note.stat().st_size if note.exists() else 0
        if count[0] == random.Random(done).randrange(30) and done < kills:
            with note.open("a") as file:
                file.write("k")
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1
        read(self, *words, **named)

    Reader.read = dying  # type: ignore[method-assign]


def samples(_: float) -> None:
    """Write down the samples that this rank takes in each step."""
    step = Run._step
    start = f"{os.environ['TMPDIR']} {os.environ['ZEROSHARD_ATTEMPT']}"

    def telling(self: Run, at: int, taken: list[int]) -> Any:
        size = len(taken) // self.engine.data_ranks
        mine = taken[self.engine.data_rank * size : (self.engine.data_rank + 1) * size]
        line = {"start": start, "step": at + 1, "rank": self.mesh.rank, "samples": mine}
        file = os.open(self.folder.path / "samples.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, (json.dumps(line) + "\n").encode())
        os.close(file)
        return step(self, at, taken)

    Run._step = telling  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[float], None]] = {
    "slow": slow,
    "nan": nan,
    "infinite": infinite,
    "flip": flip,
    "load": load,
    "samples": samples,
}

if __name__ == "__main__":
    name, rank, number, *words = sys.argv[1:]
    if int(rank) in (-1, int(os.environ["RANK"])):
        FAULTS[name](float(number))
    main(words[1:])
