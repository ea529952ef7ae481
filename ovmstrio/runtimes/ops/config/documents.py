"""The text of ``config.yml`` as located values: a file, or a dictionary, with options put over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.findings import Findings, shown
from ovmstrio.config.json_locations import Located, below
from ovmstrio.config.yaml_locations import YamlSyntaxError, parse_yaml
from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["CONFIG_VARIABLE", "NO_LINE", "conf_dict", "locate", "read_document"]

CONFIG_VARIABLE: Final = "OVMS_PIPELINE_CONFIG"
"""The environment variable that names a configuration for ``ArgsParser``."""

NO_LINE: Final = 0
"""The line of what is in no file."""


def read_document(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[Located, Findings]:
    """Read a configuration, and put options such as ``op.uci.concurrency=2`` over it; blocking where it is a file.

    Raises:
        ConfigError: the file cannot be read, is no YAML or no mapping, or an option is not of that form.
    """
    if isinstance(source, Path):
        root, findings = _read_file(source)
    else:
        root, findings = locate(source), Findings("yml_dict")
    options = [_option(text) for text in overrides]
    problems = [option for option in options if isinstance(option, Problem)]
    if problems:
        raise ConfigError(problems)
    for option in options:
        if not isinstance(option, Problem):
            root = _put(root, *option)
    return root, findings


def conf_dict(source: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Give a file with options put over it as a plain dictionary; blocking.

    Raises:
        ConfigError: as :func:`read_document`.
    """
    root, _ = read_document(source, overrides)
    plain: dict[str, Any] = root.plain()
    return plain


def locate(value: Any, path: str = "", line: int = NO_LINE) -> Located:
    """Give plain values the places that they have inside of one another, all on one line."""
    if isinstance(value, Mapping):
        return Located({key: locate(each, below(path, str(key)), line) for key, each in value.items()}, line, path)
    if isinstance(value, list | tuple):
        return Located([locate(each, f"{path}[{i}]", line) for i, each in enumerate(value)], line, path)
    return Located(value, line, path)


def _read_file(path: Path) -> tuple[Located, Findings]:
    findings = Findings(str(path))
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        way_out = "" if path.is_absolute() else f"a relative path begins in the current folder, {Path.cwd()}"
        problem = Problem(f"cannot be read: {error.strerror or error}", str(path), suggestion=way_out)
        raise ConfigError([problem]) from None
    except UnicodeDecodeError:
        raise ConfigError([Problem("the file is not UTF-8", str(path), suggestion="save it as UTF-8")]) from None
    except YamlSyntaxError as error:
        problem = Problem(error.message, str(path), error.line, suggestion=error.suggestion)
        raise ConfigError([problem]) from None
    for node in document.repeated:
        findings.refuse(node, "the key is given twice in one mapping", suggestion="remove one of them")
    root = document.root if document.root.value is not None else replace(document.root, value={})
    if not isinstance(root.value, dict):
        findings.refuse(root, "wrong type", expected="a mapping of keys to values", found=shown(root.plain()))
        raise ConfigError(findings.fatal)
    return root, findings


def _option(text: str) -> tuple[list[str], Any] | Problem:
    """Split ``k.k=v``; the value is YAML."""
    key, equals, value = text.strip().partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        return Problem("the option cannot be used", path=text, expected="key.key=value", found=text)
    try:
        return steps, parse_yaml(value).root.plain()
    except YamlSyntaxError as error:
        return Problem(f"the option's value is not YAML: {error.message}", path=key, found=value)


def _put(node: Located, steps: Sequence[str], value: Any) -> Located:
    """Put a value at a path, making mappings on the way where there are none."""
    first, *rest = steps
    members = dict(node.value) if isinstance(node.value, dict) else {}
    path = below(node.path, first)
    known = members.get(first, Located({}, NO_LINE, path))
    members[first] = _put(known, rest, value) if rest else _merge(known, locate(value, path))
    return replace(node, value=members)


def _merge(under: Located, over: Located) -> Located:
    """Put a mapping over another key by key; anything else takes the place of what was there."""
    if not isinstance(under.value, dict) or not isinstance(over.value, dict):
        return over
    members = dict(under.value)
    for key, each in over.value.items():
        members[key] = _merge(members[key], each) if key in members else each
    return replace(under, value=members)
