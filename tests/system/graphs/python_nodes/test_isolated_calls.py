from __future__ import annotations

import gc
import os
import sys
import venv
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError, Overloaded
from ovmstrio.graphs.calculator import NodeFailure
from ovmstrio.graphs.graph_config import Port
from ovmstrio.isolation import isolated_code
from ovmstrio.isolation.isolated_code import Isolation
from ovmstrio.isolation.print_capture import log_prints
from pyovms import Tensor
from tests.support.graph_nodes import Node, make_node, nodes
from tests.support.graphs import handler
from tests.support.waits import WAIT_SECONDS, until_async


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


PLACES = (None, Isolation())
GENERATIVE = make_node(outputs=["OUT:out"], generative=True)

FAILING = """
import sys
from helper import fail
from ovmstrio.errors import InvalidRequest, Overloaded
class Mine(Overloaded):
    pass
class Strange(Exception):
    def __init__(self, one, two):
        super().__init__(one)
        self.two = two
class OvmsPythonModel:
    def execute(self, inputs):
        return getattr(self, bytes(inputs[0]).decode())()
    def value(self):
        raise ValueError('bad value')
    def module(self):
        import no_such_module
    def exit(self):
        sys.exit(3)
    def strange(self):
        raise Strange(1, 2)
    def chained(self):
        try:
            fail()
        except KeyError as error:
            raise RuntimeError('outer') from error
    def group(self):
        raise ExceptionGroup('many', [ValueError('one'), KeyError('two')])
    def server(self):
        raise InvalidRequest('not so')
    def own(self):
        raise Mine('later', retry_after_seconds=7)
    def name(self):
        return [Tensor('other', b'')]
    def generator(self):
        yield []
"""


async def failure_of(folder: Path, method: str, isolation: Isolation | None) -> dict[str, Any]:
    (folder / "helper.py").write_text("def fail():\n    raise KeyError('helper')\n")
    async with nodes(folder, isolation=isolation) as made:
        node = await made.load(source=FAILING)
        with capture_logs() as logs:
            try:
                await node.run_once(method.encode())
            except Exception as error:  # noqa: BLE001 - compared with another error
                caught = error
    reported: dict[str, Any] = {"class": [each.__name__ for each in type(caught).__mro__], "text": str(caught)}
    reported["retry"] = getattr(caught, "retry_after_seconds", None)
    for entry in logs:
        kind, logged, frames = entry["exc_info"]
        reported["logged"] = [kind.__name__, str(logged), type(logged.__cause__).__name__]
        reported["frames"] = []
        while frames is not None and len(reported["frames"]) < 5:
            code = frames.tb_frame.f_code
            reported["frames"].append((code.co_filename, frames.tb_lineno, code.co_name))
            frames = frames.tb_next
    return reported


METHODS = [line.split()[1].partition("(")[0] for line in FAILING.splitlines() if line.startswith("    def ")][2:]


@pytest.mark.parametrize("method", METHODS)
async def test_errors_are_those_of_threads(tmp_path: Path, method: str) -> None:
    in_threads, in_process = [await failure_of(tmp_path, method, isolation) for isolation in PLACES]
    assert in_process == in_threads
    assert "Error occurred during graph execution" in in_threads["text"] or method in {"server", "own"}


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        "import no_such_thing.inside",
        "def broken(:\n    pass",
        "class OvmsPythonModel:\n    def execute(self, i): ...\n    def initialize(self, kwargs):\n        1 / 0",
        "class OvmsPythonModel:\n    def execute(self, i): ...\n    async def initialize(self, kwargs):\n        1 / 0",
    ],
)
async def test_errors_of_loading_are_those_of_threads(tmp_path: Path, source: str) -> None:
    reported = []
    for isolation in PLACES:
        async with nodes(tmp_path, isolation=isolation) as made:
            with pytest.raises(ConfigError) as raised, capture_logs():
                await made.load(source=source)
            reported.append(raised.value.problems)
    assert reported[0] == reported[1]


