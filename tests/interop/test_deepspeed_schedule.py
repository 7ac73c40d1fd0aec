"""Learning rates beside those of DeepSpeed 0.19.6's own classes, update for update."""

import json
from typing import Any

import pytest
import torch

from zeroshard.interop import DeepSpeedSchedule

RATES: list[tuple[str, dict[str, Any], list[float]]] = [  # of a base rate of 0.3, as DeepSpeed gave them
    (
        "WarmupLR",
        {"warmup_num_steps": 5},
        [0, 0, 0.129202967, 0.204781858, 0.258405935, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3],
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 9, "warmup_num_steps": 3},
        [
            0,
            0,
            0.000630929754,
            0.001,
            0.001,
            0.000833333333,
            0.000666666667,
            0.0005,
            0.000333333333,
            0.000166666667,
            0,
            0,
        ],
    ),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 8,
            "warmup_min_lr": 0.001,
            "warmup_max_lr": 0.2,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
        },
        [0.001, 0.001, 0.05075, 0.1005, 0.15025, 0.2, 0.15025, 0.1005, 0.05075, 0.001, 0.001, 0.001],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 9, "warmup_num_steps": 3},
        [0, 0, 0.189278926, 0.3, 0.27990582, 0.2250075, 0.150015, 0.0750225, 0.0201241798, 3e-05, 3e-05, 3e-05],
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 10,
            "warmup_num_steps": 1,
            "warmup_min_ratio": 0.2,
            "cos_min_ratio": 0.1,
            "warmup_type": "linear",
        },
        [
            0,
            0.06,
            0.18,
            0.289723737,
            0.260459415,
            0.216662263,
            0.165,
            0.113337737,
            0.0695405845,
            0.0402762631,
            0.03,
            0.03,
        ],
    ),
]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)


@pytest.mark.parametrize("kind, options, rates", RATES)
def test_rates_are_deepspeeds(kind: Any, options: dict[str, Any], rates: list[float]) -> None:
    optimizer = sgd()
    schedule = DeepSpeedSchedule(optimizer, kind, **options)
    found = []
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(rates, rel=1e-8, abs=1e-12)


def test_its_state_is_plain_json_and_goes_on() -> None:
    kind, options, rates = RATES[3]
    first = sgd()
    schedule = DeepSpeedSchedule(first, "WarmupDecayLR", **options)
    for _ in range(5):
        first.step()
        schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))
    other = DeepSpeedSchedule(sgd(), kind, total_num_steps=1)  # type: ignore[arg-type]
    other.load_state_dict(state)
    assert other.get_last_lr() == pytest.approx([rates[5]])
    other.optimizer.step()
    other.step()
    assert other.get_last_lr() == pytest.approx([rates[6]])
