"""Disturb servers in every way while clients call them, and judge every answer.

python -m tests.chaos [--minutes N] [--seed N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import trio

from tests.chaos.run import chaos

SEEDS = 2**32


def main() -> None:
    parser = argparse.ArgumentParser(description="Disturb servers in every way while clients call them.")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()) % SEEDS)
    parser.add_argument("--only", nargs="*", default=[], help="methods of Disturbances; all of them otherwise")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = trio.run(partial(chaos, Path(folder), given.minutes * 60, given.seed, given.only))
    print(report)  # noqa: T201 - what was asked for
    sys.exit(bool(report.ledger.violations()))


if __name__ == "__main__":
    main()
