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
    """Read a small file format of this test: names of models, each with a folder of its name."""
    try:
        names = json.loads(content)
    except ValueError as error:
        raise ConfigError([Problem("not valid json", file=str(path))]) from error
    models = tuple(ModelSpec(name=name, base_path=path.parent / name) for name in names)
    problems = [Problem(f'the name "{name}" is taken') for name in {name for name in names if names.count(name) > 1}]
    return ServerSpec(services=models, problems=(Problem("an old key", severity="warning"), *problems))


class Site:
    """A folder with a configuration file and models, and a registry kept in line with it."""

    def __init__(self, folder: Path, *, poll_seconds: float = 0) -> None:
        self.folder = folder
        self.config = folder / "config.json"
        self.loader = StubLoader()
        self.registry = registry_of(self.loader, poll_seconds=poll_seconds)
        self.source = ConfigSource(self.config, self.registry, _parse)
        self.registry.on_poll(self.source.poll)

    def write(self, *names: str) -> None:
        """Configure models, each of which has a version 1."""
        for name in names:
            add_versions(self.folder / name, 1)
        self.config.write_text(json.dumps(names))

    async def start(self) -> None:
        """Read and apply the file as the supervisor does."""
        await self.source.reload(force=True)

    def served(self) -> list[str]:
        """Name the models that can be called."""
        return [name for name in self.registry.statuses() if self.registry.available_versions(name)]

    async def until_served(self, *names: str) -> None:
        """Return once exactly these models can be called."""
        while self.served() != list(names):
            await self.registry.wait_change()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Configure one model and poll nothing."""
    site = Site(tmp_path)
    site.write("a")
    return site


async def test_a_reload_applies_a_changed_file_once(site: Site) -> None:
    """A new model is served after the reload, and the next reload has nothing to do."""
    async with running(site.registry):
        await site.start()
        site.write("a", "b")
        assert await site.source.reload() is True
        assert site.served() == ["a", "b"]
        assert await site.source.reload() is False
        assert site.loader.attempts == {("a", 1): 1, ("b", 1): 1}


async def test_a_reload_of_an_unchanged_file_looks_for_versions(site: Site) -> None:
    """A new version directory is found by a reload, too."""
    async with running(site.registry):
        await site.start()
        add_versions(site.folder / "a", 2)
        assert await site.source.reload() is True
        assert site.registry.available_versions("a") == [2]


async def test_a_forced_reload_applies_the_file_anyway(site: Site) -> None:
    """Who insists gets the file applied, which changes nothing for models that are as they were."""
    async with running(site.registry):
        await site.start()
        assert await site.source.reload(force=True) is True
        assert site.loader.attempts == {("a", 1): 1}


async def test_a_missing_file_is_told_and_changes_nothing(site: Site) -> None:
    """The text names the file; what was served goes on."""
    async with running(site.registry):
        await site.start()
        site.config.unlink()
        with pytest.raises(ConfigError) as caught:
            await site.source.reload()
        assert caught.value.message == f"{site.config}: the file cannot be read: No such file or directory"
        assert site.served() == ["a"]


async def test_a_file_that_cannot_be_used_is_told_again_at_every_reload(
    site: Site, autojump_clock: trio.testing.MockClock
) -> None:
    """A failed load is remembered, so that the same content is tried and refused again; nothing changes."""
    async with running(site.registry):
        await site.start()
        site.config.write_text("[")
        for _ in range(2):
            with pytest.raises(FailedPrecondition, match="not valid json"):
                await site.source.reload()
        assert site.served() == ["a"]
        site.write("a")
        assert await site.source.reload() is True


async def test_a_half_written_file_is_read_again(site: Site, autojump_clock: trio.testing.MockClock) -> None:
    """A writer who is not done within the first read has a little time to finish."""
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


async def test_a_model_that_fails_is_told_and_retried_by_the_next_reload(site: Site) -> None:
    """The reload that fails names the model; what works is served; the next reload tries again."""
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


async def test_a_problem_of_the_file_is_told_though_all_models_are_served(site: Site) -> None:
    """A name given twice makes the reload a failure; warnings do not."""
    async with running(site.registry):
        await site.start()
        site.write("a", "b", "b")
        with pytest.raises(ModelFailure, match='the name "b" is taken'):
            await site.source.reload()
        assert site.served() == ["a", "b"]
        site.write("a")
        assert await site.source.reload() is True


async def test_a_version_that_fails_in_a_rescan_is_told(site: Site) -> None:
    """Without a file to read, the failure is one of the version scan."""
    async with running(site.registry):
        await site.start()
        site.loader.fail("a", 2)
        add_versions(site.folder / "a", 2)
        with pytest.raises(VersionsFailure, match=r'^model "a" version 2: the stub was told'):
            await reload_versions(site.registry)
        assert site.registry.available_versions("a") == [1]


async def test_reloads_at_the_same_time_apply_the_file_once(site: Site) -> None:
    """Of many clients that ask together, one causes the load, and all get an answer."""
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
    """An edit is picked up without anyone asking, as are the next ones."""
    site = Site(tmp_path, poll_seconds=1)
    site.write("a")
    async with running(site.registry):
        await site.start()
        site.write("a", "b")
        await site.until_served("a", "b")
        site.write("b")
        await site.until_served("b")


async def test_a_file_that_was_back_is_told_to_be_missing_again(tmp_path: Path) -> None:
    """Where the server's processes look before one of them polls."""
    site = Site(tmp_path)
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


async def test_polling_survives_what_is_wrong_with_the_file(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A bad or missing file is logged once a state, not once a poll, and a mended one is applied."""
    site = Site(tmp_path, poll_seconds=1)
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
