"""Imports, docstrings and comments of a source file."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Docstring(NamedTuple):
    line: int
    text: str
    is_function: bool
    is_property: bool


class SourceFacts(NamedTuple):
    imports: list[ast.Import | ast.ImportFrom]
    docstrings: list[Docstring]


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


@cache
def source_facts(path: Path) -> SourceFacts:
    """Parse a file once per process; imports inside functions and for types are included."""
    facts = SourceFacts([], [])
    for node in _statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            facts.imports.append(node)
        elif isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)) is not None:
            decorators = node.decorator_list if isinstance(node, Function) else []
            is_property = any("property" in ast.unparse(each) for each in decorators)
            line = getattr(node, "lineno", 1)
            facts.docstrings.append(Docstring(line, text, isinstance(node, Function), is_property))
    return facts


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and all its statements; those that hold others are visited, expressions are not."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, field, ())
