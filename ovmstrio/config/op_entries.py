"""The entries of an ``op_pipeline_config_list``, each of which names the ``config.yml`` of a pipeline of Ops.

Only the form of an entry is checked here; the files that it names are read when the pipeline is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import OPTIONAL, Schema, check_members, is_whole
from ovmstrio.config.located import Located
from ovmstrio.config.model_options import check_local_path
from ovmstrio.config.mounted_names import check_mounted_name
from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import Problem

__all__ = ["OP_PIPELINES", "read_op_pipelines"]

OP_PIPELINES: Final = "op_pipeline_config_list"
_SUFFIXES: Final = (".yml", ".yaml")
_CONFIG: Final = "config.yml"
_SCRIPT: Final = "web_service.py"


class _Entry(Schema):
    name: str
    path: str
    service: str = OPTIONAL


def read_op_pipelines(file: ConfigFile) -> list[OpPipelineSpec]:
    """Read entries in their order; of two with one name the first counts."""
    found = [_read_entry(entry, file) for entry in file.items(OP_PIPELINES)]
    return [spec for spec in found if spec is not None]


def _read_entry(entry: Located, file: ConfigFile) -> OpPipelineSpec | None:
    members = check_members(entry, _Entry, file.findings)
    if not is_whole(entry, members, _Entry) or not file.is_first(OpPipelineSpec.kind, entry, members["name"]):
        return None
    given: dict[str, Any] = {key: member.value for key, member in members.items()}
    place = file.place(entry)
    whole = file.directory / given["path"]
    config = whole if whole.suffix in _SUFFIXES else whole / _CONFIG
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
