"""The entries of a ``handler_config_list``, each of which names a project with a ``nucleus.yaml``.

Only the form of an entry is checked here; the project's own file is read when it is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import Schema, check_members, is_whole
from ovmstrio.config.located import Located
from ovmstrio.config.model_options import check_local_path
from ovmstrio.config.mounted_names import check_mounted_name
from ovmstrio.config.specs import HandlerSpec
from ovmstrio.core.errors import Problem

__all__ = ["HANDLERS", "read_handlers"]

HANDLERS: Final = "handler_config_list"
_SUFFIXES: Final = (".yaml", ".yml")


class _Entry(Schema):
    name: str
    path: str


def read_handlers(file: ConfigFile) -> list[HandlerSpec]:
    """Read entries in their order; of two with one name the first counts."""
    found = [_read_entry(entry, file) for entry in file.items(HANDLERS)]
    return [spec for spec in found if spec is not None]


def _read_entry(entry: Located, file: ConfigFile) -> HandlerSpec | None:
    members = check_members(entry, _Entry, file.findings)
    if not is_whole(entry, members, _Entry) or not file.is_first(HandlerSpec.kind, entry, members["name"]):
        return None
    name, path = members["name"].value, members["path"].value
    place = file.place(entry)
    whole = file.directory / path
    return HandlerSpec(
        name=name,
        base_path=whole.parent if whole.suffix in _SUFFIXES else whole,
        path=whole,
        origin=file.origin(entry),
        problems=tuple(place.of(problem) for problem in (*check_mounted_name(name), *_check_path(path))),
        place=place,
    )


def _check_path(path: str) -> list[Problem]:
    if not path:
        expected = "the folder with a nucleus.yaml, or that file"
        return [Problem("the path is empty", path="path", expected=expected, found='""')]
    return [replace(problem, path="path") for problem in check_local_path(path)]
