"""YAML documents with source positions; apart from other documents, because worker programs have no PyYAML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from ovmstrio.config.documents import MAX_DEPTH, Document, InvalidSyntax, Located, member_path
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.util.regular_files import read_regular_bytes

_MERGE: Final = "tag:yaml.org,2002:merge"
_CONTAINER_TAGS: Final = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MAX_VALUES: Final = 100_000


def parse_yaml(text: str) -> Document:
    """Parse a YAML text; an empty text is null.

    Raises:
        InvalidSyntax: not YAML, unknown tags, or too large.
    """
    try:
        return _parse(yaml.SafeLoader(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        suggestion = "indent with spaces" if "'\\t'" in str(error.problem) else ""
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise InvalidSyntax(message, mark.line + 1 if mark else None, suggestion) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidSyntax(f"the character {error.character:#x} is not allowed", line) from None
    except RecursionError:
        raise InvalidSyntax(f"more than {MAX_DEPTH} levels of nesting", None) from None


def _parse(loader: yaml.SafeLoader) -> Document:
    node = loader.get_single_node()
    if node is None:
        return Document(Located(None, 1, ""))
    reader = _YamlReader(loader)
    return Document(reader.read(node, "", _yaml_line(node)), tuple(reader.repeated))


@dataclass(slots=True)
class _YamlReader:
    """Converter of YAML nodes; counts values, so that nested aliases cannot explode."""

    loader: yaml.SafeLoader
    repeated: list[Located] = field(default_factory=list)
    _values: int = 0

    def read(self, node: yaml.Node, path: str, line: int, depth: int = 0) -> Located:
        self._count(node, depth)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _CONTAINER_TAGS:
            raise InvalidSyntax(f"unknown tag {node.tag!r}", _yaml_line(node), "remove it")
        if isinstance(node, yaml.MappingNode):
            return Located(self._members(node, path, depth), line, path)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return Located(
                [self.read(each, f"{path}[{i}]", _yaml_line(each), depth + 1) for i, each in items], line, path
            )
        return Located(self._scalar(node), line, path, node.value)

    def _count(self, node: yaml.Node, depth: int) -> None:
        self._values += 1
        if depth > MAX_DEPTH:
            raise InvalidSyntax(f"more than {MAX_DEPTH} levels of nesting", _yaml_line(node))
        if self._values > _MAX_VALUES:
            raise InvalidSyntax(f"more than {_MAX_VALUES} values, aliases counted each time", _yaml_line(node))

    def _members(self, node: yaml.MappingNode, path: str, depth: int) -> dict[Any, Located]:
        members: dict[Any, Located] = {}
        merged: list[yaml.MappingNode] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged += _merged(value_node)
                continue
            key = self._key(key_node)
            member = self.read(value_node, member_path(path, str(key)), _yaml_line(key_node), depth + 1)
            if key in members:
                self.repeated.append(member)
            members.setdefault(key, member)
        for mapping in merged:
            self._count(mapping, depth + 1)
            for key, member in self._members(mapping, path, depth + 1).items():
                members.setdefault(key, member)
        return members

    def _key(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise InvalidSyntax("a key is a list or a mapping", _yaml_line(node), "write a text")
        key = self._scalar(node)
        return key if isinstance(key, str | int | float | None) else node.value

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self.loader.construct_object(node)
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError:
            raise InvalidSyntax("incomplete surrogate escape", _yaml_line(node), "write the character") from None
        except ValueError as error:  # such as the date 2020-13-45
            raise InvalidSyntax(
                f"invalid value {node.value!r}: {error}", _yaml_line(node), "put it in quotes"
            ) from None
        except (AttributeError, LookupError):  # PyYAML, of a scalar that does not fit its tag, such as !!bool maybe
            raise InvalidSyntax(
                f"invalid value {node.value!r} for its tag", _yaml_line(node), "remove the tag"
            ) from None
        return value


def _merged(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    """Yield the mappings of a merge key ``<<``; earlier ones have precedence."""
    for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if not isinstance(each, yaml.MappingNode):
            raise InvalidSyntax("only a mapping, or a list of them, can be merged", _yaml_line(each))
        yield each


def _yaml_line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def load_yaml(file: Path, subject: str = "the file ") -> Document:
    """Parse a YAML file; blocking.  ``subject`` starts the message for an unreadable file.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or not usable YAML.
    """
    try:
        return parse_yaml(read_regular_bytes(file).decode("utf-8-sig"))
    except OSError as error:
        suggestion = "" if file.is_absolute() else f"relative to the current directory, {Path.cwd()}"
        problem = Problem(f"{subject}cannot be read: {error.strerror or error}", str(file), suggestion=suggestion)
    except UnicodeDecodeError as error:
        message = f"the file is not UTF-8: {error.reason} at byte {error.start}"
        problem = Problem(message, str(file), suggestion="save it as UTF-8")
    except InvalidSyntax as error:
        message = f"the file is not usable YAML: {error.message}"
        problem = Problem(message, str(file), error.line, suggestion=error.suggestion)
    raise ConfigError([problem])