async def test_arrays_of_every_type_and_size_pass(tmp_path: Path) -> None:
    body = """
    (tensor,) = inputs
    text = f"{tensor.shape} {tensor.datatype} {tensor.data.format} {tensor.size} {tensor.ref_obj}".encode()
    x = np.asarray(tensor)
    return [Tensor("out", x.copy()), Tensor("same", tensor), Tensor("as", x, [7], "9w"), Tensor("text", text)]
    """
    source = handler(body, head="import numpy as np")
    node = make_node(outputs=["OUT:out", "SAME:same", "AS:as", "TEXT:text"])
    async with nodes(tmp_path, isolation=Isolation()) as made:
        loaded = await made.load(node, source)
        async with loaded.opened() as opened:
            for code in ["?", "B", "H", "I", "Q", "b", "h", "i", "q", "e", "f", "d", "<U7"]:
                for shape in [(), (0,), (2, 3), (300, 400)]:
                    array = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(code)
                    tensor = Tensor("in", array)
                    call = await opened.process(0, {Port("IN", 0): tensor})
                    out, same, renamed, reported = [each for _, each, _ in call.emitted]
                    np.testing.assert_array_equal(np.asarray(out), array)
                    np.testing.assert_array_equal(np.asarray(same), array)
                    assert (out.shape, out.datatype, out.data.format) == (shape, tensor.datatype, tensor.data.format)
                    assert (renamed.shape, renamed.datatype, bytes(renamed)) == ((7,), "9w", array.tobytes())
                    expected = f"{shape} {tensor.datatype} {tensor.data.format} {array.nbytes} None"
                    assert bytes(reported).decode() == expected


async def test_large_outputs_are_shared_memory(tmp_path: Path) -> None:
    body = """
    if not inputs[0].size:
        return [Tensor("out", np.full(10**6, 7, np.uint8))]
    where = [line for line in open("/proc/self/maps") if "memfd" in line]
    address = np.asarray(inputs[0]).__array_interface__["data"][0]
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in where]
    return [Tensor("out", b"%d" % sum(low <= address < high for low, high in spans))]
    """
    source = handler(body, head="import numpy as np")
    async with nodes(tmp_path, isolation=Isolation()) as made:
        first, second = await made.load(source=source), await made.load(make_node(name="second"))
        async with first.opened() as one, second.opened() as other:
            ((_, out, _),) = (await one.run()).emitted
            view = np.asarray(out)
            assert not view.flags.owndata
            assert (view.sum(), view.flags.writeable) == (7 * 10**6, False)
            files = open_files()
            assert (await other.process(0, {Port("IN", 0): out})).texts == [(0, "out", "1")]
            assert open_files() <= files + 2


async def test_context_is_that_of_the_call(tmp_path: Path) -> None:
    source = """
    from pathlib import Path
    from pyovms import current_context
    class OvmsPythonModel:
        def open(self, context):
            assert current_context() is context
            context.storage.seen = 1
        def execute(self, inputs):
            context = current_context()
            context.storage.seen += 1
            values = context.request_id, dict(context.parameters), round(context.remaining(), -4), context.storage.seen
            return [Tensor("out", repr(values).encode())]
        def close(self, context):
            assert current_context() is context
            (Path(__file__).parent / "closed").open("a").write(f"{context.storage.seen} ")
    """
    async with nodes(tmp_path, isolation=Isolation(processes=2)) as made:
        node = await made.load(source=source)
        deadline = trio.current_time() + 1e6
        async with node.opened(deadline, a=1) as first, node.opened(deadline, b="x") as second:
            printed = [(await opened.run()).texts[0][2] for opened in (first, second, first)]
    assert printed == [
        "('request-1', {'a': 1}, 1000000.0, 2)",
        "('request-1', {'b': 'x'}, 1000000.0, 2)",
        "('request-1', {'a': 1}, 1000000.0, 3)",
    ]
    assert sorted((tmp_path / "closed").read_text().split()) == ["2", "3"]


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_generators_run_by_credit(tmp_path: Path, prefix: str) -> None:
    source = f"""
    from pyovms import current_context
    class OvmsPythonModel:
        made = 0
        {prefix}def execute(self, inputs):
            count = int(bytes(inputs[0]))
            if count < 0:
                yield [Tensor("out", b"%d" % self.made)]
                return
            for self.made in range(count):
                current_context().storage.count = self.made
                yield [Tensor("out", b"%d" % current_context().storage.count)]
    """
    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await made.load(GENERATIVE, source)
        async with node.opened() as opened:
            calls = await opened.generate(b"100", 10)
            again = await opened.generate(b"3", 500)
        assert [each for call in calls for each in call.texts] == [(10 + i, "out", str(i)) for i in range(100)]
        assert [each[2] for call in again for each in call.texts] == ["0", "1", "2"]
        async with node.opened() as opened, node.opened() as other:
            await opened.run(b"1000")
            ((_, _, text),) = (await other.run(b"-1")).texts
            assert int(text) <= (0 if prefix else 32)


