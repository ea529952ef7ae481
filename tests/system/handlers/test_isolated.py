from __future__ import annotations

import json
import os
import sys
import sysconfig
import venv
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
import trio.testing

from ovmstrio.core.errors import ConfigError, MalformedPayload, ModelFailure, ServerError, UserCodeError
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.handlers.http_responses import HTTPError
from ovmstrio.handlers.isolated_handler import IsolatedHandler, IsolatedModels, open_isolated_handler
from ovmstrio.isolation.isolated_code import Isolation
from tests.support.model_projects import TEXT_MODELS, write_model
from tests.support.pipelines import gather
from tests.support.projects import make_project
from tests.support.waits import until_async

_CODE = """
import ctypes, os, signal, time
from pathlib import Path
from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.ext.handlers import HTTPError, JSONResponse

def close_all():
    os.closerange(3, 200)

def fork():
    if os.fork() == 0:
        return "the child"
    return "the parent"

def spin():
    while True:
        pass

WAYS = {
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "closerange": close_all,
    "fork": fork,
    "spin": spin,
    "own error": lambda: 1 / 0,
    "http error": lambda: (_ for _ in ()).throw(HTTPError(418, "a teapot", {"x-pot": "1"})),
    "exit code": lambda: (_ for _ in ()).throw(SystemExit(3)),
    "object": object,
}

class Handler:
    def __init__(self, config):
        self.greeting = config["greeting"]
        assert os.environ["FROM_ENV"] == "yes"

    def handle_post(self, payload, headers, query_params):
        if isinstance(payload, dict) and "wait" in payload:
            Path(payload["begun"]).touch()
            while not Path(payload["wait"]).exists():
                time.sleep(0.005)
        if isinstance(payload, dict) and payload.get("way"):
            return WAYS[payload["way"]]()
        if hasattr(payload, "multi_items"):
            payload = {name: value if isinstance(value, str) else [value.filename, value.file.read().decode()]
                       for name, value in payload.multi_items()}
        return {"greeting": self.greeting, "payload": payload, "header": headers.get("x-one"),
                "query": dict(query_params), "pid": os.getpid(), "cwd": os.getcwd()}

    def handle_get(self, query_params):
        yield "first "
        way = query_params.get("way")
        if way:
            WAYS[way]()
        yield "last"

    async def handle_put(self, payload):
        return JSONResponse(payload, status_code=201, headers={"x-two": "2"})

    async def handle_patch(self):
        yield b"a"
        yield b"b"

    def handle_delete(self, query_params):
        file = query_params["file"]
        return "done", lambda: Path(file).write_text(str(os.getpid()))
"""
_JSON = (("content-type", "application/json"), ("x-one", "1"))


@asynccontextmanager
async def _isolated(
    tmp_path: Path, code: str = _CODE, isolation: Isolation | None = None, **keys: Any
) -> AsyncIterator[IsolatedHandler]:
    keys = {"config": {"greeting": "hello"}, "env": {"FROM_ENV": "yes"}} | keys
    project = make_project(tmp_path / "project", code, **keys)
    with trio.fail_after(60):
        async with open_isolated_handler(project, isolation or Isolation(), mounted_as="") as handler:
            yield handler


async def _call(handler: IsolatedHandler, payload: Any = None, verb: str = "post", query: str = "") -> HttpAnswer:
    body = json.dumps(payload).encode()
    return await handler.answer(f"handle_{verb}", HttpRequest(verb.upper(), "/", query, _JSON, body))


async def _payload(handler: IsolatedHandler, payload: Any) -> Any:
    return json.loads((await _call(handler, payload)).content)["payload"]


async def _read(answer: HttpAnswer) -> bytes:
    assert answer.stream is not None
    try:
        return b"".join([piece async for piece in answer.stream])
    finally:
        await answer.stream.aclose()


async def test_methods_run_in_another_process_with_their_arguments_and_results(tmp_path: Path) -> None:
    async with _isolated(tmp_path) as handler:
        result = json.loads((await _call(handler, {"a": [1, 2]}, query="x=1")).content)
        assert result.pop("pid") == handler.processes.pids[0] != os.getpid()
        assert result == {
            "greeting": "hello",
            "payload": {"a": [1, 2]},
            "header": "1",
            "query": {"x": "1"},
            "cwd": str(tmp_path / "project"),
        }
        assert "FROM_ENV" not in os.environ
        answer = await _call(handler, [1], "put")
        assert (answer.status, answer.content, dict(answer.headers)["x-two"]) == (201, b"[1]", "2")
        assert await _read(await _call(handler, verb="get")) == b"first last"
        assert await _read(await _call(handler, verb="patch")) == b"ab"


