from __future__ import annotations

import io
import logging
import logging.handlers
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError
from ovmstrio.ext.ops import Op
from ovmstrio.ops.executor import Executor, open_executor
from ovmstrio.ops.observing.log_files import current_samples, open_log_files
from ovmstrio.ops.observing.observers import PipelineObservers, open_observers
from ovmstrio.ops.settings import LoggingSettings, OpSettings, PipelineSettings
from ovmstrio.telemetry.logs import configure_logs
from tests.support.ops import asking, op_class, settings, text_graph

_STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERVING_LOG_PATH", str(tmp_path))
    configure_logs()
    return tmp_path / "PipelineServingLogs"


def test_lines_of_users_and_of_the_server(directory: Path) -> None:
    log = structlog.get_logger("some.module").bind()
    with open_log_files(LoggingSettings()) as files:
        assert files is not None
        assert files.directory == directory
        with current_samples((1, 0), (2, 77)):
            logging.getLogger().info("from %s", "user code")
        log.warning("request failed", err_no=5000)
        logging.getLogger("x").debug("not shown")
        files.trace("Op(uci):")
    logging.getLogger().info("after the end")
    lines = (directory / "pipeline.log").read_text().splitlines()
    here = r"\[test_log_files\.py:\d+\]"
    assert len(lines) == 2
    ids = r"\(data_id=1 log_id=0\) \(data_id=2 log_id=77\)"
    assert re.fullmatch(rf"INFO {_STAMP} {here} {ids} from user code", lines[0])
    assert re.fullmatch(rf"WARNING {_STAMP} {here} request failed err_no=5000", lines[1])
    assert (directory / "pipeline.log.wf").read_text().splitlines() == lines[1:]
    assert re.fullmatch(rf"{_STAMP} Op\(uci\):\n", (directory / "pipeline.tracer").read_text())


def test_tracebacks_follow_their_line(directory: Path) -> None:
    log = structlog.get_logger("some.module").bind()
    with open_log_files(LoggingSettings()):
        try:
            int("of the hook")
        except ValueError as error:
            log.error("failed", exc_info=error)  # noqa: TRY400 - simulates a server that keeps the error
            logging.getLogger().exception("failed too")
    text = (directory / "pipeline.log.wf").read_text()
    assert text.count("ValueError: invalid literal") == 2
    assert "failed\nTraceback" in text


def test_full_files_are_rotated(directory: Path) -> None:
    with open_log_files(LoggingSettings(max_bytes=200, backups=2)):
        for number in range(20):
            logging.getLogger().info("line %d with some more text in it", number)
    names = sorted(path.name for path in directory.glob("pipeline.log*"))
    assert names == ["pipeline.log", "pipeline.log.1", "pipeline.log.2", "pipeline.log.wf"]
    assert "line 19 " in (directory / "pipeline.log").read_text()


def test_default_sizes_and_numbers_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(logging.getLogger().handlers)
    made: list[logging.handlers.RotatingFileHandler] = []
    init = logging.handlers.RotatingFileHandler.__init__

    def noted(self: logging.handlers.RotatingFileHandler, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(logging.handlers.RotatingFileHandler, "__init__", noted)
    with open_log_files(LoggingSettings()):
        kept = {(Path(file.baseFilename).name, file.maxBytes, file.backupCount) for file in made}
    size = 512_000_000
    assert kept == {("pipeline.log", size, 20), ("pipeline.log.wf", size, 10), ("pipeline.tracer", size, 5)}
    assert set(logging.getLogger().handlers) == before


@pytest.mark.parametrize(
    ("level", "texts"), [(logging.DEBUG, ["debug", "warning"]), (logging.ERROR, [])], ids=["DEBUG", "ERROR"]
)
def test_the_level_of_the_file(directory: Path, level: int, texts: list[str]) -> None:
    before = logging.getLogger().level
    with open_log_files(LoggingSettings(level=level)):
        logging.getLogger().debug("debug")
        logging.getLogger().warning("warning")
    assert [line.split()[-1] for line in (directory / "pipeline.log").read_text().splitlines()] == texts
    assert len((directory / "pipeline.log.wf").read_text().splitlines()) == len(texts[1:])
    assert logging.getLogger().level == before


def test_debug_lines_of_the_server_are_in_the_file_alone(directory: Path) -> None:
    others = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(others))
    with open_log_files(LoggingSettings(level=logging.DEBUG)), current_samples((3, 4)):
        structlog.get_logger("of.the.server").debug("request answered", ms=2)
        logging.getLogger().debug("of a hook")
    lines = [line.split("] ", 1)[1] for line in (directory / "pipeline.log").read_text().splitlines()]
    assert lines == ["(data_id=3 log_id=4) request answered ms=2", "(data_id=3 log_id=4) of a hook"]
    assert others.getvalue() == ""


