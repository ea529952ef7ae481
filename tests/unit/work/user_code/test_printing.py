"""What code of users prints is logged with the names that it has, and nobody else's is."""

from __future__ import annotations

import io
import logging
import pdb
import sys
from typing import Any

import pytest
import structlog
import trio
from structlog.testing import capture_logs

from ovmstrio.core.line_streams import running_code_of
from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_user_code
from ovmstrio.work.user_code.printing import log_printed, prints_logged

NAMES = {"servable": "graph", "node": "counter"}


def _replaced(monkeypatch: pytest.MonkeyPatch) -> dict[str, io.StringIO]:
    """Have other streams for the rest of the test, in which pytest's own are there already."""
    made = {name: io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in made.items():
        monkeypatch.setattr(sys, name, stream)
    return made


def _line(text: str, stream: str = "stdout") -> dict[str, Any]:
    return {"event": text, "stream": stream, "log_level": "info", **NAMES}


async def test_plain_code_and_async_code_are_logged_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole lines of both streams; what is left open ends with the call, be it by an error."""
    streams = _replaced(monkeypatch)
    threads = WorkerThreads(names=NAMES)

    def plain() -> None:
        print("plain", end="")
        print("!", flush=True)
        sys.stderr.write("error\nopen")

    async def waiting() -> None:
        print("before", end=" ")
        await trio.lowlevel.checkpoint()
        print("after", end="")

    def failing() -> None:
        print("last words", end="")
        raise ValueError

    with capture_logs() as logged, prints_logged():
        async with trio.open_nursery() as nursery:
            await nursery.start(threads.run)
            await call_user_code(threads, plain)
            await call_user_code(threads, waiting)
            with pytest.raises(UserCodeRaisedError):
                await call_user_code(threads, failing)
            print("the server's own")
            await threads.aclose()
    texts = [_line("plain!"), _line("error", "stderr"), _line("open", "stderr"), _line("before after")]
    assert logged == [*texts, _line("last words")]
    assert streams["stdout"].getvalue() == "the server's own\n"


def test_streams_are_replaced_for_as_long_as_a_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of several puts them back, unless somebody else has put others there."""
    streams = _replaced(monkeypatch)
    with prints_logged():
        with prints_logged():
            assert sys.stdout is not streams["stdout"]
        kept = sys.stdout
        assert kept is not streams["stdout"]
        other = io.StringIO()
        sys.stderr = other
    assert sys.stdout is streams["stdout"]
    assert sys.stderr is other
    with running_code_of(NAMES):
        print("kept longer", file=kept)
    assert streams["stdout"].getvalue() == "kept longer\n"


def test_everything_is_logged_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without names where nobody has any."""
    streams = _replaced(monkeypatch)
    with capture_logs() as logged:
        with prints_logged(), prints_logged(is_all=True):
            print("of a thread of its own")
            with running_code_of(NAMES):
                print("of the code")
        print("after the end")
    assert logged == [
        {"event": "of a thread of its own", "stream": "stdout", "log_level": "info"},
        _line("of the code"),
    ]
    assert streams["stdout"].getvalue() == "after the end\n"


def test_a_log_that_is_printed_ends_up_where_printed_things_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of the user's on standard output gets the lines as well, and they are no prints of the user's."""
    streams = _replaced(monkeypatch)
    logger = logging.getLogger("ovmstrio.printed")
    structlog.configure(logger_factory=structlog.stdlib.LoggerFactory(), processors=[_only_event])
    try:
        with prints_logged(is_all=True):
            handler = logging.StreamHandler(sys.stdout)
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            log_printed("once", "stdout", NAMES)
            print("twice")
    finally:
        structlog.reset_defaults()
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert streams["stdout"].getvalue() == "once\ntwice\n"


def test_a_debugger_talks_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code prints that it looks into is logged."""
    streams = _replaced(monkeypatch)
    debugger = pdb.Pdb(stdin=io.StringIO("p 40 + 2\ncontinue\n"), nosigint=True, readrc=False)
    with capture_logs() as logged, prints_logged(), running_code_of(NAMES):
        debugger.stdout, debugger.use_rawinput = sys.stdout, False
        debugger.set_trace()
        print("of the code")
    assert "(Pdb) 42\n" in streams["stdout"].getvalue()
    assert logged == [_line("of the code")]


def _only_event(_: object, __: str, event: Any) -> str:
    return str(event["event"])