async def test_forms_are_parsed_in_the_process(tmp_path: Path) -> None:
    lines = ["--b", 'content-disposition: form-data; name="file"; filename="f.txt"', "", "content", "--b--", ""]
    headers = (("content-type", "multipart/form-data; boundary=b"),)
    async with _isolated(tmp_path) as handler:
        form = HttpRequest("POST", "/", "", headers, "\r\n".join(lines).encode())
        answer = await handler.answer("handle_post", form)
        assert json.loads(answer.content)["payload"] == {"file": ["f.txt", "content"]}
        with pytest.raises(MalformedPayload) as caught:
            await handler.answer("handle_post", HttpRequest("POST", "/", "", _JSON, b"{"))
        assert caught.value.is_json


async def test_errors_of_a_handler_leave_its_process(tmp_path: Path) -> None:
    async with _isolated(tmp_path) as handler:
        for way, detail in (
            ("own error", "ZeroDivisionError: division by zero ("),
            ("exit code", "SystemExit"),
            ("object", "TypeError: an object of type 'object' is not JSON serializable"),
        ):
            with pytest.raises(UserCodeError, match="internal server error") as caught:
                await _call(handler, {"way": way})
            assert caught.value.detail.startswith(detail)
        with pytest.raises(HTTPError) as chosen:
            await _call(handler, {"way": "http error"})
        error = chosen.value
        assert (error.status_code, error.detail, error.headers) == (418, "a teapot", {"x-pot": "1"})
        answer = await _call(handler, verb="get", query="way=own error")
        with pytest.raises(UserCodeError) as caught:
            await _read(answer)
        assert "ZeroDivisionError" in caught.value.detail
        assert len(handler.processes.pids) == 1


