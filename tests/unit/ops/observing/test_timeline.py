from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.ops.observing.analyst import Analyst
from ovmstrio.runtimes.ops.observing.hooks import Stage
from ovmstrio.runtimes.ops.observing.tracer import Timelines

_TIMES: list[tuple[str, Stage, float, float]] = [
    ("@DAGExecutor", "prepack", 10.0, 10.001),
    ("det", "in", 10.0, 10.001),
    ("det", "prep", 10.001, 10.002),
    ("det", "midp", 10.002, 10.006),
    ("det", "postp", 10.006, 10.007),
    ("rec", "midp", 10.007, 10.010),
    ("@DAGExecutor", "postpack", 10.010, 10.012),
]


def _run(timelines: Timelines, data_id: int, *, profile: bool = False) -> None:
    timelines.request_started(data_id, 0, profile=profile)
    for op, stage, begin, end in _TIMES:
        timelines.stage(op, 1, stage, [data_id], (begin, end))


def test_line_of_a_request_that_asks() -> None:
    """A request's line names process, stages, Ops and workers, each with begin and end; others have none."""
    out = io.StringIO()
    timelines = Timelines(out=out)
    _run(timelines, 5, profile=True)
    _run(timelines, 6)
    head, pid, marks = timelines.timeline(5).split("\t")
    assert (head, bool(re.fullmatch(r"pid:\d+", pid))) == ("PROFILE", True)
    names = [mark.rpartition(":")[0] for mark in marks.split(" ")]
    stages = ["prepack_5#@DAGExecutor", "prep#[det|1]", "midp#[det|1]", "postp#[det|1]", "midp#[rec|1]"]
    stages += ["postpack_5#@DAGExecutor", "call_5#DAG"]
    assert names == [f"{stage}_{tag}" for stage in stages for tag in (0, 1)]
    at = {mark.rpartition(":")[0]: int(mark.rpartition(":")[2]) for mark in marks.split(" ")}
    assert at["midp#[det|1]_1"] - at["midp#[det|1]_0"] == pytest.approx(4000, abs=1)
    assert timelines.timeline(6) == ""
    timelines.request_finished(5, 0, 0, (10.0, 10.012))
    assert timelines.timeline(5) == ""
    assert out.getvalue() == ""


def test_every_request() -> None:
    """Where all timelines are wanted, each is written when its request ends."""
    out = io.StringIO()
    timelines = Timelines(everything=True, out=out)
    for data_id in range(3):
        _run(timelines, data_id)
        timelines.request_finished(data_id, 0, 10000, (10.0, 10.012))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("PROFILE\tpid:") and f"call_{n}#DAG_0:" in line for n, line in enumerate(lines))


def test_nobody_reads() -> None:
    """A request ends as any other if its line cannot be written."""
    out = io.StringIO()
    out.close()
    timelines = Timelines(everything=True, out=out)
    _run(timelines, 0)
    timelines.request_finished(0, 0, 0, (10.0, 10.012))
    assert timelines.timeline(0) == ""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Give a file with the timelines of three requests among other lines."""
    out = io.StringIO("a line that is none\n")
    out.seek(0, io.SEEK_END)
    timelines = Timelines(everything=True, out=out)
    for data_id in range(3):
        _run(timelines, data_id)
        timelines.request_finished(data_id, 0, 0, (10.0, 10.012))
    path = tmp_path / "profile.txt"
    path.write_text(out.getvalue())
    return path


def test_trace(profile: Path, tmp_path: Path) -> None:
    """The trace has a begin and an end for each stage of each request, and Chrome's keys."""
    Analyst(profile).save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    assert len(events) == 3 * 7 * 2
    assert set(events[0]) == {"name", "tid", "pid", "ts", "ph"}
    first, second = events[2:4]
    assert (first["name"], first["tid"], first["ph"], second["ph"]) == ("prep", "[det|1]", "B", "E")
    assert second["ts"] - first["ts"] == pytest.approx(1000, abs=1)


def test_averages(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Averages are milliseconds of calls and of packing; they can be printed."""
    analyst = Analyst(profile)
    expected = {"prepack": 1.0, "postpack": 2.0, "call": 12.0}
    assert analyst.get_profile() == pytest.approx(expected, abs=0.01)
    analyst.print_profile()
    assert "call: 12.0" in capsys.readouterr().out


def test_op_analyst(profile: Path, tmp_path: Path) -> None:
    """Times and rates are told by Op, and slower Ops get as many workers as keep up."""
    ops = Analyst(profile).get_op_analyst()
    assert ops.times()["det"] == pytest.approx({"prep": 1.0, "midp": 4.0, "postp": 1.0}, abs=0.01)
    assert ops.qps()["det"] == pytest.approx(1000 / 6, rel=0.01)
    assert ops.qps({"rec": 2})["rec"] == pytest.approx(2000 / 3, rel=0.01)
    config = tmp_path / "config.yml"
    local = "{local_service_conf: {model_config: m, devices: '%s'}}"
    config.write_text(f"rpc_port: 9998\nop:\n  det: {local % '0'}\n  rec: {local % '1,2'}\n")
    assert ops.concurrency_analysis(config) == {"det": 4, "rec": 2}
    config.write_text(f"rpc_port: 9998\nop:\n  det: {local % '0'}\n  rec: {local % '1,0'}\n")
    with pytest.raises(ConfigError, match="device 0 has several models: det, rec"):
        ops.concurrency_analysis(config)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file is named."""
    with pytest.raises(ConfigError, match=r"nothing\.txt: cannot be read"):
        Analyst(tmp_path / "nothing.txt").get_profile()
