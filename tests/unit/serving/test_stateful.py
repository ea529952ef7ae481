from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ovmstrio.config.specs import AllVersions, LatestVersions, ModelSpec, SpecificVersions
from ovmstrio.core.errors import NotFound, VersionLoading
from ovmstrio.serving.instances import Lease
from ovmstrio.serving.records import VersionState
from tests.support.examples import examples
from tests.support.loops import TrioThread
from tests.support.stub_registry import StubLoader, StubServable, add_versions, registry_of, running

NAMES = st.sampled_from(["a", "b"])
VERSIONS = st.integers(1, 4)
POLICIES = st.sampled_from(
    [LatestVersions(), LatestVersions(num_versions=2), AllVersions(), SpecificVersions(versions=(2, 9))]
)


class _RegistryHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp())
        self.loader = StubLoader()
        self.registry = registry_of(self.loader, poll_seconds=0)
        self.specs: dict[str, ModelSpec] = {}
        self.leases: list[Lease] = []
        self.end = trio.CancelScope()
        self.loop = TrioThread()
        self.loop.start(self._serve)

    async def _serve(self) -> None:
        with self.end:
            async with running(self.registry):
                await trio.sleep_forever()

    @staticmethod
    def _release(lease: Lease) -> None:
        with lease:
            pass

    def teardown(self) -> None:
        while self.leases:
            self.loop.call(self._release, self.leases.pop())
        self.loop.call(self.end.cancel)
        self.loop.close()
        assert [servable.closed for servable in self.loader.opened] == [1] * len(self.loader.opened)
        assert self.loader.misuse == []
        shutil.rmtree(self.base)

    @initialize(policy=POLICIES)
    def start(self, policy: Any) -> None:
        add_versions(self.base / "a", 1, 2)
        self.configure("a", policy, 0)

    @rule(name=NAMES, policy=POLICIES, nireq=st.integers(0, 2))
    def configure(self, name: str, policy: Any, nireq: int) -> None:
        base = self.base / name
        base.mkdir(exist_ok=True)
        self.specs[name] = ModelSpec(name=name, base_path=base, version_policy=policy, nireq=nireq)
        self.loop.run(self.registry.apply, list(self.specs.values()))

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.specs.pop(name, None)
        self.loop.run(self.registry.apply, list(self.specs.values()))

    @rule(name=NAMES, version=VERSIONS)
    def add_version(self, name: str, version: int) -> None:
        add_versions(self.base / name, version)
        self.loop.run(self.registry.rescan)

    @rule(name=NAMES, version=VERSIONS)
    def remove_version(self, name: str, version: int) -> None:
        shutil.rmtree(self.base / name / str(version), ignore_errors=True)
        self.loop.run(self.registry.rescan)

    @rule(name=NAMES, version=VERSIONS)
    def break_version(self, name: str, version: int) -> None:
        self.loader.fail(name, version)

    @rule(name=NAMES, version=VERSIONS)
    def recover_version(self, name: str, version: int) -> None:
        self.loader.recover(name, version)
        self.loop.run(self.registry.rescan)

    @rule(name=NAMES, version=st.sampled_from(["", "0", "1", "2", "3", "4"]))
    def take(self, name: str, version: str) -> None:
        available = self.registry.available_versions(name)
        expected = int(version or 0) or (available[-1] if available else 0)
        try:
            lease = self.loop.run(self.registry.lease, name, version)
        except (NotFound, VersionLoading):
            assert expected not in available
        else:
            assert int(lease.version) == expected
            assert expected in available
            self.leases.append(lease)

    @rule(index=st.integers(0, 100))
    def give_back(self, index: int) -> None:
        if self.leases:
            self.loop.call(self._release, self.leases.pop(index % len(self.leases)))

    @invariant()
    def leased_servables_are_open(self) -> None:
        for lease in self.leases:
            assert isinstance(lease.servable, StubServable)
            assert not lease.servable.closed

    @invariant()
    def only_serving_or_leased_servables_are_open(self) -> None:
        serving = {
            id(self.registry.peek(name, str(version)))
            for name in self.registry.statuses()
            for version in self.registry.available_versions(name)
        }
        leased = {id(lease.servable) for lease in self.leases}
        assert {id(servable) for servable in self.loader.opened if not servable.closed} == serving | leased

    @invariant()
    def the_default_is_the_highest_available(self) -> None:
        for name, statuses in self.registry.statuses().items():
            available = [status.version for status in statuses if status.state is VersionState.AVAILABLE]
            assert self.registry.available_versions(name) == available
            if available:
                assert self.registry.peek(name) is self.registry.peek(name, str(available[-1]))

    @invariant()
    def the_versions_that_the_policy_selects_serve(self) -> None:
        for name in self.registry.statuses():
            available = self.registry.available_versions(name)
            spec = self.specs.get(name)
            on_disk = {int(path.name) for path in (self.base / name).iterdir()} if spec else set()
            broken = {version for failing, version in self.loader.failing if failing == name}
            expected = spec.version_policy.select(on_disk - (broken - set(available))) if spec else []
            assert available == expected


_RegistryHistory.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)
TestRegistryHistory = _RegistryHistory.TestCase
