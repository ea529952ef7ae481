from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.core.errors import Overloaded
from ovmstrio.graphs.calculator import NodeFailure
from ovmstrio.graphs.graph_config import Port
from pyovms import Tensor
from tests.support.graph_nodes import Node, Opened, make_node, nodes
from tests.support.graphs import handler
from tests.support.waits import WAIT_SECONDS, until_async

PREFIX = "Error occurred during graph execution"
PREFIXES = pytest.mark.parametrize("prefix", ["", "async "])


async def failure_of(node: Node, text: bytes = b"") -> str:
    with pytest.raises(NodeFailure) as raised:
        await node.run_once(text)
    assert raised.value.code == "INTERNAL"
    return raised.value.message


async def test_outputs_have_the_timestamp_of_their_inputs(tmp_path: Path) -> None:
    source = handler("return [Tensor('b', bytes(inputs[0]) * 2), Tensor('a', b'x')]")
    async with nodes(tmp_path) as made:
        node = await made.load(make_node(outputs=["A:b", "B:a"]), source)
        async with node.opened() as opened:
            call = await opened.run(b"1", 5)
    assert [(port, each.name, bytes(each), time) for port, each, time in call.emitted] == [
        (Port("A", 0), "b", b"11", 5),
        (Port("B", 0), "a", b"x", 5),
    ]


async def test_inputs_are_those_with_a_packet(tmp_path: Path) -> None:
    source = handler("return [Tensor('out', ' '.join(each.name for each in inputs).encode())]")
    async with nodes(tmp_path) as made:
        node = await made.load(make_node(inputs=["C:c", "A:a", "B:b"]), source)
        async with node.opened() as opened:
            calls = [await opened.run(A=b"", C=b"", B=b""), await opened.run(C=b""), await opened.process(0, {})]
    assert [call.texts[0][2] for call in calls] == ["a b c", "c", ""]


