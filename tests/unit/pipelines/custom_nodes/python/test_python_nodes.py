"""Custom nodes in Python: their life, calls and outputs."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import CustomNodeFailure, Overloaded
from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import ItemInfo
from ovmstrio.runtimes.pipelines.custom_nodes.python.python_node import open_python_node
from tests.support.custom_nodes import DOUBLER, opened_python, write_node
from tests.support.tasks import hosting
from tests.support.waits import until_async

INFOS = """
    import numpy as np

    def get_inputs_info(params):
        return {"x": ("FP32", [1, -1])}

    get_outputs_info = get_inputs_info
"""
X = {"x": np.array([[1.0, 2.0]], np.float32)}


def node_with(body: str) -> str:
    """Write a node whose execute has this body."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return f"{INFOS}\n    def execute(inputs, params):\n{lines}\n"


async def failure_of(folder: Path, body: str, *, hide_errors: bool = False) -> str:
    """Run a node and give the text of its failure."""
    async with opened_python(folder, node_with(body), hide_errors=hide_errors) as node:
        with pytest.raises(CustomNodeFailure) as raised:
            await node.execute(X)
    return str(raised.value)


async def test_a_node_describes_itself_and_computes(tmp_path: Path) -> None:
    """Sizes of 0 and -1 both mean any, and parameters are the node's."""
    async with opened_python(tmp_path, factor="3") as node:
        assert node.inputs == {"x": ItemInfo("x", BY_NAME["FP32"], (1, -1))}
        assert node.outputs == {"y": ItemInfo("y", BY_NAME["FP32"], (1, -1))}
        outputs = await node.execute(X)
    assert outputs["y"].tolist() == [[3.0, 6.0]]


async def test_the_manager_goes_to_every_function_that_wants_it(tmp_path: Path) -> None:
    """It is made once, and given to deinitialize at the end."""
    source = """
        import numpy as np

        def initialize(params):
            return {"path": params["path"], "calls": 0}

        def deinitialize(manager):
            with open(manager["path"], "w") as file:
                file.write(f"{manager['calls']} calls")

        def get_inputs_info(params, manager):
            return {"x": ("I64", [1])} if manager else {}

        def get_outputs_info(params):
            return {"y": (None, [])}

        def execute(inputs, params, manager):
            manager["calls"] += 1
            return {"y": np.int64(manager["calls"])}
    """
    told = tmp_path / "told"
    async with opened_python(tmp_path, source, path=str(told)) as node:
        assert node.inputs["x"].datatype == BY_NAME["INT64"]
        assert node.outputs["y"] == ItemInfo("y", None, ())
        first = await node.execute({"x": np.zeros(1, np.int64)})
        second = await node.execute({"x": np.zeros(1, np.int64)})
        assert not told.exists()
    assert (first["y"].shape, int(first["y"]), int(second["y"])) == ((), 1, 2)
    assert told.read_text() == "2 calls"


async def test_nodes_of_one_file_share_nothing(tmp_path: Path) -> None:
    """Each has modules of its own, which are gone afterwards; siblings can be imported."""
    (tmp_path / "helper.py").write_text("count = [0]\n")
    source = node_with("count[0] += 1\nreturn {'x': np.int32(count[0])}").replace(
        "import numpy as np", "import numpy as np\n    from helper import count"
    )
    before = set(sys.modules)
    async with opened_python(tmp_path, source) as one, opened_python(tmp_path, source) as other:
        values = [int((await node.execute(X))["x"]) for node in (one, one, other)]
    assert values == [1, 2, 1]
    assert not [name for name in set(sys.modules) - before if "node" in name or "helper" in name]


async def test_plain_functions_run_in_threads_and_async_ones_on_the_loop(tmp_path: Path) -> None:
    """An async execute may wait with trio."""
    sync = node_with("import threading\nreturn {'x': np.uint64(threading.get_ident())}")
    asynchronous = node_with(
        "import threading, trio\nawait trio.lowlevel.checkpoint()\nreturn {'x': np.uint64(threading.get_ident())}"
    ).replace("def execute", "async def execute")
    (tmp_path / "async").mkdir()
    async with opened_python(tmp_path, sync) as node, opened_python(tmp_path / "async", asynchronous) as other:
        assert int((await node.execute(X))["x"]) != threading.get_ident()
        assert int((await other.execute(X))["x"]) == threading.get_ident()


async def test_inputs_cannot_be_written(tmp_path: Path) -> None:
    """They belong to other nodes as well."""
    assert "ValueError: assignment destination is read-only (node.py:9)" in await failure_of(
        tmp_path, "inputs['x'][0] = 5"
    )
    assert X["x"].tolist() == [[1.0, 2.0]]