async def test_call_of_a_disconnected_client_is_cancelled(tmp_path: Path) -> None:
    body = """
    if bytes(inputs[0]) == b"wait":
        Path(__file__).with_name("started").touch()
        while not current_context().is_cancelled():
            time.sleep(0.001)
        Path(__file__).with_name("heard").touch()
    return []
    """
    source = handler(body, head="import time\nfrom pathlib import Path\nfrom pyovms import current_context")
    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await made.load(source=source)
        before = node.resources.code.code.pids
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run_once, b"wait")
            await until_async((tmp_path / "started").exists)
            nursery.cancel_scope.cancel()
        await until_async((tmp_path / "heard").exists)
        assert await node.run_once(b"ok") == []
        assert node.resources.code.code.pids == before


async def test_calls_are_spread_over_processes(tmp_path: Path) -> None:
    body = """
    if not inputs[0].size:
        Path(__file__).with_name(f"started-{os.getpid()}").touch()
        while len(list(Path(__file__).parent.glob("started-*"))) < 2:
            time.sleep(0.001)
    return [Tensor("out", b"%d" % os.getpid())]
    """
    source = handler(body, head="import os, time\nfrom pathlib import Path")
    printed: list[str] = []
    async with nodes(tmp_path, isolation=Isolation(processes=2)) as made:
        node = await made.load(source=source)

        async def run() -> None:
            printed.append((await node.run_once())[0][2])

        with trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(run)
        assert sorted(map(int, printed)) == sorted(node.resources.code.code.pids)
        async with node.opened() as opened:
            stream = {(await opened.run(b"x")).texts[0][2] for _ in range(5)}
        assert len(stream) == 1


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_process_outlives_the_stream_of_a_disconnected_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setattr(isolated_code, "GRACE_SECONDS", WAIT_SECONDS)
    wait = "await trio.sleep(0.02)" if prefix else "time.sleep(0.02)"
    head = "import trio" if prefix else "import time"
    source = f"""
    {head}
    class OvmsPythonModel:
        alive = 0
        {prefix}def execute(self, inputs):
            if inputs[0].size:
                yield [Tensor("out", b"%d" % self.alive)]
                return
            self.alive += 1
            try:
                while True:
                    {wait}
                    yield [Tensor("out", b"x")]
            finally:
                self.alive -= 1
    """
    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await made.load(GENERATIVE, source)
        before = node.resources.code.code.pids
        for milliseconds in range(0, 60, 3):
            with trio.move_on_after(milliseconds / 1000):
                async with node.opened() as opened:
                    await opened.go_on(await opened.run())
        with trio.fail_after(WAIT_SECONDS):
            while [each[2] for each in await node.run_once(b"x")] != ["0"]:
                pass
        assert node.resources.code.code.pids == before


KEEPING = """
import gc, time, weakref
from pathlib import Path
from pyovms import current_context
class Kept:
    pass
class OvmsPythonModel:
    def initialize(self, kwargs):
        self.kept = weakref.WeakSet()
    def execute(self, inputs):
        action, context = bytes(inputs[0]).decode(), current_context()
        if action == "count":
            gc.collect()
            return [Tensor("out", b"%d" % len(self.kept))]
        context.storage.kept = Kept()
        self.kept.add(context.storage.kept)
        if action == "raise":
            raise ValueError
        if action == "wrong":
            return [1]
        (Path(__file__).parent / "waits").touch()
        while not context.is_cancelled():
            time.sleep(0.001)
"""


