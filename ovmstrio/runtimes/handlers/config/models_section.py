"""The section ``models``, which Python projects call ``multi_model_reloading``: where models lie, and how many stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from ovmstrio.config.sections import Rules, Section, any_spelling, number, rules_of, whole, written
from ovmstrio.runtimes.handlers.config.project_spec import DEFAULT_MODEL, ModelEntry, ModelsSpec, is_folder, local_path

__all__ = ["find_models_section", "read_models"]

_ALTERNATIVES: Final = ("path", "paths", "dir")
_KEYS: Final[Rules] = {
    "path": written,
    "paths": None,
    "dir": written,
    "signature_key": written,
    "cache_size": any_spelling(whole(1)),
    "disk_cache_size": any_spelling(whole(1)),
    "latest_versions": any_spelling(whole(1)),
    "reload_interval_seconds": any_spelling(number(0, "a number of seconds")),
    "storage_timeout_seconds": any_spelling(number(0, "a number of seconds")),
}
_CACHES: Final = ("cache_size", "disk_cache_size")
_OF_TYPE: Final = {"tensorflow": "models", "python": "multi_model_reloading"}
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKETS: Final = ("s3", "s3a", "gs", "gcs", "az", "abfs")
_WHERE: Final = "a folder, or a URL such as s3://bucket/folder"


def find_models_section(top: Section, project_type: str | None) -> str | None:
    """Tell under which key a project has its models; gives None if it has none, or they cannot be used.

    ``models`` is the key of the TensorFlow type, and another way to write ``multi_model_reloading`` for Python.
    """
    given = [key for key in _OF_TYPE.values() if key in top.members]
    if project_type is None:
        return given[0] if given else None
    proper = _OF_TYPE[project_type]
    if project_type == "tensorflow":
        if "multi_model_reloading" in given:
            top.refuse("multi_model_reloading", "the key is for the type python", suggestion="write 'models'")
        elif not given:
            top.refuse("models", "the type tensorflow needs the key 'models'", suggestion="say where its models are")
    elif len(given) > 1:
        top.refuse("models", "for the type python this is the same as 'multi_model_reloading', which is there too")
    elif "models" in given:
        message = "for the type python this key is deprecated"
        top.warn("models", message, f"write {proper!r}")
        return "models"
    return proper if proper in given else None


def read_models(top: Section, key: str, directory: Path, project_type: str | None) -> ModelsSpec | None:
    """Read the section ``key``; gives None if something is wrong with it, which is noted.

    Args:
        top: what has the section.
        key: its name.
        directory: where relative paths lead on from.
        project_type: of the project, as far as it is known.
    """
    section = top.section(key)
    if section is None:
        return None
    before = len(section.findings.fatal)
    fields = {"section": key, **section.read(_KEYS)}
    _warn_signature(section, fields, project_type)
    _check_caches(section, fields)
    given = [each for each in _ALTERNATIVES if each in section.members]
    path, folder = (_location(section, each, fields.pop(each, None), directory) for each in ("path", "dir"))
    if path:
        fields["entries"] = (ModelEntry(name=DEFAULT_MODEL, path=path, signature_key=fields.get("signature_key")),)
    elif folder:
        fields["dir"] = folder
    if "paths" in given:
        fields["entries"] = _entries(section, directory, project_type, fields.get("signature_key"))
    if len(given) != 1:
        found = f"found {' and '.join(map(repr, given))}" if given else "found none"
        top.refuse(key, f"one of 'path', 'paths' and 'dir' must be given, {found}")
    if "path" in given and "cache_size" in fields:
        section.refuse("cache_size", "models are cached where there are many", suggestion="use 'paths' or 'dir'")
    return ModelsSpec(kind=given[0], **fields) if len(section.findings.fatal) == before else None


def _check_caches(section: Section, sizes: Mapping[str, Any]) -> None:
    given = [key for key in _CACHES if key in section.members]
    if len(given) == 1:
        (other,) = {*_CACHES} - {*given}
        section.refuse(given[0], f"the key needs {other!r} beside it", suggestion=f"add {other!r}, or remove this")
    memory, disk = (sizes.get(key) for key in _CACHES)
    if memory and disk and memory > disk:
        expected = f"{disk} or less, which is 'disk_cache_size'"
        section.refuse("cache_size", "more models cannot be in memory than on disk", expected=expected)


def _warn_signature(section: Section, given: Mapping[str, Any], project_type: str | None) -> None:
    if "signature_key" in given and project_type == "python":
        section.warn("signature_key", "only the type tensorflow has signatures")


def _entries(
    section: Section, directory: Path, project_type: str | None, signature: str | None
) -> tuple[ModelEntry, ...]:
    items = section.sections("paths")
    if section.members["paths"].value == []:
        section.refuse("paths", "the list is empty", suggestion="add a model, with its name and path")
    entries: dict[str, ModelEntry] = {}
    for item in items or []:
        given = item.read(rules_of(ModelEntry), required=("name", "path"))
        _warn_signature(item, given, project_type)
        name, path = given.get("name"), _location(item, "path", given.get("path"), directory)
        _check_name(item, name, entries)
        if name and path:
            entries[name] = ModelEntry(name=name, path=path, signature_key=given.get("signature_key", signature))
    return tuple(entries.values())


def _check_name(item: Section, name: str | None, taken: Mapping[str, ModelEntry]) -> None:
    if name is not None and ("/" in name or name in {".", ".."}):
        item.refuse("name", "the name cannot be used", expected="a name without '/'")
    elif name in taken:
        item.refuse("name", f"the name {name!r} is another model's", expected="a name of its own")


def _location(section: Section, key: str, text: str | None, directory: Path) -> str | None:
    """Give where something lies: a URL as it is written, or a path, which leads on from the project's folder."""
    if text is None:
        return None
    url = _URL.fullmatch(text)
    if url is None:
        path = local_path(directory, text)
        _warn_absent(section, key, path)
        return str(path)
    scheme, rest = url[1].lower(), url[2]
    bucket, _, prefix = rest.partition("/")
    if scheme in _BUCKETS and not (bucket and prefix.strip("/")):
        section.refuse(key, "a bucket and a folder in it are needed", expected=f"{scheme}://bucket/folder")
    elif not rest.strip("/"):
        section.refuse(key, "the URL names no folder", expected=_WHERE)
    elif scheme == "file":
        _warn_absent(section, key, Path(unquote(urlsplit(text).path)))
    return text


def _warn_absent(section: Section, key: str, path: Path) -> None:
    if not is_folder(path):
        section.warn(key, f"{path} is no folder now", "models are served once they are there")
