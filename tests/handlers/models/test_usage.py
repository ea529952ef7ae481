from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ovmstrio.runtimes.handlers.models.usage import UsagePolicy

_KEYS = st.sampled_from("abcdef")
_MEMORY, _DISK = 2, 3


def test_the_least_recently_used_goes_first() -> None:
    """What is used stays longer than what was only loaded later, and stays on disk for longer than in memory."""
    policy: UsagePolicy[str] = UsagePolicy(1, 2)
    gone = []
    for key in "abac":
        policy.add_to_disk(key)
        policy.add_to_memory(key)
        gone.append((policy.evict_from_memory(), policy.evict_from_disk()))
    assert gone == [([], []), (["a"], []), (["b"], []), (["a"], ["b"])]
    assert (policy.in_memory, policy.on_disk) == (("c",), ("a", "c"))


def test_without_limits_nothing_goes() -> None:
    """A library that does not cache keeps everything."""
    policy: UsagePolicy[int] = UsagePolicy()
    for key in range(100):
        policy.add_to_disk(key)
        policy.add_to_memory(key)
    assert policy.evict_from_memory() == policy.evict_from_disk() == []


class _Model(RuleBasedStateMachine):
    """Compares the policy with lists in which the most recently used come last."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: UsagePolicy[str] = UsagePolicy(_MEMORY, _DISK)
        self.memory: list[str] = []
        self.disk: list[str] = []
        self.leases: list[str] = []

    def _use(self, place: list[str], key: str) -> None:
        if key in place:
            place.remove(key)
        place.append(key)

    @rule(key=_KEYS)
    def load(self, key: str) -> None:
        """Load a version."""
        self.policy.lease(key)
        self.leases.append(key)
        for place, add in ((self.disk, self.policy.add_to_disk), (self.memory, self.policy.add_to_memory)):
            self._use(place, key)
            add(key)
        self.tidy()
        self.release(key)

    @rule(key=_KEYS)
    def use(self, key: str) -> None:
        """Use what may be there."""
        self.policy.touch(key)
        for place in (self.memory, self.disk):
            if key in place:
                self._use(place, key)

    @rule(key=_KEYS)
    def lease(self, key: str) -> None:
        """Begin to use it for longer."""
        self.policy.lease(key)
        self.leases.append(key)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        """Give a lease back."""
        self.release(data.draw(st.sampled_from(self.leases)))
        self.tidy()

    def release(self, key: str) -> None:
        """Give one lease back."""
        self.policy.release(key)
        self.leases.remove(key)

    @rule(key=_KEYS)
    def forget(self, key: str) -> None:
        """Let it vanish from the storage."""
        self.policy.drop_from_memory(key)
        self.policy.drop_from_disk(key)
        self.memory = [each for each in self.memory if each != key]
        self.disk = [each for each in self.disk if each != key]

    @rule()
    def tidy(self) -> None:
        """Have the policy choose, and choose the slow way."""
        free = [key for key in self.memory if key not in self.leases]
        expected = free[: max(0, len(self.memory) - _MEMORY)]
        assert self.policy.evict_from_memory() == expected
        self.memory = [key for key in self.memory if key not in expected]
        free = [key for key in self.disk if key not in self.leases and key not in self.memory]
        expected = free[: max(0, len(self.disk) - _DISK)]
        assert self.policy.evict_from_disk() == expected
        self.disk = [key for key in self.disk if key not in expected]
        if not self.leases:
            assert len(self.memory) <= _MEMORY
            assert len(self.disk) <= _DISK

    @invariant()
    def agrees(self) -> None:
        """Both know the same."""
        assert list(self.policy.in_memory) == self.memory
        assert list(self.policy.on_disk) == self.disk
        assert set(self.policy._leases) == set(self.leases)


TestModel = _Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
