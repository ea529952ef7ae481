"""The section ``models``, which Python projects call ``multi_model_reloading``: where models lie, and how many stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from ovmstrio.runtimes.handlers.config.sections import Section, is_folder, local_path
from ovmstrio.runtimes.handlers.config.specs import DEFAULT_MODEL, ModelEntry, ModelsSpec

__all__ = ["find_models_section", "read_models"]

_KEYS: Final = (
    "path",
    "paths",
    "dir",
    "signature_key",
    "cache_size",
    "disk_cache_size",
    "latest_versions",
    "reload_interval_seconds",
)
_ENTRY_KEYS: Final = ("name", "path", "signature_key")
_ALTERNATIVES: Final = _KEYS[:3]
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
        top.findings.warn(top.node.find("models"), message, f"write {proper!r}")
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
    section.warn_unknown(_KEYS)
    fields: dict[str, Any] = {"section": key, "signature_key": _signature_key(section, project_type)}
    fields |= _cache_sizes(section)
    fields["latest_versions"] = section.whole("latest_versions", 1)
    interval = section.seconds("reload_interval_seconds")
    fields |= {} if interval is None else {"reload_interval_seconds": interval}
    given = [each for each in _ALTERNATIVES if each in section.members]
    for kind in given:
        fields |= {"kind": kind} | _READERS[kind](section, directory, project_type, fields["signature_key"])
    if len(given) != 1:
        found = f"found {' and '.join(map(repr, given))}" if given else "found none"
        top.refuse(key, f"one of 'path', 'paths' and 'dir' must be given, {found}")
    if "path" in given and fields["cache_size"]:
        section.refuse("cache_size", "models are cached where there are many", suggestion="use 'paths' or 'dir'")
    return ModelsSpec(**fields) if len(section.findings.fatal) == before else None


def _cache_sizes(section: Section) -> Mapping[str, int | None]:
    sizes = {key: section.whole(key, 1) for key in ("cache_size", "disk_cache_size")}
    given = [key for key in sizes if key in section.members]
    if len(given) == 1:
        (other,) = sizes.keys() - given
        section.refuse(given[0], f"the key needs {other!r} beside it", suggestion=f"add {other!r}, or remove this")
    memory, disk = sizes["cache_size"], sizes["disk_cache_size"]
    if memory and disk and memory > disk:
        expected = f"{disk} or less, which is 'disk_cache_size'"
        section.refuse("cache_size", "more models cannot be in memory than on disk", expected=expected)
    return sizes


def _signature_key(section: Section, project_type: str | None) -> str | None:
    key = section.text("signature_key")
    if key is not None and project_type == "python":
        section.findings.warn(section.node.find("signature_key"), "only the type tensorflow has signatures")
    return key


def _read_path(section: Section, directory: Path, _type: str | None, signature: str | None) -> dict[str, Any]:
    path = _location(section, "path", directory)
    return {"entries": (ModelEntry(name=DEFAULT_MODEL, path=path, signature_key=signature),)} if path else {}


def _read_dir(section: Section, directory: Path, _type: str | None, _signature: str | None) -> dict[str, Any]:
    return {"dir": _location(section, "dir", directory) or ""}


def _read_paths(section: Section, directory: Path, project_type: str | None, signature: str | None) -> dict[str, Any]:
    items = section.items("paths")
    if items == []:
        section.refuse("paths", "the list is empty", suggestion="add a model, with its name and path")
    entries: dict[str, ModelEntry] = {}
    for item in items or []:
        item.warn_unknown(_ENTRY_KEYS, ("name", "path") if isinstance(item.node.value, dict) else ())
        name, path = _name(item, entries), _location(item, "path", directory)
        own = _signature_key(item, project_type)
        if name and path:
            entries[name] = ModelEntry(name=name, path=path, signature_key=own or signature)
    return {"entries": tuple(entries.values())}


_READERS: Final = {"path": _read_path, "paths": _read_paths, "dir": _read_dir}


def _name(item: Section, taken: Mapping[str, ModelEntry]) -> str | None:
    name = item.text("name")
    if name is None:
        return None
    if "/" in name or name in {".", ".."}:
        item.refuse("name", "the name cannot be used", expected="a name without '/'")
    elif name in taken:
        item.refuse("name", f"the name {name!r} is another model's", expected="a name of its own")
    return name


def _location(section: Section, key: str, directory: Path) -> str | None:
    """Read where something lies: a URL as it is written, or a path, which leads on from the project's folder."""
    text = section.text(key)
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
        section.findings.warn(
            section.node.find(key), f"{path} is no folder now", "models are served once they are there"
        )
