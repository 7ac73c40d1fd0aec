"""What each plan does is what it did: see `golden.py`, which also writes the files anew."""

import json
from typing import Any

import pytest
from engine.golden import CASES, FOLDER, machine, see
from pool import Pool
from selection import by_default

NUMBERS = ("losses", "norms", "weights", "norm of the weights", "resumed")
LOOSE = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-2}  # where the machine or torch is another one
SAME_MACHINE = json.loads((FOLDER / "machine.json").read_text()) == machine()


def test_every_file_is_of_a_plan() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {"machine", *CASES}


SHOWN = (
    "1-accumulated",
    "1-bf16",
    "1-states-guessed",
    "1-states-half",
    "1-states-disk",
    "1-streamed",
    "1-everything-bf16",
    "2-ddp-tied-clipped",
    "2-ddp-shared",
    "2-zero1",
    "2-zero1-once",
    "2-zero2-shared",
    "2-zero2-fp16",
    "2-zero2-two-dtypes",
    "2-zero3",
    "2-zero3-tied",
    "2-zero3-bf16",
    "2-zero3-checkpointed",
    "2-states-late",
    "2-states-shared-zero3",
    "2-streamed-bf16",
    "3-zero3",
    "4-groups",
    "2-1f1b-bf16",
    "2-interleaved",
    "2-zb-h1",
    "2-pipedream-synchronised",
    "2-2bw",
    "3-uneven",
    "4-gpipe-zero3",
)


@pytest.mark.parametrize("name", by_default(CASES, *SHOWN))
def test_every_plan_does_what_it_did(pool: Pool, name: str) -> None:
    wanted = json.loads((FOLDER / f"{name}.json").read_text())
    found = see(name, pool.run)
    assert len(found) == len(wanted)
    bound = 0.0 if SAME_MACHINE else LOOSE[CASES[name][3].get("precision", "fp32")]
    options = CASES[name][3]
    if options.get("pipeline_parallel.schedule") == "pipedream" or name == "2-tensor-alone":
        bound *= 1000  # old weights, or a high rate, make roundings grow
    if "offload.moments" in options:
        bound *= 10  # a moment that rounds to the next value of fewer bits moves a weight by more than a last bit
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for field in mine.keys() - set(NUMBERS):
            assert mine[field] == theirs[field], field
        for field in NUMBERS:
            if not bound:
                assert mine[field] == theirs[field], field
            elif field != "weights":
                check_close(mine[field], theirs[field], bound)


def check_close(found: Any, wanted: Any, bound: float) -> None:
    """Raise unless all numbers in two values of one form are within a relative bound."""
    if isinstance(found, dict):
        assert found.keys() == wanted.keys()
        for key in found:
            check_close(found[key], wanted[key], bound)
    elif isinstance(found, list):
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            check_close(mine, theirs, bound)
    elif found is None or wanted is None:
        assert found is wanted
    else:
        assert float(found) == pytest.approx(float(wanted), rel=bound, nan_ok=True)


def test_a_number_out_of_its_bound_is_found() -> None:
    check_close({"a": [1.0, None, "nan"]}, {"a": [1.0000001, None, "nan"]}, 1e-6)
    with pytest.raises(AssertionError):
        check_close({"a": [1.0]}, {"a": [1.00001]}, 1e-6)
