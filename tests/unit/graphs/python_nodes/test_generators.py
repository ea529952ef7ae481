from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.graphs.calculator import NodeFailure
from ovmstrio.graphs.graph_config import Port
from ovmstrio.isolation.generators import CREDIT
from tests.support.graph_nodes import Node, Nodes, PythonNodeCall, make_node, nodes
from tests.support.graphs import handler
from tests.support.waits import WAIT_SECONDS, until_async

PREFIXES = pytest.mark.parametrize("prefix", ["", "async "])


async def load(made: Nodes, body: str, prefix: str = "", head: str = "import trio") -> Node:
    node = make_node(outputs=["OUT:out", "END:end"], generative=True)
    return await made.load(node, handler(body, prefix=prefix, head=head))


def texts_of(calls: list[PythonNodeCall]) -> list[tuple[int, str, str]]:
    return [each for call in calls for each in call.texts]


@PREFIXES
async def test_values_are_sent_one_by_one_at_ascending_timestamps(tmp_path: Path, prefix: str) -> None:
    async with nodes(tmp_path) as made:
        node = await load(made, "for i in range(int(bytes(inputs[0]))):\n    yield [Tensor('out', b'%d' % i)]", prefix)
        async with node.opened() as opened:
            calls = await opened.generate(b"3", 10)
            again = await opened.generate(b"200", 50)
    assert texts_of(calls) == [(10, "out", "0"), (11, "out", "1"), (12, "out", "2")]
    assert [call.loopback for call in calls] == [11, 12, 13, None]
    assert calls[-1].emitted == []
    assert texts_of(again) == [(50 + i, "out", str(i)) for i in range(200)]


@PREFIXES
async def test_value_is_any_iterable_of_tensors(tmp_path: Path, prefix: str) -> None:
    body = "o, e = Tensor('out', b'o'), Tensor('end', b'e')\nyield (o,)\nyield []\nyield (t for t in [e, o])\nyield {e}"
    async with nodes(tmp_path) as made:
        node = await load(made, body, prefix)
        async with node.opened() as opened:
            calls = await opened.generate()
    assert [[name for _, name, _ in call.texts] for call in calls] == [["out"], [], ["end", "out"], ["end"], []]
    assert calls[2].emitted[0][0] == Port("END", 0)


async def test_reused_array_is_copied_when_it_is_yielded(tmp_path: Path) -> None:
    body = "for i in range(5):\n    self.array[:] = 48 + i\n    yield [Tensor('out', Tensor('x', self.array))]"
    async with nodes(tmp_path) as made:
        node = await load(made, body)
        node.resources.model.array = np.zeros(2, np.uint8)
        async with node.opened() as opened:
            assert [text for _, _, text in texts_of(await opened.generate())] == ["00", "11", "22", "33", "44"]


@pytest.mark.parametrize("expression", ["iter([[t], [t]])", "map(lambda i: [t], range(2))", "zip([t, t])"])
async def test_execute_returns_any_iterator(tmp_path: Path, expression: str) -> None:
    async with nodes(tmp_path) as made:
        node = await load(made, f"t = Tensor('out', b'x')\nreturn {expression}")
        async with node.opened() as opened:
            assert texts_of(await opened.generate()) == [(0, "out", "x"), (1, "out", "x")]


async def test_list_from_a_node_with_loopback_is_a_regular_result(tmp_path: Path) -> None:
    async with nodes(tmp_path) as made:
        node = await load(made, "return [Tensor('out', b'x')]")
        async with node.opened() as opened:
            calls = [await opened.run(timestamp=1), await opened.run(timestamp=2)]
    assert texts_of(calls) == [(1, "out", "x"), (2, "out", "x")]
    assert [call.loopback for call in calls] == [None, None]


@PREFIXES
async def test_input_of_a_running_generator_is_refused(tmp_path: Path, prefix: str) -> None:
    async with nodes(tmp_path) as made:
        node = await load(made, "while True:\n    yield [Tensor('out', b'')]", prefix)
        async with node.opened() as opened:
            await opened.run()
            with pytest.raises(NodeFailure) as raised:
                await opened.run()
    message = "Node is already processing data. Create new stream for another request."
    assert (raised.value.code, raised.value.message) == ("RESOURCE_EXHAUSTED", message)