def test_lines_of_one_place_are_limited(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("ovmstrio.ops.observing.log_files.time.monotonic", lambda: now)
    with open_log_files(LoggingSettings(rate_limit=2)):
        for number in range(6):
            now += 1.0 if number == 5 else 0.0
            logging.getLogger().warning("again %d", number)
        logging.getLogger().warning("another place")
    for name in ("pipeline.log", "pipeline.log.wf"):
        texts = [line.split("] ", 1)[1] for line in (directory / name).read_text().splitlines()]
        assert texts == ["again 0", "again 1", "again 5 (3 similar lines suppressed)", "another place"]


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SERVING_LOG_PATH", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="SERVING_LOG_PATH"), open_log_files(LoggingSettings()):
        pass


# Lines of running pipelines


def _preprocess(op: Op, inputs: Mapping[str, Any]) -> Any:
    (only,) = inputs.values()
    logging.getLogger().info("%s got %s", op.name, only["x"])
    if only["x"] == "bad":
        raise ValueError("x is bad")
    return only


async def _postprocess(op: Op, inputs: Any, output: Any) -> Any:
    structlog.get_logger("of.a.user").info("done", op=op.name)
    return output


@asynccontextmanager
async def _running(of: PipelineSettings) -> AsyncIterator[tuple[Executor, PipelineObservers]]:
    """Open a pipeline whose hooks log in a thread and on the loop, and refuse ``bad``."""
    graph = text_graph("a<@", "b<a", make=op_class(preprocess=_preprocess, postprocess=_postprocess))
    async with open_observers(of) as observing, open_executor(graph, of, hooks=observing.hooks) as executor:
        yield executor, observing


async def test_every_line_of_a_request_has_its_ids(directory: Path) -> None:
    async with _running(settings()) as (executor, _), trio.open_nursery() as nursery:
        for log_id in range(70, 74):
            nursery.start_soon(executor.infer, asking(f"x{log_id}", logid=log_id))
        nursery.start_soon(executor.infer, asking("bad", logid=79))
    text = (directory / "pipeline.log").read_text()
    lines = re.findall(rf"^(?:INFO|WARNING|ERROR) {_STAMP} \[\S+:\d+\] (.*)$", text, re.MULTILINE)
    found = sorted(re.findall(r"\(data_id=\d+ log_id=(\d+)\) ([ab]) got x(\d+)", "\n".join(lines)))
    assert found == sorted((str(log_id), op, str(log_id)) for log_id in range(70, 74) for op in "ab")
    assert sum("done op=" in line and "(data_id=" in line for line in lines) == 8
    warnings = (directory / "pipeline.log.wf").read_text()
    assert re.search(r"\(data_id=\d log_id=79\) hook raised", warnings)
    assert re.search(r"\(data_id=\d log_id=79\) request failed err_no=10000 err_msg=.*Raise_msg: x is bad ", warnings)
    assert "ValueError: x is bad" in warnings
    assert "got" not in warnings


async def test_answered_requests_have_a_line_in_the_file_alone(directory: Path) -> None:
    request = asking("x", logid=7, clientip="192.0.2.1", method="prediction")
    with capture_logs() as logs:
        async with _running(settings()) as (executor, _):
            await executor.infer(request)
            await executor.infer(asking("x", logid=8))
    text = (directory / "pipeline.log").read_text()
    found = re.findall(rf"^INFO {_STAMP} \[\S+:\d+\] (.*request answered .*) ms=[0-9.]+$", text, re.MULTILINE)
    assert found == [
        "(data_id=0 log_id=7) request answered client=192.0.2.1 method=prediction",
        "(data_id=1 log_id=8) request answered client=- method=-",
    ]
    assert not [entry for entry in logs if "request answered" in entry["event"]]
    async with _running(replace(settings(), logging=LoggingSettings(level=logging.WARNING))) as (executor, _):
        await executor.infer(request)
    assert (directory / "pipeline.log").read_text().count("request answered") == 2


async def test_the_line_of_a_batch_lists_its_samples(directory: Path) -> None:
    batched = {"a": OpSettings("a", batch_size=3, auto_batching_timeout=60_000)}
    async with _running(settings(ops=batched)) as (executor, observing), trio.open_nursery() as nursery:
        for log_id in (5, 6, 7):
            nursery.start_soon(executor.infer, asking("x", logid=log_id))
    ids = " ".join(rf"\(data_id={data_id} log_id=[567]\)" for data_id in range(3))
    text = (directory / "pipeline.log").read_text()
    assert re.search(rf"\] {ids} batch op=a worker=0 data_ids=\[0, 1, 2\]\n", text)
    assert observing.snapshot()["ops"]["a"]["batches"] == {"3": 1}


async def test_log_files_can_be_disabled(directory: Path) -> None:
    async with _running(PipelineSettings(logging=LoggingSettings(enabled=False))) as (executor, _):
        assert (await executor.infer(asking("x"))).values == ["x"]
    assert not await trio.Path(directory).exists()
