"""`zeroshard reproduce`: the small claims hold, what is not reproduced is said to be, and nothing is made up."""

import json
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import pytest

from zeroshard.cli import early_options
from zeroshard.cli import reproduce as reproduce_command
from zeroshard.cli.reproduce import run_reproduce
from zeroshard.doctor.hardware import Link, Machines
from zeroshard.planner.search.largest import parameters_of, states_along
from zeroshard.reproduce import CLAIMS, Claim, Reading, check
from zeroshard.reproduce.block_times import (
    PEAK,
    WAVE_RATE,
    GPTShape,
    block_seconds,
    dgx_a100,
    logits_seconds,
)
from zeroshard.reproduce.offload import LARGE, memory, wire
from zeroshard.reproduce.pipelines import PIPELINES, vgg16
from zeroshard.reproduce.ptdp import PTDP, collectives, interleaving_gain, throughput
from zeroshard.reproduce.switch import T5Shape
from zeroshard.reproduce.zero import RANKS, SHAPES, TABLE_1, mixed, sized, table_1, volume
from zeroshard.train.family import gpt_task
from zeroshard.zero.byte_formulas import state_bytes

SLOW = ("ptdp-table-1", "ptdp-interleaving")
FREE = Link(1e12)


def silent(text: str) -> None:
    """Say nothing."""


