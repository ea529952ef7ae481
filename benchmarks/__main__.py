"""Command line of the benchmarks.

python -m benchmarks --quick               part of the matrix, in less than five minutes
python -m benchmarks matrix --brief        sizes and shapes with one setting, in less than ten minutes; can be recorded
python -m benchmarks --middle              models of some hundred microseconds, by settings and concurrency
python -m benchmarks matrix [--record]     the matrix of sizes, shapes, hints, interfaces and concurrencies
python -m benchmarks peers [--record]      other servers, each in a separate environment
python -m benchmarks calls [--record]    Python calls of a request against the recorded baseline; exits with 1 if worse
python -m benchmarks compare A B           differences between two saved runs of the matrix
python -m benchmarks chart RUN PICTURE     a saved run as SVG
python -m benchmarks [NAME ...]            single benchmarks of MEASUREMENTS; without a name, all, and writes RESULTS.md
"""

from __future__ import annotations

import sys

from benchmarks import (
    attacks,
    batching,
    client_calls,
    console_stream,
    event_loop_turns,
    footprint,
    genai,
    graphs,
    grpc_unary,
    handlers_http,
    handlers_models,
    hostile_bodies,
    interface_copies,
    isolated_nodes,
    neighbours,
    observed_calls,
    ocr_pipeline,
    ops_calls,
    ops_engine,
    ops_ocr,
    pipelines,
    ratios,
    ray_serve,
    resnet,
    rest_json,
    scrapes,
    stateful,
    streams,
    text_generation,
    workers,
)
from benchmarks.matrix.command import compare, draw, measure_matrix
from benchmarks.peers.command import measure_peers
from benchmarks.python_calls import compare_calls
from benchmarks.report import machine, render, write_section

MEASUREMENTS = {
    "ratios": ratios,
    "neighbours": neighbours,
    "grpc_unary": grpc_unary,
    "rest_json": rest_json,
    "scrapes": scrapes,
    "observed_calls": observed_calls,
    "client_calls": client_calls,
    "console_stream": console_stream,
    "resnet": resnet,
    "footprint": footprint,
    "interface_copies": interface_copies,
    "event_loop_turns": event_loop_turns,
    "graphs": graphs,
    "streams": streams,
    "isolated_nodes": isolated_nodes,
    "pipelines": pipelines,
    "text_generation": text_generation,
    "genai": genai,
    "stateful": stateful,
    "batching": batching,
    "ocr_pipeline": ocr_pipeline,
    "ops_ocr": ops_ocr,
    "handlers": handlers_http,
    "handler_models": handlers_models,
    "ops_engine": ops_engine,
    "ops_calls": ops_calls,
    "attacks": attacks,
    "hostile_bodies": hostile_bodies,
    "workers": workers,
    "ray": ray_serve,
}

COMMANDS = {"matrix": measure_matrix, "calls": compare_calls, "compare": compare, "chart": draw, "peers": measure_peers}


def main(arguments: list[str]) -> None:
    """Run a command or the named measurements; without a name, run all."""
    if arguments[:1] in (["--quick"], ["--brief"], ["--middle"]):
        measure_matrix(arguments)
    elif arguments and arguments[0] in COMMANDS:
        COMMANDS[arguments[0]](arguments[1:])
    else:
        _measure_rows(arguments)


def _measure_rows(names: list[str]) -> None:
    unknown = set(names) - set(MEASUREMENTS)
    if unknown:
        there = ", ".join([*COMMANDS, *MEASUREMENTS])
        sys.exit(f"no measurement of the name {', '.join(unknown)}; there are {there}")
    rows = [row for name in names or MEASUREMENTS for row in MEASUREMENTS[name].run()]
    table = render(rows)
    print(table)
    if not names:
        write_section("rows", f"Machine: {machine()}. Server and load share its cores.\n\n{table}")


if __name__ == "__main__":
    main(sys.argv[1:])
