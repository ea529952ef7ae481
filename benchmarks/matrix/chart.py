"""Chart of a run: one tile per cell, coloured by the server's rate relative to OpenVINO alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

from benchmarks.matrix.cells import CONCURRENCIES, HINTS, INTERFACES, SIZES, Cell, ModelCase

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["chart"]

_TILE_WIDTH, _TILE_HEIGHT, _GAP = 42, 20, 14
_LEFT, _TOP, _PANEL_HEAD = 120, 44, 46
_COLUMNS: Final = [(interface, concurrency) for interface in INTERFACES for concurrency in CONCURRENCIES]
_ROWS: Final = [(size, is_dynamic) for size in SIZES for is_dynamic in (False, True)]
_PANELS: Final = [(hint, neighbours) for hint in HINTS for neighbours in (0, 4)]
_PANEL_HEIGHT: Final = _PANEL_HEAD + len(_ROWS) * _TILE_HEIGHT + _GAP


def chart(cells: dict[str, dict[str, Any]]) -> str:
    """Draw a run as SVG, with a panel for each measured hint, alone and with four other models."""
    panels = [panel for panel in _PANELS if any(name in cells for name in _names(panel))]
    width = _LEFT + len(_COLUMNS) * _TILE_WIDTH + (len(INTERFACES) - 1) * _GAP + 20
    height = _TOP + len(panels) * _PANEL_HEIGHT
    body = [_text(10, 24, "Calls a second, as a part of what OpenVINO alone does in the same minute", size=15)]
    for number, panel in enumerate(panels):
        body += _panel(panel, _TOP + number * _PANEL_HEIGHT, cells)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *body, "</svg>\n"])


def _names(panel: tuple[Any, int]) -> Iterator[str]:
    for row in _ROWS:
        for column in _COLUMNS:
            yield _name(panel, row, column)


def _name(panel: tuple[Any, int], row: tuple[str, bool], column: tuple[Any, int]) -> str:
    return str(Cell(ModelCase(*row, *panel), *column))


def _panel(panel: tuple[Any, int], top: float, cells: dict[str, dict[str, Any]]) -> Iterator[str]:
    hint, neighbours = panel
    label = "with four other models" if neighbours else "alone"
    yield _text(10, top + 14, f"{'no hint' if hint == 'default' else hint}, {label}", size=13)
    for number, (interface, concurrency) in enumerate(_COLUMNS):
        if concurrency == CONCURRENCIES[0]:
            yield _text(_x(number), top + 28, interface, size=11)
        yield _text(_x(number) + 14, top + 41, str(concurrency), size=10)
    for line, (size, is_dynamic) in enumerate(_ROWS):
        y = top + _PANEL_HEAD + line * _TILE_HEIGHT
        yield _text(10, y + 14, f"{size}, {'dynamic' if is_dynamic else 'fixed'}", size=11)
        for number, column in enumerate(_COLUMNS):
            cell = cells.get(_name(panel, (size, is_dynamic), column))
            if cell is not None:
                yield _tile(_x(number), y, cell["ratio"])


def _x(column: int) -> float:
    return _LEFT + column * _TILE_WIDTH + column // len(CONCURRENCIES) * _GAP


def _tile(x: float, y: float, ratio: float) -> str:
    """Draw a cell, from red for zero over yellow to green for the rate of OpenVINO alone."""
    colour = f"hsl({min(ratio, 1) * 120:.0f},60%,70%)"
    tile = f'<rect x="{x}" y="{y}" width="{_TILE_WIDTH - 1}" height="{_TILE_HEIGHT - 1}" fill="{colour}"/>'
    return tile + _text(x + 8, y + 14, f"{ratio:.2f}", size=11)


def _text(x: float, y: float, text: str, *, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="#222222">{escape(text)}</text>'
