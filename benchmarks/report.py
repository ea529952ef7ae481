"""A measured figure, its printed form, and the file with the last run."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

__all__ = ["RESULTS", "Row", "machine", "render", "write_section"]

RESULTS = Path(__file__).with_name("RESULTS.md")


@dataclass(frozen=True, slots=True)
class Row:
    """A figure with its goal and the values that it was computed from."""

    what: str
    value: float
    goal: str
    met: bool
    detail: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.value:.3g} | {self.goal} | {'yes' if self.met else '**no**'} | {self.detail} |"


def machine() -> str:
    """Describe the machine of the measurement."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = psutil.virtual_memory().total / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("openvino", "trio", "hypercorn", "grpcio"))
    cpu = names[0] if names else platform.processor()
    return f"{len(names)} x {cpu}, {memory:.0f} GiB, Python {platform.python_version()}, {packages}"


def render(rows: list[Row]) -> str:
    """Render the table that RESULTS.md keeps."""
    head = "| what | value | goal | met | detail |\n|---|---|---|---|---|"
    return "\n".join([head, *map(str, rows)])


def write_section(name: str, text: str) -> None:
    """Replace the text between the two marks of a section of RESULTS.md, and keep the rest.

    Raises:
        ValueError: the file does not have the marks.
    """
    begin, end = f"<!-- {name}: written by a program -->\n", f"<!-- end of {name} -->\n"
    before, found, rest = RESULTS.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{RESULTS} has no section {name!r}: expected the lines {begin!r} and {end!r}")
    RESULTS.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")
