from __future__ import annotations

import io
import logging
import logging.handlers
import re
from pathlib import Path
from typing import Any

import pytest
import structlog

from ovmstrio.core.errors import ConfigError
from ovmstrio.observability.logs import configure_logs
from ovmstrio.runtimes.ops.config.op_settings import LoggingSettings
from ovmstrio.runtimes.ops.observing.figures import working_on
from ovmstrio.runtimes.ops.observing.log_files import join_log_files, open_log_files

_STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


pytestmark = pytest.mark.usefixtures("log_files")


def _read(directory: Path, name: str) -> str:
    return (directory / "PipelineServingLogs" / name).read_text(encoding="utf-8")


def test_lines_of_users_and_of_the_server(tmp_path: Path) -> None:
    """Both kinds of records are lines of the documented form, warnings are in both files, ids are on the lines."""
    configure_logs()
    log = structlog.get_logger("some.module").bind()
    with open_log_files(LoggingSettings()) as files:
        assert files is not None
        assert files.directory == tmp_path / "PipelineServingLogs"
        with working_on((1, 0), (2, 77)):
            logging.getLogger().info("from %s", "user code")
        log.warning("request failed", err_no=5000)
        logging.getLogger("x").debug("not shown")
        files.trace("Op(uci):")
    logging.getLogger().info("after the end")
    lines = _read(tmp_path, "pipeline.log").splitlines()
    here = r"\[test_log_files\.py:\d+\]"
    assert len(lines) == 2
    ids = r"\(data_id=1 log_id=0\) \(data_id=2 log_id=77\)"
    assert re.fullmatch(rf"INFO {_STAMP} {here} {ids} from user code", lines[0])
    assert re.fullmatch(rf"WARNING {_STAMP} {here} request failed err_no=5000", lines[1])
    assert _read(tmp_path, "pipeline.log.wf").splitlines() == lines[1:]
    assert re.fullmatch(rf"{_STAMP} Op\(uci\):\n", _read(tmp_path, "pipeline.tracer"))


def test_traceback_and_line_break(tmp_path: Path) -> None:
    """An exception's traceback is below its line, whichever way it was logged."""
    configure_logs()
    log = structlog.get_logger("some.module").bind()
    with open_log_files(LoggingSettings()):
        try:
            int("of the hook")
        except ValueError as error:
            log.error("failed", exc_info=error)  # noqa: TRY400 - what a server does that keeps the error
            logging.getLogger().exception("failed too")
    text = _read(tmp_path, "pipeline.log.wf")
    assert text.count("ValueError: invalid literal") == 2
    assert "failed\nTraceback" in text


def test_rotation(tmp_path: Path) -> None:
    """A file that reaches its size is put away, and only so many are kept."""
    with open_log_files(LoggingSettings(max_bytes=200, backups=2)):
        for number in range(20):
            logging.getLogger().info("line %d with some more text in it", number)
    names = sorted(path.name for path in (tmp_path / "PipelineServingLogs").glob("pipeline.log*"))
    assert names == ["pipeline.log", "pipeline.log.1", "pipeline.log.2", "pipeline.log.wf"]
    assert "line 19 " in _read(tmp_path, "pipeline.log")


def test_default_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are put away at 512 000 000 bytes; 20, 10 and 5 of them are kept."""
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


def test_level(tmp_path: Path) -> None:
    """The level opens or closes the file for lower levels, and is given back at the end."""
    before = logging.getLogger().level
    with open_log_files(LoggingSettings(level=logging.DEBUG)):
        logging.getLogger().debug("shown")
    with open_log_files(LoggingSettings(level=logging.ERROR)):
        logging.getLogger().warning("hidden")
    assert "shown" in _read(tmp_path, "pipeline.log")
    assert "hidden" not in _read(tmp_path, "pipeline.log")
    assert "hidden" not in _read(tmp_path, "pipeline.log.wf")
    assert logging.getLogger().level == before


def test_debug_lines_of_the_server(tmp_path: Path) -> None:
    """With level DEBUG the server's own lines of that level are in the file too, and elsewhere there is no more."""
    configure_logs()
    others = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(others))
    with open_log_files(LoggingSettings(level=logging.DEBUG)), working_on((3, 4)):
        structlog.get_logger("of.the.server").debug("request answered", ms=2)
        logging.getLogger().debug("of a hook")
    lines = [line.split("] ", 1)[1] for line in _read(tmp_path, "pipeline.log").splitlines()]
    assert lines == ["(data_id=3 log_id=4) request answered ms=2", "(data_id=3 log_id=4) of a hook"]
    assert others.getvalue() == ""


def test_worker_of_a_server_without_files(tmp_path: Path) -> None:
    """A worker process makes no files of its own."""
    with join_log_files(LoggingSettings()):
        logging.getLogger().error("nowhere")
    assert list(tmp_path.iterdir()) == []


def test_rate_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place writes so many lines a second; then the next line says how many were left out."""
    now = 50.0
    monkeypatch.setattr("ovmstrio.runtimes.ops.observing.log_files.time.monotonic", lambda: now)
    with open_log_files(LoggingSettings(rate_limit=2)):
        for number in range(6):
            now += 1.0 if number == 5 else 0.0
            logging.getLogger().warning("again %d", number)
        logging.getLogger().warning("another place")
    for name in ("pipeline.log", "pipeline.log.wf"):
        texts = [line.split("] ", 1)[1] for line in _read(tmp_path, name).splitlines()]
        assert texts == ["again 0", "again 1", "again 5 (3 more of these were left out)", "another place"]


def test_turned_off(tmp_path: Path) -> None:
    """Files that are turned off are not made."""
    with open_log_files(LoggingSettings(enabled=False)) as files:
        assert files is None
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no directory can be made, the error names it and the way out."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SERVING_LOG_PATH", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="SERVING_LOG_PATH"), open_log_files(LoggingSettings()):
        pass
