"""`ovms profile`: what a server tells, as tables, rows and a file for speedscope."""

from __future__ import annotations

from typing import Any

import pytest

from ovms_cli.profile_tables import profile_rows, profile_tables
from ovms_cli.speedscope import speedscope_document
from tests.support.speedscope_format import check_speedscope

TOLD: dict[str, Any] = {
    "seconds": 2.0,
    "cpu_seconds": 1.0,
    "native_cpu_seconds": 0.25,
    "frames": [{"name": "outer", "file": "/a/b.py", "line": 3}, {"name": "inner", "file": "/a/c.py", "line": 7}],
    "threads": [
        {
            "name": "event loop",
            "samples": 10,
            "waiting": 4,
            "cpu_seconds": 0.75,
            "stacks": [{"frames": [0, 1], "samples": 5}, {"frames": [0], "samples": 1}],
        }
    ],
    "processes": [{"service": "words", "pid": 77, "cpu_seconds": 1.5, "problem": "it was starting"}],
    "models": [
        {
            "name": "m",
            "version": "1",
            "calls": 3,
            "runs": 200,
            "seconds": 4e-6,
            "layers": [
                {"name": "a", "type": "MatMul", "runs_as": "brgemm", "seconds": 3e-6},
                {"name": "b", "type": "Relu", "runs_as": "jit", "seconds": 1e-6},
            ],
        },
        {"name": "n", "version": "", "calls": 0, "problem": "it is no model"},
    ],
}


def test_a_file_for_speedscope_has_the_time_of_each_stack() -> None:
    """Waiting is a stack of its own, layers are a profile for each model, and what has no times is left out."""
    made = speedscope_document(TOLD)
    names = [frame["name"] for frame in made["shared"]["frames"]]
    loop, layers = made["profiles"]
    stacks = [[names[number] for number in stack] for stack in loop["samples"]]
    assert stacks == [["outer", "inner"], ["outer"], ["waits for something to do"]]
    assert loop["weights"] == pytest.approx([1.0, 0.2, 0.8])
    assert (loop["unit"], loop["endValue"]) == ("seconds", pytest.approx(2.0))
    assert [names[number] for (number,) in layers["samples"]] == ["a (MatMul, brgemm)", "b (Relu, jit)"]
    assert (layers["unit"], layers["weights"]) == ("microseconds", pytest.approx([3.0, 1.0]))
    assert made["$schema"] == "https://www.speedscope.app/file-format-schema.json"


def _of_workers() -> dict[str, Any]:
    """Make what a server of two processes tells, of which the third did not answer."""
    workers = [{"worker": row, "seconds": 2.0, "cpu_seconds": 0.5, "native_cpu_seconds": 0.125} for row in (0, 1)]
    threads = [{**each, "worker": row} for row in (0, 1) for each in TOLD["threads"]]
    return {**TOLD, "threads": threads, "processes": [], "workers": workers, "silent": [2]}


def test_a_server_of_several_processes_has_a_profile_for_each() -> None:
    """In the tables, the rows and the file; who is missing is named."""
    told = _of_workers()
    titles = [title for title, _ in profile_tables(told)]
    assert [title for title in titles if "worker" in title and "samples" in title] == [
        "[bold]worker 0: event loop[/]: 10 samples",
        "[bold]worker 1: event loop[/]: 10 samples",
    ]
    assert "Worker 2 did not answer in time, and is not in it" in titles
    assert {row[0] for row in profile_rows(told)} == {"worker 0: event loop", "worker 1: event loop", "m"}
    names = [profile["name"] for profile in speedscope_document(told)["profiles"]]
    assert names == ["worker 0: event loop", "worker 1: event loop", "layers of m"]
    _, table = next(profile_tables(told))
    assert table is not None
    assert list(table.columns[0].cells) == [
        "worker 0: event loop",
        "worker 1: event loop",
        "worker 0: OpenVINO and other native threads",
        "worker 1: OpenVINO and other native threads",
    ]


def test_a_file_for_speedscope_has_its_format() -> None:
    """With nothing in it, too."""
    check_speedscope(speedscope_document(TOLD))
    check_speedscope(speedscope_document({**TOLD, "threads": [], "models": []}))


def test_processes_that_are_not_sampled_are_named_with_the_way_out() -> None:
    """And with the processors that they took; where there are none, nothing is said of them."""
    threads, *others = profile_tables(TOLD)
    table = threads[1]
    assert table is not None
    (names, took, waiting) = ([*column.cells] for column in table.columns)
    assert (names[-1], took[-1], waiting[-1]) == ("process 77 of words", "1.50 s", "not sampled")
    assert any("py-spy record --gil --pid 77" in title for title, _ in others)
    assert "not sampled" not in str([title for title, _ in profile_tables({**TOLD, "processes": []})])


def test_rows_tell_own_and_total_shares() -> None:
    """Of functions by samples, of layers by time."""
    assert list(profile_rows(TOLD)) == [
        ("event loop", "outer", "/a/b.py:3", 10.0, 60.0, ""),
        ("event loop", "inner", "/a/c.py:7", 50.0, 50.0, ""),
        ("m", "a", "MatMul brgemm", 75.0, "", 3.0),
        ("m", "b", "Relu jit", 25.0, "", 1.0),
    ]
