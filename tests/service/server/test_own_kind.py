from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ovmstrio import KINDS, Kinds, table_of
from ovmstrio.config.config_file import parse_config
from ovmstrio.errors import ConfigError, Problem, ServiceLoading
from ovmstrio.ext.kinds import (
    ONLY_VERSION,
    CallType,
    ConfigFile,
    Dependency,
    InferRequest,
    InferResponse,
    Kind,
    Listing,
    LoadContext,
    Schema,
    ServableMetadata,
    ServableSpec,
    check_members,
    is_whole,
    tree_fingerprint,
)
from ovmstrio.protocols.kserve.extensions import repository_index
from ovmstrio.server.check import LoadedVersion, check_config
from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.registry import Registry
from ovmstrio.serving.source import ConfigSource
from tests.support.served_in_thread import serving_plan
from tests.support.stub_registry import running


class _EchoSpec(ServableSpec):
    """The file whose content is the answer."""

    kind: ClassVar[str] = "echo"

    calls: str = ""


class _Entry(Schema):
    name: str
    file: str
    calls: str = ""


class _Echo:
    def __init__(self, spec: _EchoSpec) -> None:
        self.text = spec.base_path.read_text()
        self.metadata = ServableMetadata(spec.name, "Echo", (), ())

    async def infer(self, request: InferRequest) -> InferResponse:
        return InferResponse(self.text, "1", [], request.id)

    async def aclose(self) -> None:
        """Do nothing."""


class _EchoKind(Kind[_EchoSpec]):
    """Services that answer with the content of a file."""

    name = _EchoSpec.kind
    spec = _EchoSpec
    call_types = frozenset({CallType.TENSORS})
    section = "echo_config_list"

    def read(self, file: ConfigFile) -> list[_EchoSpec]:
        specs = []
        for entry in file.items(self.section):
            members = check_members(entry, _Entry, file.findings)
            if is_whole(entry, members, _Entry) and file.is_first(self.name, entry, members["name"]):
                given: dict[str, Any] = {key: member.value for key, member in members.items()}
                base_path = file.directory / given.pop("file")
                place = file.place(entry)
                specs.append(_EchoSpec(base_path=base_path, origin=file.origin(entry), place=place, **given))
        return specs

    def depends_on(self, spec: _EchoSpec) -> list[Dependency]:
        return [Dependency(spec.calls, reloads=True)] if spec.calls else []

    def list_versions(self, spec: _EchoSpec) -> Listing:
        return Listing({ONLY_VERSION: spec.base_path}, fingerprint=tree_fingerprint(spec.base_path))

    def fingerprint(self, spec: _EchoSpec, directory: Path) -> str:
        return tree_fingerprint(directory)

    async def load(self, spec: _EchoSpec, version: int, directory: Path, context: LoadContext) -> _Echo:
        if spec.calls:
            with await context.lease(spec.calls):
                pass
        try:
            return _Echo(spec)
        except OSError as error:
            raise ConfigError([Problem("there is no text", path="file", found=str(spec.base_path))]) from error


TABLE: Kinds = {**KINDS, **table_of(_EchoKind())}


def _write(folder: Path, *entries: dict[str, str], **sections: Any) -> Path:
    config = folder / "config.json"
    document = {"model_config_list": [], "echo_config_list": list(entries), **sections}
    config.write_text(json.dumps(document, indent=1))
    return config


async def test_service_of_an_own_kind_is_loaded_listed_called_and_reloaded(tmp_path: Path) -> None:
    config = _write(tmp_path, {"name": "b", "file": "b.txt", "calls": "a"}, {"name": "a", "file": "a.txt"})
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    registry = Registry(TABLE, poll_seconds=0)
    source = ConfigSource(config, registry, partial(parse_config, TABLE.values()))
    async with running(registry):
        await source.reload()
        listed = [(entry.name, entry.version, entry.state) for entry in repository_index(DataPlane(registry))]
        assert sorted(listed) == [("a", "1", "READY"), ("b", "1", "READY")]
        assert registry.names_of("echo") == {"a", "b"}
        assert [status.kind for status in registry.statuses()["a"]] == ["echo"]
        with await registry.lease("b", "7") as lease:
            assert (await lease.servable.infer(InferRequest("b"))).model_name == "b"
        (tmp_path / "a.txt").write_text("else")
        before = registry.peek("b")
        assert await source.reload()
        with await registry.lease("a") as lease:
            assert (await lease.servable.infer(InferRequest("a"))).model_name == "else"
        assert registry.peek("b") is not before
        (tmp_path / "b.txt").unlink()
        await registry.rescan()
        assert registry.is_ready("b")
        assert [(problem.line, problem.path) for problem in registry.findings()] == [(6, "echo_config_list[0].file")]


async def test_configuration_of_an_own_kind_is_checked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    entries = [{"name": "a", "file": "a.txt"}, {"name": "b", "file": "b.txt"}, {"name": "a", "file": "b.txt"}]
    handlers = [{"name": "b", "path": "b"}]
    report = await check_config(_write(tmp_path, *entries, handler_config_list=handlers), kinds=TABLE)
    assert report.loaded == (LoadedVersion("a", 1),)
    assert [(problem.path, problem.message, problem.severity) for problem in report.problems] == [
        ("echo_config_list[1].name", "The name is taken: 'b' is a handler's, which is served", "error"),
        ("echo_config_list[2].name", "duplicate echo 'a', ignored", "warning"),
        ("handler_config_list[0].path", "the project does not exist", "error"),
    ]


async def test_server_starts_without_the_module_that_a_kind_loads_with(tmp_path: Path) -> None:
    class Broken(_EchoKind):
        loads_with: ClassVar[str] = "broken"

    (tmp_path / "a.txt").write_text("a")
    settings = ServerSettings(
        config_path=_write(tmp_path, {"name": "a", "file": "a.txt"}), port=0, rest_bind_address=f"unix:{tmp_path}/rest"
    )
    plan = await read_plan(settings, {**KINDS, **table_of(Broken())})
    async with serving_plan(plan) as served:
        await served.plane.registry.wait_loaded()
        assert served.plane.readiness().ready


async def test_service_of_an_own_kind_that_failed_to_load_is_reported(tmp_path: Path) -> None:
    config = _write(tmp_path, {"name": "a", "file": "a.txt"})
    async with running(Registry(TABLE, poll_seconds=0)) as registry:
        await registry.apply(parse_config(TABLE.values(), config.read_bytes(), config).services)
        with pytest.raises(ServiceLoading, match='echo "a" is not loaded yet: its last load failed: file: there is'):
            await registry.lease("a")


def test_section_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    config = _write(tmp_path)
    with pytest.raises(ConfigError, match="unknown key 'echo_config_list'"):
        parse_config(KINDS.values(), config.read_bytes(), config)
