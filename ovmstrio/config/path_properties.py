"""Properties of OpenVINO that name files or folders, which only the server's own configuration may set.

A client that could set ``CACHE_DIR`` would write anywhere.  The rule goes by the words of a name and by the form of a
value, as plugins of other devices and later releases of OpenVINO have further properties of this sort.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from ovmstrio.core.errors import Problem

__all__ = ["refuse_paths"]

_NAME: Final = re.compile(r"[A-Za-z0-9_.]+")
_IGNORED: Final = re.compile(r"[\s\"']+")
_WORDS: Final = frozenset({"DIR", "DIRS", "DIRECTORY", "FILE", "FILES", "FOLDER", "LIBRARY", "URI", "URL", "LOCATION"})
_ENDINGS: Final = ("DIR", "PATH", "PATHS", "FILENAME", "FOLDER")
_PARTS: Final = ("DUMP", "BLOB")
_OTHERS: Final = ("NPUW_PLAN", "COMPILATION_MODE_PARAMS", "COMPILATION_PARAMS")
"""``NPUW_PLAN`` names a file; the others hold options of a compiler, some of which do."""


def refuse_paths(properties: Mapping[str, str]) -> list[Problem]:
    """Find properties that name files or folders, also those of devices within a value (``DEVICE_PROPERTIES``).

    Args:
        properties: ``plugin_config`` of a request.
    """
    problems = []
    for key, value in properties.items():
        text = _IGNORED.sub("", f"{key}:{value}")
        named = next((name for name in _names(text) if _names_path(name)), "")
        if named or re.search(r"[/\\]", text):
            name = named or _IGNORED.sub("", key)
            problems.append(
                Problem(
                    f"the property {name} names a path" if named else f"the value of the property {name} has a path",
                    path=f"config.plugin_config.{key}",
                    suggestion="only the server's own configuration may set it",
                )
            )
    return problems


def _names(text: str) -> Iterator[str]:
    return (match[0].upper() for match in _NAME.finditer(text))


def _names_path(name: str) -> bool:
    if name.endswith(_OTHERS):
        return True
    words = re.split(r"[_.]", name)
    return any(word in _WORDS or word.endswith(_ENDINGS) or any(part in word for part in _PARTS) for word in words)
