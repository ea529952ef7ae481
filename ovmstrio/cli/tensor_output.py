"""Outputs as a table for people, JSON for programs, or arrays in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zipfile import ZipFile

import numpy as np
import typer

from ovmstrio.cli.console import data_table, stderr
from ovmstrio.cli.problems import safe
from ovmstrio.cli.tables import Output, print_csv, print_table
from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ovmstrio.core.tensor import Array

FORMS: Final = tuple(Output)
"""Formats of printed outputs."""
FILES: Final = (".npy", ".npz", ".json")
"""Suffixes of output files."""

_NOT_NUMBERS: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_SHOWN: Final = 8
_TOP: Final = 5
_TOP_FROM: Final = 20
"""Minimum number of scores for which the highest are shown instead of the first."""


def check_target(target: str) -> None:
    """Check a target before any call.

    Raises:
        InvalidRequest: the target is neither a format nor a file with a known suffix.
    """
    if target not in FORMS and Path(target).suffix not in FILES:
        raise InvalidRequest(f"--output: expected a file ending in .npy, .npz or .json, got {target!r}")


def write_outputs(outputs: Mapping[str, Array], target: str) -> None:
    """Show or save outputs.

    Raises:
        InvalidRequest: a file of this type cannot hold the outputs.
        OSError: the file cannot be written.
    """
    if target == "table":
        _print_table(outputs)
        return
    if target == "json":
        # rich takes minutes to print a million numbers.
        typer.echo(json.dumps(as_json(outputs)))
        return
    if target == "csv":
        print_csv(_rows(outputs))
        return
    path = Path(target)
    if path.suffix == ".npz":
        _save_all(path, {name: _savable(array) for name, array in outputs.items()})
    elif path.suffix == ".json":
        path.write_text(json.dumps(as_json(outputs)))
    else:
        if len(outputs) != 1:
            raise InvalidRequest(f"{path}: the model returned {', '.join(outputs)}; save several outputs as .npz")
        np.save(path, _savable(next(iter(outputs.values()))))
    stderr().print(f"saved {path}", highlight=False)


def _rows(outputs: Mapping[str, Array]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each value: its output, its index and the value."""
    yield "output", "index", "value"
    for name, array in outputs.items():
        for index, value in zip(np.ndindex(array.shape), plain(array.reshape(-1)), strict=True):
            yield name, " ".join(map(str, index)), value


def _save_all(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz file; ``numpy.savez`` takes arrays as arguments, and an output may have the name of another."""
    with ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _savable(array: Array) -> Array:
    if not array.dtype.hasobject:
        return array
    if any(element.endswith(b"\0") for element in array.flat):
        raise InvalidRequest("an output has BYTES that end in zeros, which numpy files cannot store; save it as .json")
    return array.astype("S")


def as_json(outputs: Mapping[str, Array]) -> dict[str, Any]:
    """Return nested lists by output name.

    Invalid UTF-8 in BYTES is replaced. NaN and infinities become texts, because JSON has no numbers for them.
    """
    return {name: plain(array) for name, array in outputs.items()}


def plain(array: Array) -> Any:
    """Convert an array for JSON."""
    if array.dtype.hasobject:
        decoded = [element.decode(errors="replace") for element in array.flat]
        return np.array(decoded, object).reshape(array.shape).tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        named = [_NOT_NUMBERS.get(str(value), value) for value in array.reshape(-1).tolist()]
        return np.array(named, object).reshape(array.shape).tolist()
    return array.tolist()


def _print_table(outputs: Mapping[str, Array]) -> None:
    table = data_table("output", "type", "shape", "values")
    for name, array in outputs.items():
        kind = "bytes" if array.dtype.hasobject else str(array.dtype)
        table.add_row(safe(name), kind, str(list(array.shape)), safe(_values(array)))
    print_table(table)


def _values(array: Array) -> str:
    flat = array.reshape(-1)
    if array.dtype.hasobject:
        shown = ", ".join(repr(element) for element in flat[:_SHOWN])
    elif array.dtype.kind == "f" and _TOP_FROM <= flat.size == array.shape[-1]:
        best = np.argsort(flat)[::-1][:_TOP]
        return "highest: " + ", ".join(f"[{index}] {flat[index]:.4g}" for index in best)
    else:
        shown = ", ".join(f"{value:.6g}" if array.dtype.kind == "f" else str(value) for value in flat[:_SHOWN])
    return shown + (f", ... ({flat.size} values)" if flat.size > _SHOWN else "")
