"""Plans and predictions in words."""

from dataclasses import replace

import pytest
from predictions import GIB, later, piped, prediction, refusal

from zeroshard.pipeline.policy import Pipeline
from zeroshard.plan import Plan
from zeroshard.planner.predict.result import COPY, Refusal
from zeroshard.planner.search.text import alike, categories, describe, lacking, seconds, shares, short


@pytest.mark.parametrize(
    "plan, ranks, words",
    [
        (Plan(zero=3, precision="bf16", microbatches=2), 8, "zero 3, bf16, 2 microbatches"),
        (Plan(zero=2, shard_group=4), 8, "zero 2, fp32, slices over 4 ranks"),
        (Plan(zero=1, pipeline_parallel=4, microbatches=8), 8, "4 stages 1f1b x 2, zero 1, fp32, 8 microbatches"),
        (Plan(zero=1, pipeline_parallel=4, microbatches=8), 4, "4 stages 1f1b, zero 1, fp32, 8 microbatches"),
        (Plan(zero=1, pipeline_parallel=4), None, "4 stages 1f1b, zero 1, fp32"),
        (
            Plan(
                zero=0,
                pipeline_parallel=Pipeline(2, replicas=(2, 1)),
                microbatches=2,
                recompute="blocks",
            ),
            3,
            "2 stages 1f1b x 2-1, zero 0, fp32, 2 microbatches, recompute",
        ),
        (
            Plan(
                zero=0,
                pipeline_parallel=Pipeline(2, virtual_stages=2, schedule="interleaved"),
                microbatches=2,
                recompute="off",
            ),
            2,
            "2 stages interleaved, zero 0, fp32, 2 microbatches, 2 chunks per stage, no recompute",
        ),
        (
            Plan(zero=2, reduce_dtype="bf16", reduce_every="step", microbatches=2),
            2,
            "zero 2, fp32, 2 microbatches, gradients sent in bf16, reduced every step",
        ),
    ],
)
def test_a_plan_in_a_few_words(plan: Plan, ranks: int | None, words: str) -> None:
    assert short(plan, ranks) == words


def test_a_prediction_says_memory_time_wire_and_how_it_was_found() -> None:
    text = describe(prediction(host_bytes=GIB, notes=("Mind the gap.",)))
    assert text[0] == "zero 3, bf16, 2 microbatches; 8 ranks, 4 rows per rank and step."
    assert text[1].startswith("Memory: 15.00 GiB of 20.00 GiB at the peak on rank 0, 25% free: activations 6.00 GiB, ")
    assert text[2] == "Time: 420 ms per step, 78,019 tokens/s, bound by compute: compute 71%, wire 24%, optimizer 5%."
    assert text[3].startswith("Wire: 6.00 GiB per step on this rank: gather parameters 4.00 GiB, reduce gradients 2.00")
    assert text[4] == "Host: 1.00 GiB on one node: a checkpoint's copy 1.00 GiB (none with save(wait=True))."
    assert "(engine)" in text[5] and "(rates)" in text[6]
    assert text[7:] == ["Mind the gap."]


def test_weights_while_loading_are_named_with_the_way_without_them() -> None:
    one = prediction(loading_bytes=3 * GIB, host_capacity_bytes=4 * GIB)
    (line,) = [text for text in describe(one) if text.startswith("Weights while loading")]
    assert line.startswith("Weights while loading: 3.00 GiB of host memory on one node before the first step, as each")
    assert line.endswith("(none where safetensors files in the model's folder are read).")
    assert ": 3.00 GiB, of 2.00 GiB of host" in " ".join(describe(replace(one, host_capacity_bytes=2 * GIB)))
    assert one.fits and one.as_dict()["loading_bytes"] == 3 * GIB


def test_a_prediction_that_does_not_fit_says_so() -> None:
    assert "too much: 3% must stay free" in describe(prediction(capacity_bytes=15 * GIB))[1]
    assert "5% free" in describe(prediction(capacity_bytes=int(15.8 * GIB)))[1]


def test_a_prediction_for_gpus_has_the_number_of_communicators() -> None:
    many = describe(prediction(communicators=4, communicator_bytes=GIB))
    assert "NCCL: 4 communicators on this rank, about 1.00 GiB of the device beside tensors, by assumption." in many
    assert not any("NCCL" in sentence for sentence in describe(prediction()))


def test_host_memory_is_split_by_its_uses_with_their_switches() -> None:
    held = {"optimizer states": GIB, "gradients": GIB // 2, "buffers": 0}
    p = prediction(host=held, node_ranks=2, host_bytes=5 * GIB, host_capacity_bytes=4 * GIB)
    assert p.host_parts == {"optimizer states": 2 * GIB, "gradients": GIB, COPY: 2 * GIB}
    assert sum(p.as_dict()["host_parts"].values()) == p.host_bytes
    assert p.fits and p.waits_for_checkpoints and p.host_needed_bytes == 3 * GIB
    text = " ".join(describe(p))
    assert (
        "optimizer states 2.00 GiB (offload=optimizer)" in text and "copy 2.00 GiB (none with save(wait=True))" in text
    )
    assert "Checkpoints: 4.00 GiB of host memory have no room for whole copies; training waits" in text
    small = replace(p, host_capacity_bytes=3 * GIB - 1)
    assert small.full == ["host"] and not replace(p, host_capacity_bytes=5 * GIB).waits_for_checkpoints
    why, way_out = lacking(small)
    assert "3.00 GiB of each node's host memory" in why and "gradients 1.00 GiB (on their way to the update" in why
    assert way_out == "Nodes with 3.00 GiB of host memory would hold it."


def test_what_is_not_there_is_not_mentioned() -> None:
    text = " ".join(describe(piped(wire_bytes={})))
    assert "Wire" not in text and "Host" not in text and "optimizer 0%" not in text
    assert "4 rows per data rank and step" in text


def test_shares_add_up_and_the_largest_is_first() -> None:
    found = shares(later(prediction(), 0.58))
    assert next(iter(found)) == "compute" and sum(found.values()) == pytest.approx(1)
    assert found["compute"] == pytest.approx(0.88)
    assert set(shares(replace(prediction(), causes={"compute": 0.0})).values()) == {0.0}


def test_categories_have_the_ledgers_order() -> None:
    p = prediction(memory={"other": 1, "temporaries": 1, "gradients": 1, "parameters": 1}, events=())
    assert categories([p]) == ["parameters", "gradients", "other", "temporaries"]


@pytest.mark.parametrize(
    "time, words",
    [
        (1234.4, "1,234 s"),
        (12.34, "12.3 s"),
        (0.42, "420 ms"),
        (0.0053, "5.30 ms"),
        (6.78e-6, "6.78 µs"),
        (0, "0.00 µs"),
    ],
)
def test_times_read_well(time: float, words: str) -> None:
    assert seconds(time) == words


def test_refusals_are_alike_when_only_numbers_differ() -> None:
    first, second = refusal(Plan(zero=0), "80.12 GiB"), refusal(Plan(zero=1), "1,070.1 MiB")
    other = Refusal(Plan(zero=2), 4, "12 rows do not divide.", "Use 16.")
    assert alike([first, other, second]) == [[first, second], [other]]