@pytest.mark.parametrize("action", ["raise", "wrong", "wait"])
async def test_state_of_a_failed_or_cancelled_call_is_released(tmp_path: Path, action: str) -> None:
    async def attempt() -> None:
        with suppress(NodeFailure):
            await node.run_once(action.encode())

    async def kept() -> int:
        return int((await node.run_once(b"count"))[0][2])

    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await made.load(source=KEEPING)
        with capture_logs():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attempt)
                if action == "wait":
                    await until_async((tmp_path / "waits").exists)
                    assert await kept() == 1
                    nursery.cancel_scope.cancel()
        with trio.fail_after(WAIT_SECONDS):
            while await kept():
                await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_generator_of_an_invalid_value_is_closed(tmp_path: Path, prefix: str) -> None:
    body = "try:\n    yield None\nfinally:\n    (Path(__file__).parent / 'closed').touch()"
    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await made.load(GENERATIVE, handler(body, prefix=prefix, head="from pathlib import Path"))
        with pytest.raises(NodeFailure, match="yielded a NoneType"):
            await node.run_once()
        await until_async((tmp_path / "closed").exists)


@pytest.mark.slow
async def test_ten_thousand_calls_do_not_grow_the_memory(tmp_path: Path) -> None:
    body = """
    if inputs[0].size == 1:
        raise ValueError("x" * 1000)
    yield [Tensor("out", np.asarray(inputs[0]) + 1)]
    yield [Tensor("out", b"y")]
    """
    source = handler(body, head="import numpy as np")

    async def ask(number: int) -> None:
        size = (100_000 + number % 7 * 50_000) if number % 5 else 1
        with suppress(NodeFailure):
            async with node.opened() as opened:
                call = await opened.run(bytes(size))
                if number % 3:
                    await opened.go_on(call)

    def memory() -> list[int]:
        gc.collect()
        return [psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *node.resources.code.code.pids)]

    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await made.load(GENERATIVE, source)
        with capture_logs() as logs:
            for number in range(10_000):
                await ask(number)
                logs.clear()
                if number == 1_000:
                    before, files = memory(), open_files()
        grown = [after - first for after, first in zip(memory(), before, strict=True)]
        assert max(grown) < 8 * 2**20, grown
        assert abs(open_files() - files) < 10


PAIRED = """
import time
from pathlib import Path
FOLDER = Path(__file__).parent
class OvmsPythonModel:
    {prefix}def open(self, context):
        with (FOLDER / "opened").open("a") as file:
            file.write("x")
        {wait}
    def execute(self, inputs):
        return []
    {prefix}def close(self, context):
        with (FOLDER / "closed").open("a") as file:
            file.write("x")
"""


@pytest.mark.parametrize("place", ["threads", "loop", "processes"])
async def test_each_open_is_followed_by_a_close(tmp_path: Path, place: str) -> None:
    is_async = place == "loop"
    source = PAIRED.format(
        prefix="async " if is_async else "",
        wait="import trio; await trio.sleep(0.002)" if is_async else "time.sleep(0.002)",
    )
    isolation = Isolation(processes=2) if place == "processes" else None

    async def connect_briefly(node: Node, seconds: float) -> None:
        with trio.move_on_after(seconds):
            async with node.opened():
                await trio.sleep_forever()

    async with nodes(tmp_path, isolation=isolation, limit=2) as made:
        node = await made.load(source=source)
        async with trio.open_nursery() as nursery:
            for number in range(150):
                nursery.start_soon(connect_briefly, node, number % 40 / 4000)
        # On a busy machine all of these may have left before a thread was free.
        async with node.opened():
            await until_async((tmp_path / "opened").exists)
    opened, closed = ((tmp_path / name).read_text() for name in ("opened", "closed"))
    assert len(opened) == len(closed) > 0