def test_the_list_names_every_claim(capsys: pytest.CaptureFixture[str]) -> None:
    run_reproduce([])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in CLAIMS)
    run_reproduce(["list", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(CLAIMS) and all(row["source"] for row in rows)


@pytest.mark.parametrize("claim", PIPELINES, ids=lambda claim: claim.name)
def test_what_is_said_of_pipelines_is_reproduced(claim: Claim) -> None:
    outcome = check(claim)
    assert outcome.readings and outcome.reproduced
    assert outcome.as_dict()["numbers"][0]["agrees"] is True


@pytest.mark.parametrize("claim", [c for c in PTDP if c.name not in SLOW], ids=lambda claim: claim.name)
def test_takeaways_of_ptdp_are_reproduced(claim: Claim) -> None:
    outcome = check(claim)
    assert outcome.readings and outcome.reproduced


def test_rates_of_ptdp_are_near_the_published_ones() -> None:
    """Of half the table, and chunks at one batch size; the claims as a whole take some seconds each."""
    for reading in islice(throughput(silent), 5):
        assert reading.agrees and abs(float(reading.ours) / float(reading.published) - 1) < 0.12, reading
    assert interleaving_gain(12, scattered=True) > interleaving_gain(24, scattered=True) > 1


@pytest.mark.whole
def test_a_block_of_megatron_has_four_all_reduces() -> None:
    assert [reading.ours for reading in collectives(silent)] == [4.0, 4.0]


def test_the_model_of_ptdp_counts_the_operations_of_equation_3() -> None:
    """Forward, forward again, and backward of all products; all tiles are whole, and so are all waves."""
    model = GPTShape(layers=2, width=108 * 128, heads=108)
    machines = Machines(replace(dgx_a100(1).device, memory_bandwidth=1e30, launch_seconds=0.0), 1, 1, FREE, FREE)
    block, logits = block_seconds(machines, model.block(108), 1), logits_seconds(machines, model, 108, 1)
    seconds = 2 * (2 * block.forward + block.backward) + logits.forward + logits.backward
    assert seconds * WAVE_RATE * PEAK == pytest.approx(model.flops(108))


def test_the_number_of_a_model_is_near_or_not() -> None:
    assert Reading("", "2", 1.76, within=0.15).agrees and not Reading("", "2", 1.69, within=0.15).agrees
    assert Reading("", "1.11", 1.0791, within=0.05).agrees and not Reading("", "1.11", 1.0, within=0.05).agrees


@pytest.mark.whole
def test_states_of_a_trillion_parameters() -> None:
    """The paper's headline; the whole table takes minutes and is `zeroshard reproduce zero-table-1`."""
    first = next(iter(table_1(silent, ("1T",))))
    assert (first.published, first.agrees) == ("16000", True)
    last = states_along(sized("1T"), mixed(3), 1024, SHAPES["1T"][3]) / 10**9
    assert Reading("1T, N = 1024, P_os+g+p", "15.6", last).agrees


@pytest.mark.parametrize("size", TABLE_1)
def test_the_models_have_the_papers_sizes(size: str) -> None:
    parameters, width, _, layers = SHAPES[size]
    assert 0 <= parameters_of(sized(size)(layers)) - parameters < width


def test_table_1_is_copied_without_a_slip() -> None:
    """Every number of it is that of the paper's formula, to the digits printed."""
    for size, rows in TABLE_1.items():
        for ranks, row in zip(RANKS, rows, strict=True):
            for zero, published in enumerate(row.split(), 1):
                formula = state_bytes(SHAPES[size][0], ranks, zero).total / 10**9
                assert Reading(f"{size} {ranks} {zero}", published, float(formula)).agrees, (size, ranks, zero)


@pytest.mark.whole
def test_the_wire_carries_what_section_7_says() -> None:
    assert [reading.ours for reading in volume(silent)] == [2, 2, 2, 3]


def test_offload_leaves_and_moves_what_zero_offload_says() -> None:
    assert [(reading.ours, reading.agrees) for reading in memory(silent)] == [(n, True) for n in (16, 14, 4, 2)]
    assert [reading.ours for reading in wire(silent)] == [4]


def test_the_model_for_one_device_has_13_billion_parameters() -> None:
    """A rehearsal at full width takes ten seconds and is `zeroshard reproduce offload-one-device`."""
    assert round(parameters_of(gpt_task(LARGE)) / 1e9) == 13


def test_vgg16_has_its_published_size() -> None:
    assert sum(layer.parameter_bytes for layer in vgg16()) == 4 * 138_357_544


@pytest.mark.parametrize(
    "published, ours, agrees",
    [
        ("31.4", 31.40625, True),
        ("41.3", 41.25, True),
        ("4187", 4187.5, True),
        ("4188", 4187.5, True),
        ("4187", 4188.0, False),
        ("4187", 4186.4, False),
        ("1.88", 1.875, True),
        ("1.88", 1.87, False),
        ("15-1", "15-1", True),
        ("15-1", "14-1-1", False),
    ],
)
def test_a_printed_number_is_met_by_what_prints_the_same(published: str, ours: float | str, agrees: bool) -> None:
    assert Reading("", published, ours).agrees is agrees


def test_an_exact_number_is_met_by_nothing_else() -> None:
    assert Reading("", "3/11", Fraction(3, 11), exact=True).agrees
    missed = Reading("", "1/3", Fraction(333, 1000), exact=True)
    assert not missed.agrees and missed.difference == pytest.approx(-1 / 3000)


def test_a_claim_is_printed_with_its_source_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    run_reproduce(["gpipe-bubble"])
    out = capsys.readouterr().out
    assert "1811.06965, section 2.3" in out and "How: " in out and "6 of 6 reproduced" in out
    assert ["d", "=", "4,", "m", "=", "8", "3/11", "3/11", "0"] in [line.split() for line in out.splitlines()]
    run_reproduce(["gpipe-bubble", "--json"])
    (claim,) = json.loads(capsys.readouterr().out)
    assert claim["reproduced"] is True
    assert claim["numbers"][2] | {"note": ""} == {
        "what": "d = 4, m = 8",
        "published": "3/11",
        "ours": 3 / 11,
        "difference": 0.0,
        "agrees": True,
        "within": 0.0,
        "note": "",
    }


def test_what_is_not_reproduced_is_said_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = Reading("one", "2.0", 2.01), Reading("other", "3.0", 3.26)
    claim = Claim("made-up", "a claim", "nowhere", "GB", "Not at all.", lambda say: [good, bad])
    monkeypatch.setattr(reproduce_command, "CLAIMS", {"made-up": claim})
    with pytest.raises(SystemExit) as stopped:
        run_reproduce(["--all"])
    out = capsys.readouterr().out
    assert stopped.value.code == 1
    assert "1 of 2 reproduced" in out and "not all of made-up." in out
    rows = [line.split() for line in out.splitlines()]
    assert ["one", "2.0", "2.010", "+0.010"] in rows
    assert ["other", "3.0", "3.260", "+0.260", "not", "reproduced"] in rows


@pytest.mark.parametrize(
    "argv, words",
    [
        (["zero-tabel-1"], "did you mean zero-table-1?"),
        (["nothing like it"], "names them"),
        (["gpipe-bubble", "--all"], "leave out one of the two"),
    ],
)
def test_wrong_options_are_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_reproduce(argv)
    assert stopped.value.code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_parameters_and_operations_of_switch_transformers() -> None:
    """Two of the published counts are not those of the printed shapes, and the program says so."""
    counts = check(CLAIMS["switch-parameters"])  # type: ignore[arg-type]
    assert [reading.what for reading in counts.readings if not reading.agrees] == ["Switch-Large", "Switch-XXL"]
    assert counts.readings[5].note.endswith("with 128, as in the published checkpoint, it is 395")
    assert round(T5Shape(4096, 10240, 64, 24, 24, 128).parameters / 1e9) == 395
    assert check(CLAIMS["switch-operations"]).reproduced  # type: ignore[arg-type]
    assert T5Shape(768, 2048, 12, 12).operations == T5Shape(768, 2048, 12, 12, 12, 128).operations


def test_the_names_that_are_known_without_torch_are_all() -> None:
    assert tuple(CLAIMS) == early_options.CLAIMS