async def test_errors_carry_type_text_and_line(tmp_path: Path) -> None:
    """The log has the traceback as well."""
    with capture_logs() as logs:
        text = await failure_of(tmp_path, "raise ValueError('no such thing')")
    assert text == (
        f"Custom node failed during execution; node 'node' of {tmp_path / 'node.py'}: ValueError: no such thing "
        "(node.py:9) (NODE_LIBRARY_EXECUTION_FAILED)"
    )
    assert [(entry["event"], entry["step"]) for entry in logs] == [("a custom node raised", "execute")]


async def test_even_an_exit_is_an_error(tmp_path: Path) -> None:
    """User code cannot end the server."""
    assert "SystemExit: 3" in await failure_of(tmp_path, "import sys\nsys.exit(3)")


async def test_errors_can_be_hidden(tmp_path: Path) -> None:
    """Only the type is told then."""
    text = await failure_of(tmp_path, "raise ValueError('secret')", hide_errors=True)
    assert text.endswith("node.py: ValueError (NODE_LIBRARY_EXECUTION_FAILED)")


async def test_errors_of_the_server_pass(tmp_path: Path) -> None:
    """So a node can choose the status that a client gets."""
    source = node_with("from ovmstrio.core.errors import Overloaded\nraise Overloaded('come back later')")
    async with opened_python(tmp_path, source) as node:
        with pytest.raises(Overloaded, match="come back later"):
            await node.execute(X)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("None", "must return a dict with an array for each output, not NoneType"),
        ("{}", "not an empty dict"),
        ("{1: np.zeros(1)}", "the key is 1"),
        ("{'y': [1, 2]}", "output 'y' must be an array of numpy's, not list; make it with np.asarray"),
        ("{'y': np.array(['a'])}", "output 'y' has dtype <U1, which no tensor has"),
        ("{'y': np.array([b'a'], object)}", "output 'y' has dtype object"),
        ("{'y': np.zeros(1, complex)}", "output 'y' has dtype complex128"),
    ],
)
async def test_outputs_that_are_no_tensors_fail_the_call(tmp_path: Path, returned: str, text: str) -> None:
    """The message names the line of execute."""
    failure = await failure_of(tmp_path, f"return {returned}")
    assert text in failure
    assert "(node.py:8) (NODE_LIBRARY_" in failure


async def test_outputs_are_contiguous_and_in_native_order(tmp_path: Path) -> None:
    """Transposed views and foreign byte orders are copied, empty arrays and scalars kept."""
    body = """return {
    't': np.arange(6, dtype='>i4').reshape(2, 3).T, 'e': np.empty((0, 3), np.uint8), 's': np.float64(2)
}"""
    async with opened_python(tmp_path, node_with(body)) as node:
        outputs = await node.execute(X)
    assert outputs["t"].dtype == np.dtype("<i4")
    assert outputs["t"].flags.c_contiguous
    assert outputs["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (outputs["e"].shape, outputs["s"].shape) == ((0, 3), ())


async def test_a_call_that_is_left_ends_before_deinitialize(tmp_path: Path) -> None:
    """Who is cancelled goes at once; the thread is waited for when the node is closed."""
    source = """
        import pathlib, time

        folder = pathlib.Path(__file__).parent

        def note(what):
            with open(folder / "order", "a") as file:
                file.write(what)

        def initialize(params):
            return None

        def deinitialize(manager):
            note("deinitialize")

        def get_inputs_info(params, manager):
            return {"x": ("FP32", [1, -1])}

        def get_outputs_info(params, manager):
            return {"x": ("FP32", [1, -1])}

        def execute(inputs, params):
            (folder / "began").touch()
            while not (folder / "goes_on").exists():
                time.sleep(0.001)
            note("execute ")
            return inputs
    """
    async with hosting() as tasks:
        file = write_node(tmp_path, source)
        began, goes_on, order = (file.parent / name for name in ("began", "goes_on", "order"))
        node = await open_python_node(file, "node", {}, tasks=tasks)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.execute, X)
            await until_async(began.exists)
            nursery.cancel_scope.cancel()
        assert not order.exists()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.aclose)
            await trio.testing.wait_all_tasks_blocked()
            goes_on.touch()
        assert order.read_text() == "execute deinitialize"


async def test_a_failing_deinitialize_is_logged(tmp_path: Path) -> None:
    """There is nobody to tell."""
    source = DOUBLER + "\n    def deinitialize(manager):\n        raise OSError('disk gone')\n"
    with capture_logs() as logs:
        async with opened_python(tmp_path, source):
            pass
    assert [(entry["event"], entry["step"]) for entry in logs] == [("a custom node raised", "deinitialize")]
