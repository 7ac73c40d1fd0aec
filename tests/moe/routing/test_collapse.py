"""Warnings of a routing that collapses: once for each kind of trouble, by the name of the layer."""

import pytest
import torch

from zeroshard.moe.routing.statistics import WINDOW, RoutingWatch


def _texts(load: list[int], tokens: int, dropped: int = 0, steps: int = WINDOW) -> list[str]:
    watch = RoutingWatch("blocks.1.mlp.experts")
    return [text for _ in range(steps) for text in watch.add(torch.tensor(load), tokens, dropped)]


def test_balanced_routing_is_not_warned_of() -> None:
    assert _texts([10, 12, 8, 10], 40, steps=3 * WINDOW) == []


@pytest.mark.parametrize(
    "load, dropped, said",
    [
        ([20, 20, 0, 0, 20], 0, "2 of 5 experts got no token (expert 2, 3)"),
        ([45, 2, 4, 5, 4], 0, "expert 0 got 75% of the tokens, and 20.0% is even"),
        ([12, 12, 12, 12, 12], 20, "33% of the choices had no place in their expert's capacity"),
    ],
)
def test_each_trouble_is_told_once_with_its_layer(load: list[int], dropped: int, said: str) -> None:
    assert _texts(load, 60, dropped, steps=WINDOW - 1) == []
    texts = _texts(load, 60, dropped, steps=3 * WINDOW)
    assert texts == [f"Over the last {WINDOW} steps {said} in 'blocks.1.mlp.experts'. What helps: a larger weight of "
                     "the balance loss, a lower learning rate, or a router with a bias (deepseek_v3)."]  # fmt: skip


def test_few_tokens_leave_most_experts_without_any() -> None:
    assert not [text for text in _texts([1] + [0] * 99, 1) if "no token" in text]
