"""The text of ``config.yml`` as located values: a file, or a dictionary, with options put over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.documents import load_yaml
from ovmstrio.config.findings import Findings, shown
from ovmstrio.config.located import InvalidSyntax, Located, locate
from ovmstrio.config.yaml_text import parse_yaml
from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["CONFIG_VARIABLE", "conf_dict", "read_document"]

CONFIG_VARIABLE: Final = "OVMS_PIPELINE_CONFIG"
"""The environment variable that names a configuration for ``ArgsParser``."""


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
            root = _merge(root, option)
    return root, findings


def conf_dict(source: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Give a file with options put over it as a plain dictionary; blocking.

    Raises:
        ConfigError: as :func:`read_document`.
    """
    root, _ = read_document(source, overrides)
    plain: dict[str, Any] = root.plain()
    return plain


def _read_file(path: Path) -> tuple[Located, Findings]:
    findings, document = Findings(str(path)), load_yaml(path, "")
    findings.refuse_repeated(document, " in one mapping")
    root = document.root if document.root.value is not None else replace(document.root, value={})
    if not isinstance(root.value, dict):
        findings.refuse(root, "wrong type", expected="a mapping of keys to values", found=shown(root.plain()))
        raise ConfigError(findings.fatal)
    return root, findings


def _option(text: str) -> Located | Problem:
    """Read ``k.k=v`` as the mappings that it stands for; the value is YAML."""
    key, equals, value = text.strip().partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        return Problem("the option cannot be used", path=text, expected="key.key=value", found=text)
    try:
        plain = parse_yaml(value).root.plain()
    except InvalidSyntax as error:
        return Problem(f"the option's value is not YAML: {error.message}", path=key, found=value)
    for step in reversed(steps):
        plain = {step: plain}
    return locate(plain)


def _merge(under: Located, over: Located) -> Located:
    """Put a mapping over another key by key; anything else takes the place of what was there."""
    if not isinstance(under.value, dict) or not isinstance(over.value, dict):
        return over
    members = dict(under.value)
    for key, each in over.value.items():
        members[key] = _merge(members[key], each) if key in members else each
    return replace(under, value=members)
