"""Run measurements: all of them, or those named; all of them together write RESULTS.md.

python -m benchmarks [NAME ...], each one of MEASUREMENTS
"""

from __future__ import annotations

import sys

from benchmarks import (
    attacks,
    batching,
    footprint,
    graphs,
    grpc_unary,
    handlers_http,
    handlers_models,
    isolated_nodes,
    ocr_pipeline,
    ops_calls,
    ops_engine,
    ops_ocr,
    pipelines,
    resnet,
    rest_json,
    stateful,
    text_generation,
)
from benchmarks.report import RESULTS, machine, render

MEASUREMENTS = {
    "grpc_unary": grpc_unary,
    "rest_json": rest_json,
    "resnet": resnet,
    "footprint": footprint,
    "graphs": graphs,
    "isolated_nodes": isolated_nodes,
    "pipelines": pipelines,
    "text_generation": text_generation,
    "stateful": stateful,
    "batching": batching,
    "ocr_pipeline": ocr_pipeline,
    "ops_ocr": ops_ocr,
    "handlers": handlers_http,
    "handler_models": handlers_models,
    "ops_engine": ops_engine,
    "ops_calls": ops_calls,
    "attacks": attacks,
}

_HEAD = """# Results

Printed by `just bench` (`python -m benchmarks`), which runs both sides of each ratio in turn on the same machine and
takes medians.

Machine: {machine}. Server and load share its cores.

"""


def _notes() -> str:
    """Give what the file of results says behind its table, written by hand."""
    lines = RESULTS.read_text().splitlines(keepends=True)
    last_row = max(number for number, line in enumerate(lines) if line.startswith("|"))
    return "".join(lines[last_row + 1 :])


def main(names: list[str]) -> None:
    """Run the measurements and print their table."""
    unknown = set(names) - set(MEASUREMENTS)
    if unknown:
        sys.exit(f"no measurement of the name {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    rows = [row for name in names or MEASUREMENTS for row in MEASUREMENTS[name].run()]
    table = render(rows)
    print(table)
    if not names:
        RESULTS.write_text(_HEAD.format(machine=machine()) + table + "\n" + _notes())


if __name__ == "__main__":
    main(sys.argv[1:])
