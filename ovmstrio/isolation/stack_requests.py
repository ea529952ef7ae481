"""Stack sampling of worker processes, concurrent with their other requests.

::

    server                                     process
    [SAMPLES, [number, seconds, rate]]  ─────> samples in a thread
                    <───────────────────────── [SAMPLES, [number, document or error text]]

The reader of a process's messages handles these requests itself. A busy or starting process may answer late; the number
identifies the request.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.service import SampledThreads, StackFrame
from ovmstrio.telemetry.stack_sampling import StackSampler

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLING_REQUEST: Final = -1
"""Number that marks sampling requests."""

_DIGITS: Final = "0123456789"
_MAX_STACKS: Final = 4_000


def is_marked(value: object, number: int) -> bool:
    """Return whether a message begins with a number that marks requests outside of the program's own."""
    return isinstance(value, list | tuple) and len(value) > 0 and value[0] == number


def create_process_sampler(rate: float) -> StackSampler:
    """Create a sampler of all threads except the sampling one."""
    main = threading.main_thread().ident

    def role(number: int, name: str, _: frozenset[str]) -> str:
        if number == main:
            return "main thread"
        return name.partition(" from ")[0].partition(" (")[0].rstrip(_DIGITS).rstrip(" -_") or "native threads"

    return StackSampler(rate, role, most_stacks=_MAX_STACKS)


def sample_in_thread(asked: Any, send: Callable[[Any], None]) -> None:
    """Sample in a thread as ``asked`` and send the result; ``send`` must be thread-safe."""
    number, seconds, rate = asked[1]

    def run() -> None:
        send([SAMPLING_REQUEST, [number, encode_samples(create_process_sampler(rate).run(seconds))]])

    try:
        threading.Thread(target=run, name="profile", daemon=True).start()
    except RuntimeError as error:
        # No thread can be started; that is no reason to exit.
        send([SAMPLING_REQUEST, [number, str(error)]])


def encode_samples(sampled: list[SampledThreads]) -> dict[str, Any]:
    """Return samples as plain data, with each frame once."""
    numbers: dict[StackFrame, int] = {}
    threads = []
    for each in sampled:
        counted = each.stacks.items()
        stacks = [[[numbers.setdefault(frame, len(numbers)) for frame in stack], count] for stack, count in counted]
        threads.append([each.name, each.samples, each.waiting, each.cpu_seconds, stacks])
    return {"frames": [[frame.name, frame.file, frame.line] for frame in numbers], "threads": threads}


def decode_samples(document: Any) -> list[SampledThreads]:
    """Decode the data of :func:`encode_samples`; raises ``ValueError`` if it is malformed or an error text."""
    if isinstance(document, str):
        raise ValueError(f"its threads could not be sampled: {document}")  # noqa: TRY004 - an error text, not a type error
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
        raise ValueError(f"malformed stack samples: {error!r}") from None