@PREFIXES
async def test_value_is_sent_before_the_next_is_computed(tmp_path: Path, prefix: str) -> None:
    wait = "await self.gate.wait()" if prefix else "self.gate.wait()"
    async with nodes(tmp_path) as made:
        node = await load(made, f"yield [Tensor('out', b'1')]\n{wait}\nyield [Tensor('out', b'2')]", prefix)
        node.resources.model.gate = gate = trio.Event() if prefix else threading.Event()
        async with node.opened() as opened:
            with trio.fail_after(WAIT_SECONDS):
                first = await opened.run()
            gate.set()
            rest = [await opened.again(1), await opened.again(2)]
    assert texts_of([first, *rest]) == [(0, "out", "1"), (1, "out", "2")]


@PREFIXES
@pytest.mark.parametrize(
    ("last", "text"),
    [
        ("raise ValueError('late')", "ValueError: late (handler.py:"),
        ("raise SystemExit(1)", "SystemExit: 1 (handler.py:"),
        ("yield None", "the generator of execute yielded a NoneType; expected a list of pyovms.Tensor"),
        ("yield Tensor('out', b'')", "yielded a Tensor; expected a list"),
        ("yield [1]", "the generator of execute yielded a list whose element 0 is an int"),
        ("yield [Tensor('other', b'')]", "Tensor name: other is not a valid node output; expected one of: out, end"),
        ("yield (1 / 0 for _ in 'x')", "ZeroDivisionError: division by zero (handler.py:"),
        ("next(iter([]))", "RuntimeError: "),
    ],
)
async def test_values_before_an_error_are_sent(tmp_path: Path, prefix: str, last: str, text: str) -> None:
    body = (
        f"try:\n    for i in range(3):\n        yield [Tensor('out', b'%d' % i)]\n    {last}\n    yield []\nfinally:\n"
    )
    async with nodes(tmp_path) as made:
        node = await load(made, f"{body}    self.closed = True", prefix)
        async with node.opened() as opened:
            calls = [await opened.run()] + [await opened.again(t) for t in (1, 2)]
            with pytest.raises(NodeFailure) as raised:
                await opened.again(3)
        assert node.resources.model.closed
        assert [each for _, _, each in texts_of(calls)] == ["0", "1", "2"]
        assert raised.value.message.startswith("Error occurred during graph execution: ")
        assert text in raised.value.message
        async with node.opened() as opened:
            assert (await opened.run()).texts == [(0, "out", "0")]


@PREFIXES
async def test_generator_without_values_fails(tmp_path: Path, prefix: str) -> None:
    async with nodes(tmp_path) as made:
        node = await load(made, "return\nyield", prefix)
        with pytest.raises(NodeFailure, match="ended without yielding anything"):
            await node.run_once()


@pytest.mark.parametrize("taken", [1, 5, CREDIT, 3 * CREDIT])
async def test_generator_runs_ahead_by_its_credit(tmp_path: Path, taken: int) -> None:
    body = "while True:\n    self.count = getattr(self, 'count', 0) + 1\n    yield [Tensor('out', b'')]"
    async with nodes(tmp_path) as made:
        node = await load(made, body)
        async with node.opened() as opened:
            await opened.run()
            for number in range(1, taken):
                await opened.again(number)
            await until_async(lambda: not made.threads.is_busy)
            assert taken + CREDIT // 2 <= node.resources.model.count <= taken + CREDIT


async def test_paused_generators_hold_no_threads(tmp_path: Path) -> None:
    body = "self.left += 1\ntry:\n    while True:\n        yield [Tensor('out', b'')]\nfinally:\n"
    async with nodes(tmp_path, limit=4, idle_seconds=0.02) as made:
        node = await load(made, f"{body}    with self.lock:\n        self.left -= 1")
        node.resources.model.lock = threading.Lock()
        node.resources.model.left = 0
        instances = []
        for _ in range(200):
            opening = node.opened()
            instances.append(opening)
            opened = await opening.__aenter__()
            await opened.run()
        await until_async(lambda: made.threads.threads == 0)
        assert (made.threads.is_busy, node.resources.model.left) == (False, 200)
        for opening in instances:
            await opening.__aexit__(None, None, None)
        assert node.resources.model.left == 0


async def test_generators_share_few_threads(tmp_path: Path) -> None:
    async with nodes(tmp_path, limit=1) as made:
        node = await load(made, "while True:\n    self.pause.wait(0.001)\n    yield [Tensor('out', b'')]")
        node.resources.model.pause = threading.Event()
        async with node.opened() as first, node.opened() as second, trio.open_nursery() as nursery:
            nursery.start_soon(first.go_on, await first.run())
            with trio.fail_after(WAIT_SECONDS):
                await second.run()
                for number in range(1, 5):
                    await second.again(number)
            nursery.cancel_scope.cancel()


