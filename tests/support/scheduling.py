"""The order in which trio runs tasks that can run at the same time, which it throws a coin for."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import trio._core._run as trio_run

COINS = ("forward", "backward", "both")
"""Tasks of one moment run as they became runnable, the other way round, or now so and now so."""


class _Coin(Random):
    """Falls as it is told; what else trio asks of it is as ever."""

    def __init__(self, coin: str) -> None:
        super().__init__(5)
        self._sides = {"forward": [0.9], "backward": [0.1], "both": [0.1, 0.9, 0.9, 0.1, 0.1]}[coin]
        self._thrown = 0

    def random(self) -> float:
        self._thrown += 1
        return self._sides[self._thrown % len(self._sides)]

    def shuffle(self, x: MutableSequence[Any]) -> None:
        if self.random() < 0.5:
            x.reverse()


@contextmanager
def scheduled(coin: str) -> Iterator[None]:
    """Have tasks run in an order of :data:`COINS` while the block lasts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trio_run, "_r", _Coin(coin))
        yield
