"""``mapping_config.json`` of a version: tensor aliases that replace the model's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ovmstrio.config.documents import Document, Findings, Located, load_document, sorted_by_line
from ovmstrio.config.schema import OPTIONAL, Schema, check_members
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.util.regular_files import read_regular_bytes

MAPPING_FILE: Final = "mapping_config.json"


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """Aliases by tensor name of the model file."""

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)


NO_MAPPING: Final = TensorMapping()


class _MappingFile(Schema):
    inputs: dict[str, str] = OPTIONAL
    outputs: dict[str, str] = OPTIONAL


def read_mapping(directory: Path) -> TensorMapping:
    """Read the mapping of a version directory; empty without a file.  Blocking.

    Raises:
        ConfigError: the file is unreadable or malformed, with all problems.
    """
    path = directory / MAPPING_FILE
    try:
        content = read_regular_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return NO_MAPPING
    except OSError as error:
        raise ConfigError([Problem(f"the mapping cannot be read: {error.strerror}", file=str(path))]) from error
    return _mapping(load_document(content, str(path)), Findings(str(path)))


def _mapping(document: Document, findings: Findings) -> TensorMapping:
    findings.refuse_repeated(document)
    good = check_members(document.root, _MappingFile, findings)
    sides = {side: node.value for side, node in good.items()}
    for side, members in sides.items():
        _refuse_shared_aliases(side, members, findings)
    if findings.fatal:
        raise ConfigError(sorted_by_line(findings.fatal))
    return TensorMapping(**{side: {name: str(node.value) for name, node in sides[side].items()} for side in sides})


def _refuse_shared_aliases(side: str, members: Mapping[str, Located], findings: Findings) -> None:
    first: dict[str, str] = {}
    for name, node in members.items():
        alias = str(node.value)
        if first.setdefault(alias, name) != name:
            message = f"duplicate alias in {side}"
            findings.refuse(
                node, message, expected=f"a name other than that of {first[alias]!r}", found=json.dumps(alias)
            )
