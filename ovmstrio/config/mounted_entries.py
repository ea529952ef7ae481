"""Entries of ``op_pipeline_config_list`` and ``handler_config_list``: services mounted at ``/{name}``.

Only the form of entries is checked here; their files are read at load time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import to_short_json
from ovmstrio.config.located import Located
from ovmstrio.config.model_options import check_local_path, check_name
from ovmstrio.config.schema import OPTIONAL, check_members, is_whole
from ovmstrio.config.service_options import PythonEntry, ServiceEntry, check_python, parse_python
from ovmstrio.config.specs import HandlerSpec, OpPipelineSpec, PythonSpec
from ovmstrio.core.errors import Problem

RESERVED: Final = ("v1", "v2", "v3", "metrics", "health")
"""First segments of the server's own REST paths."""


def check_mounted_name(name: str) -> list[Problem]:
    """Return the problems of a mounted service's name."""
    if name in RESERVED:
        message = "the name is reserved for the server's paths"
        expected = f"a name other than {', '.join(RESERVED)}"
        return [Problem(message, path="name", expected=expected, found=to_short_json(name))]
    if "/" in name:
        return [
            Problem("the name cannot be used", path="name", expected="a name without '/'", found=to_short_json(name))
        ]
    return check_name(name)


OP_PIPELINES: Final = "op_pipeline_config_list"
_SUFFIXES: Final = (".yml", ".yaml")
_OP_CONFIG: Final = "config.yml"
_SCRIPT: Final = "web_service.py"


class _OpEntry(ServiceEntry):
    name: str
    path: str
    service: str = OPTIONAL


def read_op_pipelines(file: ConfigFile) -> list[OpPipelineSpec]:
    """Parse the entries in order; the first of a name is used."""
    found = [_read_op_pipeline(entry, file) for entry in file.items(OP_PIPELINES)]
    return [spec for spec in found if spec is not None]


def _read_op_pipeline(entry: Located, file: ConfigFile) -> OpPipelineSpec | None:
    members = check_members(entry, _OpEntry, file.findings)
    if not is_whole(entry, members, _OpEntry) or not file.is_first(OpPipelineSpec.kind, entry, members["name"]):
        return None
    given: dict[str, Any] = {key: member.value for key, member in members.items()}
    place = file.place(entry)
    location = file.directory / given["path"]
    config = location if location.suffix in _SUFFIXES else location / _OP_CONFIG
    problems = [*check_mounted_name(given["name"]), *_check_paths(given)]
    return OpPipelineSpec(
        name=given["name"],
        base_path=config.parent,
        config=config,
        script=file.directory / given["service"] if "service" in given else config.parent / _SCRIPT,
        origin=file.origin(entry),
        problems=tuple(place.of(problem) for problem in problems),
        place=place,
    )


def _check_paths(given: dict[str, Any]) -> list[Problem]:
    expected = {"path": "the config.yml of the Ops, or its folder", "service": "the Python script of the service"}
    problems = []
    for key, what in expected.items():
        if given.get(key) == "":
            problems.append(Problem(f"the {key} is empty", path=key, expected=what, found='""'))
        elif key in given:
            problems += [replace(problem, path=key) for problem in check_local_path(given[key])]
    return problems


HANDLERS: Final = "handler_config_list"


class _HandlerEntry(PythonEntry, ServiceEntry):
    name: str
    path: str


def read_handlers(file: ConfigFile) -> list[HandlerSpec]:
    """Parse the entries in order; the first of a name is used."""
    found = [_read_handler(entry, file) for entry in file.items(HANDLERS)]
    return [spec for spec in found if spec is not None]


def _read_handler(entry: Located, file: ConfigFile) -> HandlerSpec | None:
    members = check_members(entry, _HandlerEntry, file.findings)
    if not is_whole(entry, members, _HandlerEntry) or not file.is_first(HandlerSpec.kind, entry, members["name"]):
        return None
    given: dict[str, Any] = {key: member.plain() for key, member in members.items()}
    name, path = given["name"], given["path"]
    place = file.place(entry)
    location = file.directory / path
    problems = [*check_mounted_name(name), *_check_path(path), *check_python(given, file.directory)]
    return HandlerSpec(
        name=name,
        base_path=location.parent if location.suffix in _SUFFIXES else location,
        path=location,
        origin=file.origin(entry),
        problems=tuple(place.of(problem) for problem in problems),
        place=place,
        python=PythonSpec() if problems else parse_python(given, file.directory),
    )


def _check_path(path: str) -> list[Problem]:
    if not path:
        expected = "the folder with a nucleus.yaml, or that file"
        return [Problem("the path is empty", path="path", expected=expected, found='""')]
    return [replace(problem, path="path") for problem in check_local_path(path)]
