"""``ovms demo``: serve the embedded samples, call them over both protocols, and show the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovmstrio.cli.console import EX_USAGE, fail, stderr, stdout
from ovmstrio.cli.exits import EX_INTERRUPTED
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen, show_data

if TYPE_CHECKING:
    from ovmstrio.samples.question import Ask, Question
    from ovmstrio.server.running import Running

_HOST: Final = "127.0.0.1"
_PORT: Final = 9000
_REST_PORT: Final = 8000
_REPEATS: Final = 10


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the server to a question over one protocol; ``milliseconds`` is the median of the calls."""

    number: int
    question: Question
    protocol: str
    text: str
    right: bool
    milliseconds: float


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Exit after the answers; exit code 0 only if all are right.")
    ] = False,
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
    port: Annotated[int, typer.Option("--port", min=1, max=65_535, metavar="PORT", help="gRPC port.")] = _PORT,
    rest_port: Annotated[
        int, typer.Option("--rest-port", min=1, max=65_535, metavar="PORT", help="REST port.")
    ] = _REST_PORT,
) -> None:
    """Serve the embedded samples, call them over gRPC and REST, show the answers, and keep serving."""
    from functools import partial

    from platformdirs import user_cache_path

    from ovmstrio.samples import prepare_repository
    from ovmstrio.util.interrupts import run_interruptible

    if port == rest_port:
        fail(f"--port and --rest-port are both {port}; they must differ", EX_USAGE)
    for number, option in ((port, "--port"), (rest_port, "--rest-port")):
        _refuse_taken(number, option)
    with stderr().status("preparing the embedded samples ..."):
        config = prepare_repository(user_cache_path("ovmstrio"))
    answers: Sequence[Answer] = ()
    problem = ""
    try:
        answers = run_interruptible(partial(_demo, config, port, rest_port, once, chosen(form, as_json=as_json)))
    except* OSError as group:
        problem = _first_reason(group)
    if problem:
        fail(f"the server cannot start: {problem}")
    if not answers:
        raise typer.Exit(EX_INTERRUPTED)
    if not all(answer.right for answer in answers):
        raise typer.Exit(1)


