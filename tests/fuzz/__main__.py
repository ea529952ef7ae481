"""Fuzzer of all interfaces of a server.

python -m tests.fuzz [--count N] [--first N] [--jobs N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Final

from tests.fuzz.campaign import Campaign, Report, new_in_log, run_numbers, write_fuzzed
from tests.fuzz.messages import Violation
from tests.support.processes import OvmsProcess, serving

CHUNK: Final = 2_000
MOST_VIOLATIONS: Final = 20
_MOST_CHARACTERS: Final = 4_000


def _fuzz(numbers: range, jobs: int) -> Report:
    total, started = Report(), time.monotonic()
    chunks = [range(at, min(at + CHUNK, numbers.stop)) for at in range(numbers.start, numbers.stop, CHUNK)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving("--config_path", str(write_fuzzed(folder)), "--crash_probe", "off", log=folder / "log") as server:
            ports = (int(server.grpc.rpartition(":")[2]), int(server.rest.rpartition(":")[2]))
            whole = Campaign(ports, new_in_log(folder / "log"))
            with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
                for at in range(0, len(chunks), jobs):
                    now = chunks[at : at + jobs]
                    for report in pool.map(run_numbers, repeat(ports), now):
                        total.add(report)
                    seen = range(now[0].start, now[-1].stop)
                    total.violations += [Violation(seen, fault) for fault in whole.faults_afterwards()]
                    rate = total.messages / (time.monotonic() - started)
                    progress = f"{len(total.violations)} violations, {rate:.0f}/s; continue with --first {seen.stop}"
                    print(f"{total.messages} sent, {progress}", flush=True)  # noqa: T201 - progress of the command
                    if len(total.violations) > MOST_VIOLATIONS or server.process.poll() is not None:
                        break
            total.violations += _violations_of_end(server, numbers)
    return total


def _violations_of_end(server: OvmsProcess, numbers: range) -> list[Violation]:
    try:
        code, log = server.stop()
    except TimeoutExpired:
        return [Violation(numbers, f"the server did not end: {server.printed_so_far()[-_MOST_CHARACTERS:]}")]
    return [Violation(numbers, f"the server ended with {code}: {log[-_MOST_CHARACTERS:]}")] if code else []


def main() -> None:
    parser = argparse.ArgumentParser(description="Send mutated messages to all interfaces of a server.")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    report = _fuzz(range(given.first, given.first + given.count), given.jobs)
    print(report)  # noqa: T201 - the output of the program
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
