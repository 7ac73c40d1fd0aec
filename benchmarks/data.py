"""Streamed records: rows of tokens from a folder of jsonl, beside `datasets` alone, and the time to the first batch.

    python benchmarks/data.py [--bytes 1e9] [--rounds 3] [--seconds 8] [--json FILE]

The benchmark writes a folder of eight jsonl files, whose documents have 200 to 4,000 characters, into a temporary
folder, and removes it at the end. Ways to read it, in turns, each in a fresh process with one thread of torch, for some
seconds after the first document or row:

- `records`: `datasets.load_dataset("json", streaming=True)` iterated: parsed records, neither shuffled, tokenized nor
  packed.
- `shuffled`: the same with `shuffle(buffer_size=10000)`.
- `grouped`: `shuffled`, mapped in batches of 1,000 to bytes as tokens and to rows of 1,024, as `group_texts` in
  the example scripts of transformers does it: the same work as `rows`.
- `rows`: `zeroshard.data.loader.Loader` with bytes as tokens: shuffled, tokenized and packed into rows of 1,024.
- `first`: the time from `open_data` to the first batch of 8 rows, imports left out, for rank 0 of 1 rank.

Figures are medians over rounds: bytes of text per CPU second of the process with its threads, and per second by the
clock. Bars: `rows` at least `grouped` per CPU second; the first batch within 3 s. The exit status is 1 where a bar is
missed, but for toy sizes. The files are in the page cache.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ranks import circumstances, keep

FILES, SEQUENCE, BATCH = 8, 1024, 8
WAYS = ("records", "shuffled", "grouped", "rows")
SECONDS_TO_FIRST = 3.0
TOY = 1e8  # bytes under which no bar holds


def main() -> int:
    """Measure all ways; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=1e9, help="of the folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each way in each round")
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_records(Path(folder), int(args.bytes))
        found: dict[str, list[dict[str, float]]] = {way: [] for way in (*WAYS, "first")}
        for _ in range(args.rounds):
            for way in found:
                found[way].append(in_process(way, folder, args.seconds))
    medians = {way: median_of(rounds) for way, rounds in found.items()}
    ratios = {way: medians["rows"]["mb_per_cpu_second"] / medians[way]["mb_per_cpu_second"] for way in WAYS[:-1]}
    first = medians["first"]["seconds"]
    for way in WAYS:
        each = medians[way]
        print(f"{way:9} {each['mb_per_cpu_second']:8.1f} MB per CPU second {each['mb_per_second']:8.1f} MB per second")
    print("rows beside", ", ".join(f"{way}: {ratio:.2f}" for way, ratio in ratios.items()), "per CPU second")
    print(f"first batch of {args.bytes / 1e9:.2f} GB in {first:.2f} s")
    if args.json is not None:
        table = {"medians": medians, "rounds": found, "rows_beside": ratios, "bytes": int(args.bytes)}
        keep({**table, "circumstances": circumstances()}, args.json)
    return int(args.bytes >= TOY and (ratios["grouped"] < 1.0 or first > SECONDS_TO_FIRST))


def write_records(folder: Path, nbytes: int) -> None:
    """Write the files, whose documents are slices of one text of words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(4096)]
    text = " ".join(draw.choices(words, k=200_000))
    for number in range(FILES):
        written = 0
        with (folder / f"part-{number}.jsonl").open("w") as file:
            while written < nbytes / FILES:
                begin, length = draw.randrange(len(text) - 4000), draw.randint(200, 4000)
                written += file.write(json.dumps({"id": written, "text": text[begin : begin + length]}) + "\n")


def in_process(way: str, folder: str, seconds: float) -> dict[str, float]:
    """The figures of one way, from a fresh process."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=answer_with, args=(far, way, folder, seconds))
    process.start()
    far.close()
    found: dict[str, float] = near.recv()
    process.join()
    return found


def answer_with(pipe: Any, way: str, folder: str, seconds: float) -> None:
    """Measure in this process, and send the figures."""
    import torch

    torch.set_num_threads(1)
    pipe.send(to_first(folder) if way == "first" else throughput(way, folder, seconds))


def throughput(way: str, folder: str, seconds: float) -> dict[str, float]:
    """Bytes of text per second, after the first item."""
    ways = {"rows": rows, "grouped": grouped}
    items = ways[way](folder) if way in ways else records(folder, way == "shuffled")
    next(items)
    began, cpu, nbytes = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        nbytes += next(items)
    mb = nbytes / 1e6
    return {
        "mb_per_cpu_second": mb / (time.process_time() - cpu),
        "mb_per_second": mb / (time.perf_counter() - began),
    }


def to_first(folder: str) -> dict[str, float]:
    """Seconds to the first batch."""
    from zeroshard.data.loader import Loader, open_data

    began = time.perf_counter()
    next(Loader(open_data(folder, sequence=SEQUENCE), batch=BATCH))
    return {"seconds": time.perf_counter() - began}


def rows(folder: str) -> Iterator[int]:
    """Bytes of the text in each of our batches."""
    from zeroshard.data.loader import Loader, open_data

    for batch in Loader(open_data(folder, sequence=SEQUENCE), batch=BATCH):
        yield batch["input_ids"].numel()


def streamed(folder: str) -> Any:
    """The records of `datasets`."""
    import datasets

    files = sorted(str(path) for path in Path(folder).glob("*.jsonl"))
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


def grouped(folder: str) -> Iterator[int]:
    """Bytes of the text in each batch of rows that `datasets` makes by itself."""
    import torch

    shuffled = streamed(folder).shuffle(seed=0, buffer_size=10_000)
    found = shuffled.map(group_texts, batched=True, remove_columns=["id", "text"])
    while True:
        for batch in found.batch(BATCH):
            yield torch.tensor(batch["input_ids"]).numel()


def group_texts(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
    """Rows of equal length from texts one after the other; the rest of a batch is dropped."""
    tokens = list(chain.from_iterable((*text.encode(), 10) for text in batch["text"]))
    rows = [tokens[first : first + SEQUENCE] for first in range(0, len(tokens) - SEQUENCE + 1, SEQUENCE)]
    return {"input_ids": rows}


def records(folder: str, shuffled: bool) -> Iterator[int]:
    """Bytes of the text in each record of `datasets`, over and over."""
    found = streamed(folder)
    while True:
        for record in found.shuffle(seed=0, buffer_size=10_000) if shuffled else found:
            yield len(record["text"])  # ASCII


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The medians of figures over rounds."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


if __name__ == "__main__":
    raise SystemExit(main())