def _refuse_taken(port: int, option: str) -> None:
    """Exit if a port cannot be used, with the option that sets another port."""
    import errno
    import socket

    try:
        socket.create_server((_HOST, port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            fail(f"port {port} cannot be used: {error.strerror}; choose another with {option}")
        fail(f"port {port} is in use by another program; choose another with {option}")


def _first_reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


async def _demo(config: Path, port: int, rest_port: int, once: bool, form: Output) -> Sequence[Answer]:
    """Run the server and the calls in one nursery, and return the answers; none if the server was stopped before.

    Ownership: the server has ended when this function returns.

    Cancellation: ends the server at once.
    """
    import trio

    from ovmstrio.server.command_line import read_settings
    from ovmstrio.server.server import serve
    from ovmstrio.telemetry.logs import configure_logs

    addresses = {"grpc_bind_address": _HOST, "rest_bind_address": _HOST}
    # The samples are known to run, so no crash probe is needed.
    options = {"config_path": config, "port": port, "rest_port": rest_port, "crash_probe": "off"}
    settings = read_settings({**options, **addresses})
    configure_logs(level="WARNING")
    answers: Sequence[Answer] = ()

    async def serve_until_stopped(*, task_status: trio.TaskStatus[Running]) -> None:
        await serve(settings, task_status=task_status)
        nursery.cancel_scope.cancel()
        # A server that was stopped before it started ends this task by the cancellation, not as a failed start.
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        running: Running = await nursery.start(serve_until_stopped)
        received = await _call_samples(running, port, rest_port)
        if running.plane.is_draining:
            await trio.sleep_forever()
        answers = received
        _show(answers, form)
        if once:
            nursery.cancel_scope.cancel()
        else:
            _show_next_steps(config, port, rest_port)
    return answers


async def _call_samples(running: Running, port: int, rest_port: int) -> list[Answer]:
    """Call all samples over both protocols, from a thread, like an external client.

    Cancellation: immediate; the thread ends with its call.
    """
    import trio

    await running.plane.registry.wait_loaded()
    answers = await trio.to_thread.run_sync(_ask_all, "gRPC", f"{_HOST}:{port}", abandon_on_cancel=True)
    return answers + await trio.to_thread.run_sync(_ask_all, "REST", f"{_HOST}:{rest_port}", abandon_on_cancel=True)


def _questions() -> list[Question]:
    from ovmstrio.samples.embedded import embedded_samples

    return [question for sample in embedded_samples() for question in sample.questions]


def _ask_all(protocol: str, url: str) -> list[Answer]:
    from ovmstrio.client.factory import open_client

    with open_client(url, rest=protocol == "REST") as client:
        return [_ask(number, question, protocol, client.infer) for number, question in enumerate(_questions())]


def _ask(number: int, question: Question, protocol: str, ask: Ask) -> Answer:
    """Send one question several times; an error of the server is a wrong answer."""
    from statistics import median
    from time import perf_counter

    from ovmstrio.core.errors import ServerError

    durations = []
    try:
        for _ in range(_REPEATS):
            started = perf_counter()
            outputs = ask(question.model, question.inputs)
            durations.append(perf_counter() - started)
    except ServerError as error:
        return Answer(number, question, protocol, str(error), right=False, milliseconds=0)
    text = question.read(outputs)
    return Answer(number, question, protocol, text, question.is_right(text), 1000 * median(durations))


def _show(answers: Sequence[Answer], form: Output) -> None:
    """Print a row for each question, with the answer over each protocol."""
    from rich.table import Table

    by_question: dict[int, list[Answer]] = {}
    for answer in answers:
        by_question.setdefault(answer.number, []).append(answer)
    protocols = [f"over {answer.protocol}" for answer in by_question[0]]
    table = Table("model", "input", "answer", *protocols, header_style="bold", box=None, pad_edge=False)
    for said in by_question.values():
        question = said[0].question
        texts = list(dict.fromkeys(answer.text for answer in said))
        if not all(answer.right for answer in said):
            texts.append(f"[bold red]expected {question.expected}[/]")
        table.add_row(question.model, question.subject, "\n".join(texts), *(_verdict(answer) for answer in said))
    show_data(table, [_facts(answer) for answer in answers], form)
    if form is not Output.TABLE:
        return
    right = sum(answer.right for answer in answers)
    colour = "green" if right == len(answers) else "bold red"
    stdout().print(f"[{colour}]{right} of {len(answers)} answers are right[/]; times are medians", highlight=False)


def _facts(answer: Answer) -> dict[str, Any]:
    question = answer.question
    return {
        "model": question.model,
        "asked_about": question.subject,
        "protocol": answer.protocol,
        "answer": answer.text,
        "right": answer.right,
        "milliseconds": round(answer.milliseconds, 3),
    }


def _verdict(answer: Answer) -> str:
    if not answer.right:
        return "[bold red]not ok[/]"
    return f"[green]ok[/] {answer.milliseconds:6.2f} ms"


def _show_next_steps(config: Path, port: int, rest_port: int) -> None:
    from ovmstrio.samples.catalog import HANDLERS
    from ovmstrio.samples.embedded import FLOWER

    ovms, python = find_programs()
    grpc_url = "" if port == _PORT else f" --url {_HOST}:{port}"
    body = '{"inputs": [{"name": "features", "shape": [1,4], "datatype": "FP32", "data": [5.1,3.5,1.4,0.2]}]}'
    commands = (
        f"curl -s http://{_HOST}:{rest_port}/v2/models/iris/infer -d '{body}'",
        f"curl -s http://{_HOST}:{rest_port}/metrics",
        f"{ovms} infer --model iris --input features={config.with_name(FLOWER)}{grpc_url}",
        f'{ovms} stream --model counter_stream --input text="a word at a time"{grpc_url}',
        f"{ovms} models{grpc_url}",
        f"{ovms} health{grpc_url}",
        f"{python} -m ovmstrio.samples.file_type.client --input {config}{grpc_url}",
        f"{ovms} serve {HANDLERS[0].folder}    # plain Python behind HTTP; 'ovms prepare --list' has more",
    )
    stderr().print("\n[bold]still serving; try in another terminal[/]  (Ctrl-C stops the server)", highlight=False)
    for command in commands:
        stderr().print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def find_programs() -> tuple[str, str]:
    """Return the commands that run `ovms` and its Python in the user's shell: names if PATH finds them, or paths."""
    import shlex
    import shutil
    import sys

    own = Path(sys.executable)
    command = own.with_name("ovms")

    def called(name: str, path: Path) -> str:
        found = shutil.which(name)
        # Links are not followed: an environment's Python is a link to the system's Python.
        return name if found is not None and Path(found).absolute() == path.absolute() else shlex.quote(str(path))

    if not command.exists():
        return f"{called('python', own)} -m ovmstrio.cli", called("python", own)
    return called("ovms", command), called("python", own)
