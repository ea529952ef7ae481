"""A configuration file under change: applied when it is new, remembered when it failed, left alone otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.config.specs import ModelSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, FailedPrecondition, ModelFailure, Problem, VersionsFailure
from ovmstrio.registry.source import ConfigSource, reload_versions
from tests.support.stub_registry import StubLoader, add_versions, registry_of, running


def _parse(content: bytes, path: Path) -> ServerSpec:
    """Parse the file format of these tests: a JSON list of names of models, each with a folder of its name."""
    try:
        names = json.loads(content)
    except ValueError as error:
        raise ConfigError([Problem("not valid json", file=str(path))]) from error
    models = tuple(ModelSpec(name=name, base_path=path.parent / name) for name in names)
    problems = [Problem(f'the name "{name}" is taken') for name in {name for name in names if names.count(name) > 1}]
    return ServerSpec(services=models, problems=(Problem("an old key", severity="warning"), *problems))


class _Site:
    """A folder with a configuration file and models, and a registry that loads them."""

    def __init__(self, folder: Path, *, poll_seconds: float = 0) -> None:
        self.folder = folder
        self.config = folder / "config.json"
        self.loader = StubLoader()
        self.registry = registry_of(self.loader, poll_seconds=poll_seconds)
        self.source = ConfigSource(self.config, self.registry, _parse)
        self.registry.on_poll(self.source.poll)

    def write(self, *names: str) -> None:
        for name in names:
            add_versions(self.folder / name, 1)
        self.config.write_text(json.dumps(names))

    async def start(self) -> None:
        await self.source.reload(force=True)

    def served(self) -> list[str]:
        return [name for name in self.registry.statuses() if self.registry.available_versions(name)]

    async def until_served(self, *names: str) -> None:
        while self.served() != list(names):
            await self.registry.wait_change()


@pytest.fixture
def site(tmp_path: Path) -> _Site:
    """Configure one model and poll nothing."""
    site = _Site(tmp_path)
    site.write("a")
    return site


async def test_a_reload_applies_a_changed_file_once_and_finds_new_versions(site: _Site) -> None:
    async with running(site.registry):
        await site.start()
        site.write("a", "b")
        assert await site.source.reload() is True
        assert site.served() == ["a", "b"]
        assert await site.source.reload() is False
        assert await site.source.reload(force=True) is True
        assert site.loader.attempts == {("a", 1): 1, ("b", 1): 1}
        add_versions(site.folder / "a", 2)
        assert await site.source.reload() is True
        assert site.registry.available_versions("a") == [2]


async def test_a_missing_file_is_reported_and_changes_nothing(site: _Site) -> None:
    async with running(site.registry):
        await site.start()
        site.config.unlink()
        with pytest.raises(ConfigError) as caught:
            await site.source.reload()
        assert caught.value.message == f"{site.config}: the file cannot be read: No such file or directory"
        assert site.served() == ["a"]


async def test_every_reload_reports_a_file_that_cannot_be_parsed(
    site: _Site, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(site.registry):
        await site.start()
        site.config.write_text("[")
        for _ in range(2):
            with pytest.raises(FailedPrecondition, match="not valid json"):
                await site.source.reload()
        assert site.served() == ["a"]
        site.write("a")
        assert await site.source.reload() is True


async def test_a_partly_written_file_is_read_again(site: _Site, autojump_clock: trio.testing.MockClock) -> None:
    site.write("a", "b")
    whole = site.config.read_bytes()
    site.config.write_bytes(whole[:5])
    seen: list[bytes] = []

    def parse_and_finish(content: bytes, path: Path) -> ServerSpec:
        seen.append(content)
        site.config.write_bytes(whole)
        return _parse(content, path)

    async with running(site.registry):
        assert await ConfigSource(site.config, site.registry, parse_and_finish).reload()
        assert site.served() == ["a", "b"]
    assert seen == [whole[:5], whole]


async def test_the_next_reload_retries_a_model_that_failed(site: _Site) -> None:
    async with running(site.registry):
        await site.start()
        site.loader.fail("b", 1)
        site.write("a", "b")
        with pytest.raises(ModelFailure) as caught:
            await site.source.reload()
        assert caught.value.message == 'model "b" version 1: the stub was told to fail'
        assert site.served() == ["a"]
        site.loader.mend("b", 1)
        assert await site.source.reload() is True
        assert site.served() == ["a", "b"]


async def test_a_duplicate_name_fails_the_reload_and_a_warning_does_not(site: _Site) -> None:
    async with running(site.registry):
        await site.start()
        site.write("a", "b", "b")
        with pytest.raises(ModelFailure, match='the name "b" is taken'):
            await site.source.reload()
        assert site.served() == ["a", "b"]
        site.write("a")
        assert await site.source.reload() is True


async def test_a_rescan_reports_the_version_that_fails(site: _Site) -> None:
    async with running(site.registry):
        await site.start()
        site.loader.fail("a", 2)
        add_versions(site.folder / "a", 2)
        with pytest.raises(VersionsFailure, match=r'^model "a" version 2: the stub was told'):
            await reload_versions(site.registry)
        assert site.registry.available_versions("a") == [1]


async def test_concurrent_reloads_apply_the_file_once(site: _Site) -> None:
    answers: list[bool] = []

    async def reload() -> None:
        answers.append(await site.source.reload())

    async with running(site.registry):
        await site.start()
        site.write("a", "b")
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(reload)
    assert sorted(answers) == [False] * 19 + [True]
    assert site.loader.attempts == {("a", 1): 1, ("b", 1): 1}


async def test_polling_applies_a_changed_file(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    site = _Site(tmp_path, poll_seconds=1)
    site.write("a")
    async with running(site.registry):
        await site.start()
        site.write("a", "b")
        await site.until_served("a", "b")
        site.write("b")
        await site.until_served("b")


async def test_a_file_that_is_missing_again_is_stale_again(tmp_path: Path) -> None:
    site = _Site(tmp_path)
    site.write("a")
    async with running(site.registry):
        await site.start()
        for _ in range(2):
            content = site.config.read_bytes()
            site.config.unlink()
            assert await site.source.is_stale()
            with pytest.raises(ConfigError) as raised:
                await site.source.reload()
            site.source.note(raised.value)
            assert not await site.source.is_stale()
            site.config.write_bytes(content)
            assert not await site.source.is_stale()


async def test_polling_logs_each_fault_of_the_file_once(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    site = _Site(tmp_path, poll_seconds=1)
    site.write("a")

    async def ticks(count: int) -> None:
        for _ in range(count):
            await site.source.poll()

    async with running(site.registry):
        await site.start()
        with capture_logs() as logs:
            site.config.write_text("[")
            await ticks(5)
            site.config.unlink()
            await ticks(5)
        reasons = [entry["reason"] for entry in logs if entry["event"] == "config reload failed"]
        assert reasons == [
            f"{site.config}: not valid json",
            f"{site.config}: the file cannot be read: No such file or directory",
        ]
        assert site.served() == ["a"]
        site.write("b")
        await site.until_served("b")
