"""Run the default tests many times in a row, also while other processes occupy the cores, to find flaky tests.

python -m tests.stress [--quiet-rounds N] [--busy-rounds N] [argument of pytest ...]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Final

BUSY_LOOPS: Final = 4
_PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "--exitfirst")
# The parent holds the only writing end of standard input, which the system closes however the parent ends.
_BUSY_LOOP: Final = """
import os, sys, threading
def end_with_parent():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=end_with_parent).start()
while True:
    pass
"""


def main() -> None:
    """Run all rounds; exit with pytest's status at the first that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.stress",
        description="Run the default tests many times in a row. Further arguments are handed to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("--quiet-rounds", type=int, default=20, help="rounds with nothing else running (default 20)")
    parser.add_argument(
        "--busy-rounds", type=int, default=5, help=f"rounds with {BUSY_LOOPS} busy loops on the cores (default 5)"
    )
    options, arguments = parser.parse_known_args()
    # Without a handler the program would end before it stops pytest.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for number in range(options.quiet_rounds):
        _run_round(f"quiet round {number + 1} of {options.quiet_rounds}", arguments)
    with busy_loops() if options.busy_rounds else nullcontext():
        for number in range(options.busy_rounds):
            _run_round(f"busy round {number + 1} of {options.busy_rounds}", arguments)


def _run_round(name: str, arguments: list[str]) -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [*_PYTEST, *arguments],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - begin
    if done.returncode:
        _print(f"{done.stdout}\n{name}: failed after {seconds:.1f} s, pytest exited with {done.returncode}")
        sys.exit(done.returncode)
    lines = done.stdout.splitlines()
    _print(f"{name}: {seconds:.1f} s, {lines[-1] if lines else 'no output'}")


@contextmanager
def busy_loops() -> Iterator[None]:
    """Occupy the cores with child processes until the block or this process ends."""
    with ExitStack() as stack:
        for _ in range(BUSY_LOOPS):
            child = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY_LOOP], stdin=subprocess.PIPE))
            stack.callback(child.kill)
        yield


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the report of the program


if __name__ == "__main__":
    main()