@PREFIXES
async def test_closing_an_instance_closes_its_paused_generator(tmp_path: Path, prefix: str) -> None:
    body = "import threading\ntry:\n    while True:\n        yield [Tensor('out', b'')]\nfinally:\n"
    body += "    self.closed_in = threading.get_ident()\n    raise KeyError('closing')"
    async with nodes(tmp_path) as made:
        node = await load(made, body, prefix)
        with capture_logs() as logs:
            async with node.opened() as opened:
                await opened.run()
        assert (node.resources.model.closed_in == threading.get_ident()) is bool(prefix)
    assert [(entry["step"], entry["exc_info"][0]) for entry in logs] == [("closing a generator", KeyError)]


async def test_closing_an_instance_ends_its_running_generator_within_one_step(tmp_path: Path) -> None:
    body = """\
try:
    for i in range(1000):
        self.steps = i
        yield [Tensor('out', b'')]
        if i == 2:
            self.started.set()
            while not current_context().is_cancelled():
                self.never.wait(0.001)
finally:
    self.closed = True
"""
    async with nodes(tmp_path) as made:
        node = await load(made, body, head="from pyovms import current_context")
        model = node.resources.model
        model.started, model.never = threading.Event(), threading.Event()
        async with node.opened() as opened:
            await opened.run()
            await until_async(model.started.is_set)
        assert (model.closed, model.steps) == (True, 3)
        assert made.threads.stuck == 0


@PREFIXES
async def test_cancelled_run_closes_its_generator(tmp_path: Path, prefix: str) -> None:
    wait = "await self.gate.wait()" if prefix else "self.gate.wait()"
    body = f"try:\n    self.started.set()\n    {wait}\n    yield []\nfinally:\n    self.closed = True"
    async with nodes(tmp_path) as made:
        node = await load(made, body, prefix)
        model = node.resources.model
        model.started, model.gate = threading.Event(), trio.Event() if prefix else threading.Event()
        async with node.opened() as opened, trio.open_nursery() as nursery:
            nursery.start_soon(opened.run)
            await until_async(model.started.is_set)
            nursery.cancel_scope.cancel()
            model.gate.set()
        assert model.closed


async def test_step_that_does_not_end_is_abandoned(tmp_path: Path) -> None:
    body = """\
try:
    yield [Tensor('out', b'')]
    self.started.set()
    self.gate.wait()
    yield []
finally:
    self.closed.set()
"""
    async with nodes(tmp_path, grace_seconds=0.02) as made:
        node = await load(made, body)
        model = node.resources.model
        model.started, model.gate, model.closed = threading.Event(), threading.Event(), threading.Event()
        with capture_logs() as logs, trio.fail_after(WAIT_SECONDS):
            async with node.opened() as opened:
                await opened.run()
                await until_async(model.started.is_set)
        assert made.threads.stuck == 1
        assert not model.closed.is_set()
        model.gate.set()
        await until_async(model.closed.is_set)
        await until_async(lambda: made.threads.stuck == 0)
    assert any("did not end" in str(entry.get("exc_info", [0, ""])[1]) for entry in logs)


@PREFIXES
async def test_generators_have_the_context_of_their_instance(tmp_path: Path, prefix: str) -> None:
    body = (
        "storage = current_context().storage\nstorage.count = 0\nfor _ in range(3):\n"
        "    current_context().storage.count += 1\n    yield [Tensor('out', b'%d' % storage.count)]"
    )
    async with nodes(tmp_path) as made:
        node = await load(made, body, prefix, head="from pyovms import current_context")
        async with node.opened() as first, node.opened() as second:
            calls = [[await opened.run()] for opened in (first, second)]
            for number in (1, 2):
                for opened, made_calls in zip((first, second), calls, strict=True):
                    made_calls.append(await opened.again(number))
    for made_calls in calls:
        assert [text for _, _, text in texts_of(made_calls)] == ["1", "2", "3"]


async def test_plain_method_returns_an_async_generator(tmp_path: Path) -> None:
    head = (
        "import trio\nasync def many():\n    for i in range(2):\n"
        "        await trio.sleep(0)\n        yield [Tensor('out', b'%d' % i)]"
    )
    async with nodes(tmp_path) as made:
        node = await load(made, "return many()", head=head)
        async with node.opened() as opened:
            assert texts_of(await opened.generate()) == [(0, "out", "0"), (1, "out", "1")]
