"""YAML with the place of every value, so that a complaint about a project can name its line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from ovmstrio.config.located import Document, InvalidSyntax, Located, below

__all__ = ["parse_yaml"]

_MERGE: Final = "tag:yaml.org,2002:merge"
_PLAIN: Final = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MAX_DEPTH: Final = 100
_MAX_VALUES: Final = 100_000


def parse_yaml(text: str) -> Document:
    """Parse a whole text; an empty one is a null.

    Raises:
        InvalidSyntax: it is not YAML, holds tags of Python or others, or is too large to be a configuration.
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
        raise InvalidSyntax(f"more than {_MAX_DEPTH} levels of nesting", None) from None


def _parse(loader: yaml.SafeLoader) -> Document:
    node = loader.get_single_node()
    if node is None:
        return Document(Located(None, 1, ""))
    reader = _YamlReader(loader)
    return Document(reader.read(node, "", _line(node)), tuple(reader.repeated))


@dataclass(slots=True)
class _YamlReader:
    """Turns nodes into values, which are counted so that aliases of aliases come to an end."""

    loader: yaml.SafeLoader
    repeated: list[Located] = field(default_factory=list)
    _values: int = 0

    def read(self, node: yaml.Node, path: str, line: int, depth: int = 0) -> Located:
        self._values += 1
        if depth > _MAX_DEPTH:
            raise InvalidSyntax(f"more than {_MAX_DEPTH} levels of nesting", _line(node))
        if self._values > _MAX_VALUES:
            raise InvalidSyntax(f"more than {_MAX_VALUES} values, aliases counted each time", _line(node))
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
            raise InvalidSyntax(f"the tag {node.tag!r} is not known", _line(node), "remove it")
        if isinstance(node, yaml.MappingNode):
            return Located(self._members(node, path, depth), line, path)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return Located([self.read(each, f"{path}[{i}]", _line(each), depth + 1) for i, each in items], line, path)
        return Located(self._scalar(node), line, path, node.value)

    def _members(self, node: yaml.MappingNode, path: str, depth: int) -> dict[Any, Located]:
        members: dict[Any, Located] = {}
        merged: list[yaml.MappingNode] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged += _merged(value_node)
                continue
            key = self._key(key_node)
            member = self.read(value_node, below(path, str(key)), _line(key_node), depth + 1)
            if key in members:
                self.repeated.append(member)
            members.setdefault(key, member)
        for mapping in merged:
            for key, member in self._members(mapping, path, depth + 1).items():
                members.setdefault(key, member)
        return members

    def _key(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise InvalidSyntax("a key is a list or a mapping", _line(node), "write a text")
        key = self._scalar(node)
        return key if isinstance(key, str | int | float | None) else node.value

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self.loader.construct_object(node)
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError:
            raise InvalidSyntax("an escape is half of a character", _line(node), "write the character") from None
        except ValueError as error:  # such as the date 2020-13-45
            raise InvalidSyntax(f"{node.value!r} is no such value: {error}", _line(node), "put it in quotes") from None
        return value


def _merged(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    """Give the mappings that a key ``<<`` merges, the first of which counts most."""
    for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if not isinstance(each, yaml.MappingNode):
            raise InvalidSyntax("only a mapping, or a list of them, can be merged", _line(each))
        yield each


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1