@pytest.mark.parametrize(
    ("way", "why"),
    [("segfault", "was killed by SIGSEGV"), ("exit", "ended with status 7"), ("kill", "was killed by SIGKILL")],
)
async def test_a_crash_fails_only_its_own_call(tmp_path: Path, way: str, why: str) -> None:
    text = f"the process that ran this call {why}"
    begun, wait = tmp_path / "begun", tmp_path / "wait"
    answers: list[HttpAnswer] = []

    async def crash() -> None:
        with pytest.raises(UserCodeError, match=text):
            await _call(handler, {"way": way, "begun": str(begun), "wait": str(wait)})

    async def call() -> None:
        answers.append(await _call(handler, 1))

    async with _isolated(tmp_path) as handler:
        first = handler.processes.pids[0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(crash)
            await until_async(begun.exists)
            for _ in range(3):
                nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked(0.01)
            wait.touch()
        pids = {json.loads(answer.content)["pid"] for answer in answers}
        assert len(answers) == 3
        assert pids == {*handler.processes.pids}
        assert first not in pids
        with pytest.raises(UserCodeError, match=text):
            await _read(await _call(handler, verb="get", query=f"way={way}"))
        assert handler.unready_reason in {"", "all worker processes exited; restart pending"}
        assert await _read(await _call(handler, verb="get")) == b"first last"
        assert handler.unready_reason == ""


@pytest.mark.parametrize("verb", ["post", "get"])
async def test_a_call_that_does_not_end_is_killed(tmp_path: Path, verb: str) -> None:
    async def spin() -> None:
        answer = await _call(handler, {"way": "spin"}, verb, "way=spin")
        await _read(answer)

    async with _isolated(tmp_path, isolation=Isolation(limit_seconds=1)) as handler:
        with pytest.raises(UserCodeError, match="the process that ran this call was killed"):
            await spin()
        assert await _payload(handler, 2) == 2


async def test_a_process_that_closes_its_descriptors_is_replaced(tmp_path: Path) -> None:
    async with _isolated(tmp_path) as handler:
        with pytest.raises(UserCodeError, match="the process that ran this call"):
            await _call(handler, {"way": "closerange"})
        assert await _payload(handler, 2) == 2


async def test_the_child_of_a_fork_answers_nothing(tmp_path: Path) -> None:
    def living_children() -> list[psutil.Process]:
        living = []
        for child in psutil.Process(handler.processes.pids[0]).children():
            with suppress(psutil.NoSuchProcess):
                living += [child] if child.status() != psutil.STATUS_ZOMBIE else []
        return living

    async with _isolated(tmp_path) as handler:
        assert (await _call(handler, {"way": "fork"})).content == b"the parent"
        await until_async(lambda: not living_children())
        assert await _payload(handler, 2) == 2


async def test_callbacks_run_in_the_process_after_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "after"
    async with _isolated(tmp_path) as handler:
        answer = await _call(handler, verb="delete", query=f"file={file}")
        assert answer.content == b"done"
        assert not file.exists()
        handler.run_after(answer.after)
        await until_async(lambda: file.exists() and file.read_text())
        assert file.read_text() == str(handler.processes.pids[0])


async def test_a_generator_is_closed_in_the_process_if_its_client_leaves(tmp_path: Path) -> None:
    code = """
from pathlib import Path
class Handler:
    def handle_get(self, query_params):
        try:
            while True:
                yield "more"
        finally:
            Path(query_params["file"]).write_text("closed")
"""
    file = tmp_path / "closed"
    async with _isolated(tmp_path, code) as handler:
        answer = await _call(handler, verb="get", query=f"file={file}")
        assert answer.stream is not None
        assert await anext(answer.stream) == b"more"
        await answer.stream.aclose()
        await until_async(file.exists)


async def test_a_batch_is_one_call_of_the_process(tmp_path: Path) -> None:
    code = """
import os
from ovmstrio.ext.handlers import HTTPError
class Handler:
    def handle_post(self, payload):
        if "die" in payload:
            os._exit(1)
        return [HTTPError(422, "no") if each == "no" else [each, len(payload), os.getpid()] for each in payload]
"""

    async def call(payload: Any) -> Any:
        try:
            return json.loads((await _call(handler, payload)).content)[:2]
        except (ServerError, HTTPError) as error:
            return str(error)

    batching = {"max_batch_size": 3, "batch_interval_seconds": 10}
    async with _isolated(tmp_path, code, server_side_batching=batching, threads_per_process=2) as handler:
        assert await gather(call, [1, "no", 2]) == [[1, 3], "422: no", [2, 3]]
        assert await gather(call, ["die", 3, 4]) == ["the process that ran this call ended with status 1"] * 3
        assert await gather(call, [5, 6, 7]) == [[5, 3], [6, 3], [7, 3]]


async def test_models_are_opened_in_the_process(tmp_path: Path) -> None:
    for name in "ab":
        write_model(tmp_path, f"model {name}", "project", "up", name)
    models = {"dir": "up", "cache_size": 1, "disk_cache_size": 2}
    async with _isolated(tmp_path, TEXT_MODELS, multi_model_reloading=models) as handler:
        assert [(await _call(handler, name)).content for name in "aba"] == [b"model a", b"model b", b"model a"]
        assert (await _call(handler, "b", "put")).content == b"model b"
        info = await trio.to_thread.run_sync(IsolatedModels(handler).info)
        assert list(info["model_metadata"]) == ["a", "b"]
    with pytest.raises(ConfigError, match="cached models require a single process"):
        async with _isolated(tmp_path, TEXT_MODELS, Isolation(processes=2), multi_model_reloading=models):
            pass


async def test_a_handler_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        async with _isolated(tmp_path, "class Handler:\n    def __init__(self): 1 / 0\n    def handle_get(self): ..."):
            pass
    (problem,) = caught.value.problems
    assert (Path(problem.file).name, problem.line) == ("handler.py", 2)
    assert "ZeroDivisionError" in problem.message
    with pytest.raises(ModelFailure, match="its process"):
        async with _isolated(tmp_path, "import os\nos._exit(3)"):
            pass


async def test_several_processes_share_the_calls(tmp_path: Path) -> None:
    begun, wait = tmp_path / "begun", tmp_path / "wait"

    async def call(number: int) -> int:
        answer = await _call(handler, {"begun": f"{begun}{number}", "wait": str(wait)})
        return int(json.loads(answer.content)["pid"])

    async def release() -> None:
        await until_async(lambda: len(list(tmp_path.glob("*begun*"))) == 2)
        wait.touch()

    async with _isolated(tmp_path, isolation=Isolation(processes=2)) as handler, trio.open_nursery() as nursery:
        nursery.start_soon(release)
        first, second = await gather(call, range(2))
    assert first != second


async def test_a_handler_has_the_packages_of_its_environment(tmp_path: Path) -> None:
    venv.EnvBuilder(symlinks=True).create(tmp_path / "venv")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    (packages / "only_here.py").write_text("NAME = 'only here'")
    (packages / "servers.pth").write_text("\n".join(each for each in sys.path if each))
    code = """
import sys
import only_here
class Handler:
    def handle_post(self, payload):
        return [only_here.NAME, sys.prefix, payload]
"""
    isolation = Isolation(python=tmp_path / "venv" / "bin" / "python")
    async with _isolated(tmp_path, code, isolation, config={}, env={}) as handler:
        answer = await _call(handler, {"a": [1]})
    assert isinstance(answer.body, bytes)
    assert json.loads(answer.body) == ["only here", str(tmp_path / "venv"), {"a": [1]}]
