"""Samples of the stacks of a worker process, which the server asks for beside whatever else it asks.

::

    server                                     process
    [SAMPLES, [number, seconds, rate]]  ─────> a thread looks for so long
                    <───────────────────────── [SAMPLES, [number, document]], or why there is none in its place

Whoever reads the messages of a process has such a request be answered, and gives it to nobody.  One that works, or is
being started, may answer when nobody waits any more, which the number tells.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.service import SampledThreads, StackFrame
from ovmstrio.telemetry.stack_sampling import StackSampler

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SAMPLES", "decode_samples", "encode_samples", "is_for_samples", "sample_in_thread", "sampler_of_process"]

SAMPLES: Final = -1
"""What requests for samples have in the place of a number."""

_DIGITS: Final = "0123456789"
_MOST_STACKS: Final = 4_000


def is_for_samples(value: object) -> bool:
    """Tell whether a message is a request for samples."""
    return isinstance(value, list | tuple) and len(value) > 0 and value[0] == SAMPLES


def sampler_of_process(rate: float) -> StackSampler:
    """Make what samples all threads of a worker process, the running one's left out."""
    main = threading.main_thread().ident

    def role(number: int, name: str, _: frozenset[str]) -> str:
        if number == main:
            return "main thread"
        return name.partition(" from ")[0].partition(" (")[0].rstrip(_DIGITS).rstrip(" -_") or "native threads"

    return StackSampler(rate, role, most_stacks=_MOST_STACKS)


def sample_in_thread(asked: Any, send: Callable[[Any], None]) -> None:
    """Sample in a thread, and send what it has seen; it ends with the process, or after as long as was asked.

    Args:
        asked: the message.
        send: sends a message, from any thread.
    """
    number, seconds, rate = asked[1]

    def run() -> None:
        send([SAMPLES, [number, encode_samples(sampler_of_process(rate).run(seconds))]])

    try:
        threading.Thread(target=run, name="profile", daemon=True).start()
    except RuntimeError as error:
        # There is no room for another thread, which is no reason to end.
        send([SAMPLES, [number, str(error)]])


def encode_samples(sampled: list[SampledThreads]) -> dict[str, Any]:
    """Give what was seen as plain data; frames are there once."""
    numbers: dict[StackFrame, int] = {}
    threads = []
    for each in sampled:
        counted = each.stacks.items()
        stacks = [[[numbers.setdefault(frame, len(numbers)) for frame in stack], count] for stack, count in counted]
        threads.append([each.name, each.samples, each.waiting, each.cpu_seconds, stacks])
    return {"frames": [[frame.name, frame.file, frame.line] for frame in numbers], "threads": threads}


def decode_samples(document: Any) -> list[SampledThreads]:
    """Read what :func:`encode_samples` has made.

    Raises:
        ValueError: it is something else, as of a process whose code has sent it, or says why there are none.
    """
    if isinstance(document, str):
        raise ValueError(f"its threads could not be looked at: {document}")  # noqa: TRY004 - what it says is no sample
    try:
        frames = [StackFrame(str(name), str(file), int(line)) for name, file, line in document["frames"]]
        return [
            SampledThreads(
                str(name),
                int(samples),
                int(waiting),
                None if cpu is None else float(cpu),
                Counter({tuple(frames[number] for number in stack): int(count) for stack, count in stacks}),
            )
            for name, samples, waiting, cpu, stacks in document["threads"]
        ]
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"these are no samples: {error!r}") from None
