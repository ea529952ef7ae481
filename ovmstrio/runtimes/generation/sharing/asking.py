"""How the programs of engines are asked, as far as those have to know who pass questions and answers on.

Requests have numbers, and those of a process have the process's number as their rest when they are divided by the count
of processes: so nobody has to change them on their way.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ovmstrio.core.engine_sharing import EngineSharing

__all__ = ["PARTS", "TEXTS", "Asking", "numbers_of"]


def numbers_of(engines: EngineSharing | None) -> Iterator[int]:
    """Give numbers for the requests of this process, which no other one has."""
    return itertools.count(1) if engines is None else itertools.count(engines.rows + engines.row, engines.rows)


class Asking(NamedTuple):
    """How a program is asked.

    Attributes:
        begins: the word by which a request begins, before its number.
        ends: the word by which it is ended.
        split: gives what is whose of a frame that the program tells, by processes, of which there are so many, and what
            the first argument says is given in any case.
        ended: gives the numbers of requests one of whose texts has ended with a part of a frame.
    """

    begins: str
    ends: str
    split: Callable[[int, Any, int], dict[int, Any]]
    ended: Callable[[Any], Iterable[int]]


def _split_step(own: int, frame: Any, rows: int) -> dict[int, Any]:
    """Split what a step has brought; its figures are the owner's."""
    texts, failures, figures = frame
    found: defaultdict[int, Any] = defaultdict(lambda: [[], [], None])
    found[own][2] = figures
    for number, *rest in texts:
        found[number % rows][0].append([number, *rest])
    for number, failure in failures:
        found[number % rows][1].append([number, failure])
    return found


def _ended_by_step(frame: Any) -> Iterator[int]:
    texts, failures, _ = frame
    yield from (number for number, *_, finish in texts if finish is not None)
    yield from (number for number, _ in failures)


def _split_part(own: int, frame: Any, rows: int) -> dict[int, Any]:
    del own
    return {frame[0] % rows: frame}


TEXTS = Asking("add", "cancel", _split_step, _ended_by_step)
"""Programs that make texts step by step."""

PARTS = Asking("open", "close", _split_part, lambda _: ())
"""Programs that answer in parts, each of which is asked for."""
