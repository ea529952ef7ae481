"""Run measurements: all of them, or those named; all of them together write RESULTS.md.

python -m benchmarks [NAME ...], each one of MEASUREMENTS
"""

from __future__ import annotations

import sys

from benchmarks import (
    batching,
    footprint,
    graphs,
    grpc_unary,
    handlers_http,
    handlers_models,
    ocr_pipeline,
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
    "pipelines": pipelines,
    "text_generation": text_generation,
    "stateful": stateful,
    "batching": batching,
    "ocr_pipeline": ocr_pipeline,
    "ops_ocr": ops_ocr,
    "handlers": handlers_http,
    "handler_models": handlers_models,
    "ops_engine": ops_engine,
}

_HEAD = """# Results

Printed by `just bench` (`python -m benchmarks`), which runs both sides of each ratio in turn on the same machine and
takes medians.

Machine: {machine}. Server and load share its cores.

"""

_NOTES = """
## Where ResNet-50 loses to the bare queue

Both cores are busy all the time on either side, so the ratio is a ratio of CPU. An inference takes about 36.7 ms of CPU
in the bare queue; the goal leaves 0.7 ms for everything else. Served, the event loop's thread takes 1.2 to 1.5 ms a
request of 602 KB and the load generator 0.4 ms. A canned service takes 0.4 ms for such a request with nothing beside
it; that the convolutions evict the loop's code and data from the caches between any two requests is the likely reason.
`perf record -t THREAD` on the event loop's thread while it serves: 59% interpreting Python, 20% kernel (the socket's
copies and wake-ups), 7% copying memory in libc, 4% the binding of OpenVINO, 3% numpy, 2% protobuf. A request takes
about 12 steps of tasks and 3.5 reads; pinning (`ENABLE_CPU_PINNING`), larger reads and one copy of the message less
changed the ratio by less than its noise.
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
        RESULTS.write_text(_HEAD.format(machine=machine()) + table + "\n" + _NOTES)


if __name__ == "__main__":
    main(sys.argv[1:])
