"""Files as located values, and objects of JSON against their schemas, which are pydantic models."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from ovmstrio.config.findings import Findings, shown, suggest_key
from ovmstrio.config.json_text import parse_json
from ovmstrio.config.located import Document, InvalidSyntax, Located
from ovmstrio.config.yaml_text import parse_yaml
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.util.regular_files import read_regular_bytes

__all__ = ["OPTIONAL", "Schema", "check_members", "expected_by", "is_whole", "items_of", "load_document", "load_yaml"]

OPTIONAL: Final[Any] = None
"""The default of a key that may be missing; schemas only check, so that nobody reads it."""

_EXPECTED: Final = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "float_parsing": "a number",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "path_type": "a path",
    "string_type": "a string",
    "string_too_short": "a text that is not empty",
}


class Schema(BaseModel):
    """An object of a document: no other keys than its fields, no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    hints: ClassVar[Mapping[str, str]] = {}
    """What to do about keys that a schema does not have, where that is known."""


def load_document(content: bytes, file: str) -> Document:
    """Parse a file's content.

    Raises:
        ConfigError: it is not UTF-8 or not JSON; the problem's message begins as OVMS's does.
    """
    try:
        return parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = Problem("The file is not valid json - it is not UTF-8", file, line, found=f"byte {error.start}")
        raise ConfigError([problem]) from None
    except InvalidSyntax as error:
        message = f"The file is not valid json - {error.message}"
        raise ConfigError([Problem(message, file, error.line, suggestion=error.suggestion)]) from None


def load_yaml(file: Path, subject: str = "the file ") -> Document:
    """Parse a file; blocking.  ``subject`` begins the message of one that cannot be read.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, or is not usable YAML.
    """
    try:
        return parse_yaml(read_regular_bytes(file).decode("utf-8-sig"))
    except OSError as error:
        way_out = "" if file.is_absolute() else f"a relative path begins in the current folder, {Path.cwd()}"
        problem = Problem(f"{subject}cannot be read: {error.strerror or error}", str(file), suggestion=way_out)
    except UnicodeDecodeError as error:
        message = f"the file is not UTF-8: {error.reason} at byte {error.start}"
        problem = Problem(message, str(file), suggestion="save it as UTF-8")
    except InvalidSyntax as error:
        message = f"the file is not usable YAML: {error.message}"
        problem = Problem(message, str(file), error.line, suggestion=error.suggestion)
    raise ConfigError([problem])


def check_members(node: Located, schema: type[Schema], findings: Findings) -> dict[str, Located]:
    """Check an object's keys and the types of its members; gives the members in which nothing was found wrong.

    Every violation makes the file unusable.  Members of deeper objects are another schema's business.
    """
    if not isinstance(node.value, dict):
        findings.refuse(node, "wrong type", expected="an object", found=shown(node.plain()))
        return {}
    try:
        schema.model_validate(node.plain())
    except ValidationError as error:
        bad = _report(node, schema, error.errors(include_url=False), findings)
    else:
        bad = set()
    return {key: member for key, member in node.value.items() if key not in bad}


def is_whole(node: Located, members: Mapping[str, Located], schema: type[Schema]) -> bool:
    """Tell whether nothing was found wrong in an object of which :func:`check_members` gave the members."""
    required = {key for key, field in schema.model_fields.items() if field.is_required()}
    return isinstance(node.value, dict) and members.keys() == node.value.keys() and members.keys() >= required


def items_of(members: Mapping[str, Located], key: str) -> list[Located]:
    """Give the items of a list that may be missing, or have been found wrong."""
    return members[key].value if key in members else []


def expected_by(error: ErrorDetails) -> str:
    """Say in words what a value should have been."""
    if error["type"] in _EXPECTED:
        return _EXPECTED[error["type"]]
    bounds = error.get("ctx", {})
    if "ge" in bounds:
        return f"{bounds['ge']} or more"
    if "le" in bounds:
        return f"{bounds['le']} or less"
    return error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _report(node: Located, schema: type[Schema], errors: list[ErrorDetails], findings: Findings) -> set[str]:
    # What it shares with others is named behind its own.
    known = sorted(schema.model_fields, key=lambda name: name not in schema.__annotations__)
    unknown = [str(error["loc"][0]) for error in errors if error["type"] == "extra_forbidden"]
    for key in unknown:
        suggestion = schema.hints.get(key) or suggest_key(key, known)
        findings.refuse(node.find(key), f"unknown key {key!r}", suggestion=suggestion)
    wrong_types: dict[str, tuple[Located, list[str]]] = {}
    for error in errors:
        key = str(error["loc"][0])
        if error["type"] == "missing":
            # One misspelt key is one mistake, not two.
            if not get_close_matches(key, unknown):
                findings.refuse(node, f"the key {key!r} is missing", suggestion="add it")
        elif error["type"] != "extra_forbidden":
            place = _deepest(node, error["loc"])
            wrong_types.setdefault(place.path, (place, []))[1].append(expected_by(error))
    for path, (place, expected) in wrong_types.items():
        # Of a union, the members that do not fit at all complain as well; what lies deepest is what was meant.
        if not any(other.startswith((f"{path}.", f"{path}[")) for other in wrong_types):
            words = " or ".join(dict.fromkeys(expected))
            findings.refuse(place, "wrong type or value", expected=words, found=shown(place.plain()))
    return {str(error["loc"][0]) for error in errors}


def _deepest(node: Located, location: tuple[int | str, ...]) -> Located:
    """Follow a location of pydantic, in which names of union members stand between the keys."""
    for step in location:
        node = node.find(step)
    return node