@pytest.mark.parametrize("code", ["?", "B", "H", "I", "Q", "b", "h", "i", "q", "e", "f", "d", "<U7"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
async def test_arrays_of_every_type_and_shape_pass(tmp_path: Path, code: str, shape: tuple[int, ...]) -> None:
    source = handler(
        "import numpy as np\nx = np.asarray(inputs[0])\n"
        "return [Tensor('out', x.astype(x.dtype)), Tensor('as', x, [7], '9w')]"
    )
    array = np.ones(shape, code)
    async with nodes(tmp_path) as made:
        node = await made.load(make_node(outputs=["OUT:out", "AS:as"]), source)
        async with node.opened() as opened:
            call = await opened.process(0, {Port("IN", 0): Tensor("in", array)})
    (_, out, _), (_, renamed, _) = call.emitted
    np.testing.assert_array_equal(np.asarray(out), array)
    assert (out.shape, out.datatype) == (shape, Tensor("x", array).datatype)
    assert (renamed.shape, renamed.datatype, bytes(renamed)) == ((7,), "9w", array.tobytes())


@pytest.mark.parametrize(
    ("result", "count"), [("None", 0), ("[]", 0), ("[Tensor('b', b'')]", 1), ("Mine([Tensor('b', b'')])", 1)]
)
async def test_outputs_are_optional(tmp_path: Path, result: str, count: int) -> None:
    async with nodes(tmp_path) as made:
        source = handler(f"return {result}", head="class Mine(list): ...")
        node = await made.load(make_node(outputs=["A:a", "B:b"]), source)
        assert len(await node.run_once()) == count


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ValueError('bad value')", "ValueError: bad value (handler.py:6)"),
        ("raise ValueError", "ValueError (handler.py:6)"),
        ("import numpy\nnumpy.zeros(-1)", "ValueError: negative dimensions are not allowed (handler.py:7)"),
        ("import json\njson.loads('{')", "JSONDecodeError"),
        ("import json\njson.loads('{')", "(handler.py:7)"),
        ("return [1 / 0]", "ZeroDivisionError: division by zero (handler.py:6)"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (handler.py:6)"),
        ("from helper import fail\nfail()", "KeyError: 'helper' (helper.py:2)"),
        ("raise SystemExit(3)", "SystemExit: 3 (handler.py:6)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt (handler.py:6)"),
        ("raise StopIteration", "StopIteration (handler.py:6)"),
        ("raise GeneratorExit", "GeneratorExit (handler.py:6)"),
        ("return (Tensor('out', b''),)", "Unexpected Python object type. Expected: list or generator. Received: tuple"),
        ("return Tensor('out', b'')", "Received: Tensor"),
        ("return [Tensor('out', b''), 1]", "execute returned a list whose element 1 is an int; expected pyovms.Tensor"),
        ("return [None]", "element 0 is a NoneType"),
        ("return [Tensor('other', b'')]", "Tensor name: other is not a valid node output; expected one of: out"),
        ("yield [Tensor('out', b'')]", "Execute yielded, but LOOPBACK is not defined in the node"),
        ("return iter([])", "Execute yielded, but LOOPBACK is not defined in the node"),
    ],
)
async def test_failures_name_error_and_line(tmp_path: Path, body: str, text: str) -> None:
    source = handler(f"if bytes(inputs[0]) == b'ok':\n    return []\n{body}")
    async with nodes(tmp_path) as made:
        made.write("helper.py", "def fail():\n    raise KeyError('helper')\n")
        node = await made.load(source=source)
        if "yield" not in body:
            assert await node.run_once(b"ok") == []
        message = await failure_of(node, b"bad")
        assert message.startswith(PREFIX)
        assert text in message
        if "yield" not in body:
            assert await node.run_once(b"ok") == []


@pytest.mark.parametrize(
    ("signature", "text"),
    [("self", "takes 1 positional argument but 2 were given (handler.py:3)"), ("self, a, b", "(handler.py:3)")],
)
async def test_execute_with_a_wrong_signature_fails_at_its_definition(
    tmp_path: Path, signature: str, text: str
) -> None:
    async with nodes(tmp_path) as made:
        node = await made.load(source=f"class OvmsPythonModel:\n    def execute({signature}):\n        return []\n")
        assert text in await failure_of(node)


async def test_long_error_is_truncated(tmp_path: Path) -> None:
    async with nodes(tmp_path) as made:
        node = await made.load(source=handler("raise ExceptionGroup('x' * 10**7, [ValueError('y' * 10**7)])"))
        with capture_logs():
            assert len(await failure_of(node)) < 8192


async def test_hidden_errors_show_only_their_type(tmp_path: Path) -> None:
    async with nodes(tmp_path, hide_errors=True) as made:
        node = await made.load(source=handler("raise ValueError('secret')"))
        with capture_logs() as logs:
            assert await failure_of(node) == f"{PREFIX}: ValueError"
        wrong = await made.load(make_node("wrong.py", name="wrong"), handler("return [Tensor('secret', b'')]"))
        assert await failure_of(wrong) == PREFIX
    (entry,) = logs
    logged = {key: entry[key] for key in ("servable", "node", "request_id", "step")}
    assert logged == {"servable": "graph", "node": "node", "request_id": "request-1", "step": "execute"}
    frame = entry["exc_info"][2]
    assert (frame.tb_frame.f_code.co_name, frame.tb_next) == ("execute", None)


async def test_server_errors_keep_their_class(tmp_path: Path) -> None:
    async with nodes(tmp_path) as made:
        node = await made.load(source=handler("from ovmstrio.core.errors import Overloaded\nraise Overloaded('later')"))
        with pytest.raises(Overloaded, match=r"^later$"):
            await node.run_once()


async def test_coroutine_of_a_decorated_method_is_awaited(tmp_path: Path) -> None:
    source = """
    import functools, trio
    def decorated(method):
        def call(*args):
            return method(*args)
        return call
    class OvmsPythonModel:
        @decorated
        async def initialize(self, kwargs):
            await trio.sleep(0)
            self.ready = b"ready"
        @decorated
        async def execute(self, inputs):
            await trio.sleep(0)
            return [Tensor("out", self.ready)]
    """
    async with nodes(tmp_path) as made:
        assert await (await made.load(source=source)).run_once() == [(0, "out", "ready")]


async def test_instances_run_concurrently(tmp_path: Path) -> None:
    source = """
    import threading
    class OvmsPythonModel:
        def initialize(self, kwargs):
            self.all_here = threading.Barrier(4)
        def execute(self, inputs):
            self.all_here.wait(60)
            return [Tensor("out", b"")]
    """
    async with nodes(tmp_path) as made:
        node = await made.load(source=source)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(node.run_once)


HOOKS = """
from pyovms import current_context
class OvmsPythonModel:
    events = []
    {prefix}def open(self, context):
        assert current_context() is context
        context.storage.seen = 1
        {open}
        self.events.append("opened")
    def execute(self, inputs):
        {execute}
        context = current_context()
        context.storage.seen += 1
        return [Tensor("out", f"{{context.storage['seen']}} {{dict(context.parameters)}}".encode())]
    {prefix}def close(self, context):
        assert current_context() is context
        self.events.append(f"closed {{context.storage.seen}}")
        {close}
"""


def hooks(prefix: str = "", open: str = "", execute: str = "", close: str = "") -> str:  # noqa: A002 - the method's name
    return HOOKS.format(prefix=prefix, open=open, execute=execute, close=close)


@PREFIXES
async def test_each_instance_has_open_close_and_storage(tmp_path: Path, prefix: str) -> None:
    async with nodes(tmp_path) as made:
        node = await made.load(source=hooks(prefix))
        async with node.opened(a=1) as first, node.opened(b=2) as second:
            calls = [await first.run(), await second.run(), await first.run()]
        assert [call.texts[0][2] for call in calls] == ["2 {'a': 1}", "2 {'b': 2}", "3 {'a': 1}"]
        assert node.resources.model.events == ["opened", "opened", "closed 2", "closed 3"]


@pytest.mark.parametrize("parameters", ["ctx", "ctx, /", "ctx=None", "ctx, *, more=1", "ctx, **more"])
async def test_hooks_get_the_context_by_position(tmp_path: Path, parameters: str) -> None:
    source = f"""
    from pyovms import current_context
    class OvmsPythonModel:
        events = []
        def open(self, {parameters}):
            self.events.append(("opened", ctx is current_context()))
        def execute(self, inputs):
            return [Tensor("out", b"fine")]
        def close(self, {parameters}):
            self.events.append(("closed", ctx is current_context()))
    """
    async with nodes(tmp_path) as made:
        node = await made.load(source=source)
        await node.run_once()
        assert node.resources.model.events == [("opened", True), ("closed", True)]


@PREFIXES
async def test_error_in_open_ends_the_instance_without_close(tmp_path: Path, prefix: str) -> None:
    async with nodes(tmp_path) as made:
        node = await made.load(source=hooks(prefix, open="raise ValueError('no')"))
        with pytest.raises(NodeFailure, match=r"ValueError: no \(handler\.py:8\)"):
            async with node.opened():
                pass
        assert node.resources.model.events == []


@PREFIXES
async def test_close_follows_a_failed_execute_and_its_error_is_logged(tmp_path: Path, prefix: str) -> None:
    async with nodes(tmp_path) as made:
        node = await made.load(source=hooks(prefix, execute="raise ValueError('no')", close="raise KeyError('close')"))
        with capture_logs() as logs, pytest.raises(NodeFailure, match="ValueError: no"):
            await node.run_once()
        assert node.resources.model.events == ["opened", "closed 1"]
    assert [entry["step"] for entry in logs] == ["execute", "close"]


async def test_methods_with_other_signatures_are_not_hooks(tmp_path: Path) -> None:
    source = """
    class OvmsPythonModel:
        def close(self):
            raise AssertionError
        def open(self, path, mode="r"):
            raise AssertionError(path)
        def execute(self, inputs):
            return [Tensor("out", b"fine")]
    """
    async with nodes(tmp_path) as made:
        assert await (await made.load(source=source)).run_once() == [(0, "out", "fine")]


async def test_close_that_does_not_end_is_abandoned(tmp_path: Path) -> None:
    async with nodes(tmp_path, grace_seconds=0.02) as made:
        node = await made.load(source=hooks(close="self.gate.wait()"))
        node.resources.model.gate = gate = threading.Event()
        with capture_logs() as logs, trio.fail_after(WAIT_SECONDS):
            await node.run_once()
        assert made.threads.stuck == 1
        gate.set()
    assert "Python node close timed out" in [entry["event"] for entry in logs]


@pytest.mark.parametrize("stops", [True, False])
async def test_run_of_a_disconnected_client_is_cancelled(tmp_path: Path, stops: bool) -> None:
    body = """
    if bytes(inputs[0]) == b"ok":
        return []
    self.started.set()
    while not (current_context().is_cancelled() and self.stops or self.gate.wait(0.001)):
        pass
    self.ended.set()
    return []
    """
    source = handler(body, head="from pyovms import current_context")

    async def disconnect(opened: Opened) -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await opened.run()
        assert scope.cancelled_caught

    scopes: list[trio.CancelScope] = []
    async with nodes(tmp_path, grace_seconds=5 if stops else 0.02) as made:
        node = await made.load(source=source)
        model = node.resources.model
        model.stops = stops
        model.started, model.gate, model.ended = threading.Event(), threading.Event(), threading.Event()
        async with node.opened() as opened, trio.open_nursery() as nursery:
            nursery.start_soon(disconnect, opened)
            await until_async(model.started.is_set)
            scopes[0].cancel()
        assert (model.ended.is_set(), made.threads.stuck) == (stops, 0 if stops else 1)
        assert await node.run_once(b"ok") == []
        model.gate.set()
        await until_async(lambda: made.threads.stuck == 0)


async def test_context_has_deadline_parameters_and_request_id(tmp_path: Path) -> None:
    body = """
    context = current_context()
    seen = []
    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(lambda: seen.append(current_context() is context),))
    thread.start()
    thread.join()
    left = round(context.remaining(), -4), round(context.deadline - time.time(), -4)
    return [Tensor("out", f"{context.request_id} {context.parameters['a']} {left} {seen}".encode())]
    """
    source = handler(body, head="import contextvars, threading, time\nfrom pyovms import current_context")
    async with nodes(tmp_path) as made:
        node = await made.load(source=source)
        async with node.opened(trio.current_time() + 1e6, a=1) as opened:
            assert (await opened.run()).texts == [(0, "out", "request-1 1 (1000000.0, 1000000.0) [True]")]
