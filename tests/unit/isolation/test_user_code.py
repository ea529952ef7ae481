from __future__ import annotations

import io
import logging
import pdb
import sys
import threading
from collections.abc import Iterator
from contextvars import copy_context
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog
import trio
from opentelemetry import trace
from structlog.testing import capture_logs

from ovmstrio import isolation
from ovmstrio.isolation import trace_propagation
from ovmstrio.isolation.generators import ThreadGenerator
from ovmstrio.isolation.handler_imports import HandlerPackage
from ovmstrio.isolation.print_capture import log_printed_line, log_prints
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import UserCodeRaisedError, call_user_code
from ovmstrio.util.stdio import attribute_output_to

NAMES = {"servable": "graph", "node": "counter"}


def _replaced(monkeypatch: pytest.MonkeyPatch) -> dict[str, io.StringIO]:
    made = {name: io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in made.items():
        monkeypatch.setattr(sys, name, stream)
    return made


def _line(text: str, stream: str = "stdout") -> dict[str, Any]:
    return {"event": text, "stream": stream, "log_level": "info", **NAMES}


async def test_prints_of_plain_and_async_code_are_logged_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _replaced(monkeypatch)
    threads = WorkerThreads(log_fields=NAMES)

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

    with capture_logs() as logged, log_prints():
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


def test_streams_are_restored_unless_replaced_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _replaced(monkeypatch)
    with log_prints():
        with log_prints():
            assert sys.stdout is not streams["stdout"]
        kept = sys.stdout
        assert kept is not streams["stdout"]
        other = io.StringIO()
        sys.stderr = other
    assert sys.stdout is streams["stdout"]
    assert sys.stderr is other
    with attribute_output_to(NAMES):
        print("kept longer", file=kept)
    assert streams["stdout"].getvalue() == "kept longer\n"


def test_all_prints_are_logged_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _replaced(monkeypatch)
    with capture_logs() as logged:
        with log_prints(), log_prints(is_all=True):
            print("of a thread of its own")
            with attribute_output_to(NAMES):
                print("of the code")
        print("after the end")
    assert logged == [
        {"event": "of a thread of its own", "stream": "stdout", "log_level": "info"},
        _line("of the code"),
    ]
    assert streams["stdout"].getvalue() == "after the end\n"


def test_log_handler_of_user_code_writes_to_the_stream_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _replaced(monkeypatch)
    logger = logging.getLogger("ovmstrio.printed")
    structlog.configure(logger_factory=structlog.stdlib.LoggerFactory(), processors=[_only_event])
    try:
        with log_prints(is_all=True):
            handler = logging.StreamHandler(sys.stdout)
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            log_printed_line("once", "stdout", NAMES)
            print("twice")
    finally:
        structlog.reset_defaults()
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert streams["stdout"].getvalue() == "once\ntwice\n"


def test_debugger_uses_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _replaced(monkeypatch)
    debugger = pdb.Pdb(stdin=io.StringIO("p 40 + 2\ncontinue\n"), nosigint=True, readrc=False)
    traced_by = sys.gettrace()
    with capture_logs() as logged, log_prints(), attribute_output_to(NAMES):
        debugger.stdout, debugger.use_rawinput = sys.stdout, False
        debugger.set_trace()
        print("of the code")
    # The debugger has ended the measurement of coverage.
    sys.settrace(traced_by)
    assert "(Pdb) 42\n" in streams["stdout"].getvalue()
    assert logged == [_line("of the code")]


def _only_event(_: object, __: str, event: Any) -> str:
    return str(event["event"])


PATIENCE_SECONDS = 60


async def test_generator_is_closed_if_its_consumer_leaves_as_a_turn_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    can_send, is_over, is_closed = threading.Event(), threading.Event(), threading.Event()

    def numbers() -> Iterator[int]:
        try:
            yield 0
            can_send.wait(PATIENCE_SECONDS)
            number = 0
            while True:
                yield (number := number + 1)
        finally:
            is_closed.set()

    threads = WorkerThreads()
    async with trio.open_nursery() as nursery:
        await nursery.start(threads.run)
        pump = ThreadGenerator(numbers(), str, threads, copy_context())
        run_turn = pump._run_turn  # noqa: SLF001 - the end of a turn is observed in its thread

        def watched() -> None:
            run_turn()
            is_over.set()

        monkeypatch.setattr(pump, "_run_turn", watched)
        try:
            assert await pump.pull() == "0"
            can_send.set()
            # On the event loop, so that nothing else is done by it meanwhile.
            assert is_over.wait(PATIENCE_SECONDS)
            pump.leave()
            assert await trio.to_thread.run_sync(is_closed.wait, PATIENCE_SECONDS)
        finally:
            with trio.CancelScope(shield=True):
                await threads.aclose()


def test_package_is_unloaded_while_another_thread_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ImportingName(str):
        __slots__ = ()

        def startswith(self, *_: object) -> bool:
            monkeypatch.setitem(sys.modules, f"{self}{len(sys.modules)}", ModuleType("imported"))
            return False

    (tmp_path / "code.py").write_text("from . import helper\n")
    (tmp_path / "helper.py").write_text("")
    package = HandlerPackage(tmp_path)
    made = package.load(tmp_path / "code.py").__name__
    monkeypatch.setitem(sys.modules, ImportingName("a_name_of_others"), ModuleType("others"))
    package.unload()
    assert not {name for name in list(sys.modules) if str.startswith(name, made.rpartition(".")[0])}


PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def test_incompatible_exporter_packages_are_reported_once_and_calls_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def broken(name: str) -> Any:
        tried.append(name)
        raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    # Each process has the module's state once, so that the test needs the module as a new process has it.
    monkeypatch.setattr(isolation, "trace_propagation", trace_propagation)
    monkeypatch.delitem(sys.modules, trace_propagation.__name__)
    fresh = import_module(trace_propagation.__name__)
    monkeypatch.setattr(fresh, "import_module", broken)
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    done = []
    for number in range(3):
        with fresh.propagated_span("call", PARENT) as fail:
            done.append(number)
            fail("reason")
    assert done == [0, 1, 2]
    assert len(tried) == 1
    printed = capsys.readouterr().err
    assert printed.count("Descriptors cannot be created directly") == 1
