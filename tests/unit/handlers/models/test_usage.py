from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ovmstrio.runtimes.handlers.models.shelf import RecentlyUsed
from tests.support.examples import examples

_KEYS = st.sampled_from("abcdef")
_MEMORY, _DISK = 2, 3


def _nothing(_: object) -> bool:
    return False


def test_the_least_recently_used_goes_first() -> None:
    """What is used stays longer than what was only loaded later, and stays on disk for longer than in memory."""
    memory, disk = RecentlyUsed[str](1), RecentlyUsed[str](2)
    gone = []
    for key in "abac":
        disk.add(key)
        memory.add(key)
        gone.append((memory.evict(_nothing), disk.evict(memory.__contains__)))
    assert gone == [([], []), (["a"], []), (["b"], []), (["a"], ["b"])]
    assert (list(memory), list(disk)) == (["c"], ["a", "c"])


def test_without_limits_nothing_goes() -> None:
    """A library that does not cache keeps everything."""
    place = RecentlyUsed[int]()
    for key in range(100):
        place.add(key)
    assert place.evict(_nothing) == []


class _Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.in_memory, self.on_disk = RecentlyUsed[str](_MEMORY), RecentlyUsed[str](_DISK)
        self.memory: list[str] = []
        self.disk: list[str] = []
        self.leases: list[str] = []

    def _use(self, place: list[str], key: str) -> None:
        if key in place:
            place.remove(key)
        place.append(key)

    @rule(key=_KEYS)
    def load(self, key: str) -> None:
        self.leases.append(key)
        for place, kept in ((self.disk, self.on_disk), (self.memory, self.in_memory)):
            self._use(place, key)
            kept.add(key)
        self.tidy()
        self.release(key)

    @rule(key=_KEYS)
    def use(self, key: str) -> None:
        for place, kept in ((self.disk, self.on_disk), (self.memory, self.in_memory)):
            kept.touch(key)
            if key in place:
                self._use(place, key)

    @rule(key=_KEYS)
    def lease(self, key: str) -> None:
        self.leases.append(key)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        self.release(data.draw(st.sampled_from(self.leases)))
        self.tidy()

    def release(self, key: str) -> None:
        self.leases.remove(key)

    @rule(key=_KEYS)
    def forget(self, key: str) -> None:
        self.in_memory.drop(key)
        self.on_disk.drop(key)
        self.memory = [each for each in self.memory if each != key]
        self.disk = [each for each in self.disk if each != key]

    @rule()
    def tidy(self) -> None:
        free = [key for key in self.memory if key not in self.leases]
        expected = free[: max(0, len(self.memory) - _MEMORY)]
        assert self.in_memory.evict(self.leases.__contains__) == expected
        self.memory = [key for key in self.memory if key not in expected]
        free = [key for key in self.disk if key not in self.leases and key not in self.memory]
        expected = free[: max(0, len(self.disk) - _DISK)]
        assert self.on_disk.evict(lambda key: key in self.leases or key in self.in_memory) == expected
        self.disk = [key for key in self.disk if key not in expected]
        if not self.leases:
            assert len(self.memory) <= _MEMORY
            assert len(self.disk) <= _DISK

    @invariant()
    def agrees(self) -> None:
        assert list(self.in_memory) == self.memory
        assert list(self.on_disk) == self.disk


TestModel = _Model.TestCase
TestModel.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