LIFECYCLE = """
import sys
print("imported")
class OvmsPythonModel:
    def initialize(self, kwargs):
        print("initialized", kwargs["node_name"])
    {execute}
    def finalize(self):
        print("finalized")
"""
PLAIN = """
    def execute(self, inputs):
        print("pl", end="", flush=True)
        print("ain")
        print("left open", end="")
        return [Tensor("out", b"")]
"""
ASYNC = PLAIN.replace("def", "async def")
GENERATOR = """
    def execute(self, inputs):
        print("plain")
        yield [Tensor("out", b"")]
        print("left open", end="")
"""


@pytest.mark.parametrize("isolation", [None, Isolation()], ids=["threads", "processes"])
@pytest.mark.parametrize("execute", [PLAIN, ASYNC, GENERATOR], ids=["plain", "async", "generator"])
async def test_each_line_is_logged_with_its_node(tmp_path: Path, execute: str, isolation: Isolation | None) -> None:
    node = make_node(name="counter", generative=execute is GENERATOR)
    with capture_logs() as logged, log_prints():
        async with nodes(tmp_path, isolation=isolation) as opened:
            loaded = await opened.load(node, LIFECYCLE.replace("    {execute}", execute))
            async with loaded.opened() as instance:
                await instance.generate()
    lines = [(line["event"], line["servable"], line["node"], line["stream"]) for line in logged]
    printed = ["imported", "initialized counter", "plain", "left open", "finalized"]
    assert lines == [(text, "graph", "counter", "stdout") for text in printed]


PACKAGES = """
import sys
import only_here
from ovmstrio.errors import Overloaded
class OvmsPythonModel:
    def execute(self, inputs):
        if inputs[0].size:
            raise Overloaded(only_here.NAME, retry_after_seconds=3)
        return self.all()
    def all(self):
        for package in ("trio", "structlog", "pydantic"):
            try:
                __import__(package)
            except ImportError as error:
                yield [Tensor("out", str(error).encode())]
        yield [Tensor("out", f"{only_here.NAME} {sys.prefix}".encode())]
"""


def write_environment(folder: Path, *, has_numpy: bool = True) -> Path:
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "only_here.py").write_text("NAME = 'only here'")
    (packages / "structlog.py").write_text("raise ImportError('fits no server')")
    if has_numpy:
        home = Path(np.__file__).parents[1]
        for name in ("numpy", "numpy.libs"):
            if (home / name).exists():
                (packages / name).symlink_to(home / name)
    return folder / "bin" / "python"


async def test_node_has_the_packages_of_its_environment(tmp_path: Path) -> None:
    isolation = Isolation(python=write_environment(tmp_path / "venv"))
    async with nodes(tmp_path, isolation=isolation) as made:
        node = await made.load(make_node(generative=True), PACKAGES)
        async with node.opened() as opened:
            printed = [text for call in await opened.generate() for _, _, text in call.texts]
            with capture_logs(), pytest.raises(Overloaded, match=r"^only here$") as raised:
                await opened.run(b"x")
    assert printed == [
        "No module named 'trio'",
        "fits no server",
        "No module named 'pydantic'",
        f"only here {tmp_path / 'venv'}",
    ]
    assert raised.value.retry_after_seconds == 3


async def test_async_code_needs_trio(tmp_path: Path) -> None:
    source = "class OvmsPythonModel:\n    async def execute(self, inputs):\n        return []\n"
    async with nodes(tmp_path, isolation=Isolation(python=write_environment(tmp_path / "venv"))) as made:
        node = await made.load(source=source)
        with capture_logs(), pytest.raises(Exception, match="No module named 'trio'"):
            await node.run_once()


@pytest.mark.parametrize(
    ("has_numpy", "python", "text"),
    [
        (False, "venv/bin/python", "its interpreter has no numpy, which pyovms needs"),
        (True, "missing", "No such file or directory"),
    ],
)
async def test_unusable_interpreter_is_a_problem_of_the_node(
    tmp_path: Path, has_numpy: bool, python: str, text: str
) -> None:
    write_environment(tmp_path / "venv", has_numpy=has_numpy)
    async with nodes(tmp_path, isolation=Isolation(python=tmp_path / python)) as made:
        with capture_logs(), pytest.raises(ConfigError, match=text):
            await made.load(source="class OvmsPythonModel:\n    def execute(self, inputs):\n        return []\n")
