"""Run measurements: all of them, or those named; all of them together write RESULTS.md.

python -m benchmarks [grpc_unary] [rest_json] [resnet] [footprint]
"""

from __future__ import annotations

import sys

from benchmarks import footprint, grpc_unary, resnet, rest_json
from benchmarks.report import RESULTS, machine, render

MEASUREMENTS = {"grpc_unary": grpc_unary, "rest_json": rest_json, "resnet": resnet, "footprint": footprint}

_HEAD = """# Results

Printed by `just bench` (`python -m benchmarks`), which runs both sides of each ratio in turn on the same machine and
takes medians.

Machine: {machine}. Server and load share its cores.

"""


def main(names: list[str]) -> None:
    """Run the measurements and print their table."""
    unknown = set(names) - set(MEASUREMENTS)
    if unknown:
        sys.exit(f"no measurement of the name {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    rows = [row for name in names or MEASUREMENTS for row in MEASUREMENTS[name].run()]
    table = render(rows)
    print(table)
    if not names:
        RESULTS.write_text(_HEAD.format(machine=machine()) + table + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
