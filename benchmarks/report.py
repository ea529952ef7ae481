"""One measured figure, how it is printed, and the file that keeps the last run."""

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
    """A figure, the goal it is held against, and what it was made of."""

    what: str
    value: float
    goal: str
    met: bool
    detail: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.value:.3g} | {self.goal} | {'yes' if self.met else '**no**'} | {self.detail} |"


def machine() -> str:
    """Describe what the figures were measured on."""
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
    """Put text between the two marks of a section of RESULTS.md; all around it was written by hand or by others.

    Raises:
        ValueError: the file has no such marks.
    """
    begin, end = f"<!-- {name}: written by a program -->\n", f"<!-- end of {name} -->\n"
    before, found, rest = RESULTS.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{RESULTS} has no section {name!r}: expected the lines {begin!r} and {end!r}")
    RESULTS.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")
