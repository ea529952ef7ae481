from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Overloaded, Problem
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.pipelines.custom_node import ItemInfo
from ovmstrio.pipelines.python_node import open_python_node
from tests.support.pipelines import (
    DOUBLER,
    call,
    hosting,
    make_node,
    make_pipeline,
    opened_python,
    serving_pipeline,
    write_node,
)
from tests.support.waits import until_async

INFOS = """
    import numpy as np
    def get_inputs_info(params):
        return {"x": ("FP32", [1, -1])}
    get_outputs_info = get_inputs_info
"""
X = {"x": np.array([[1.0, 2.0]], np.float32)}


def node_with(body: str) -> str:
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return f"{INFOS}\n    def execute(inputs, params):\n{lines}\n"


async def failure_of(folder: Path, body: str, *, hide_errors: bool = False) -> str:
    async with opened_python(folder, node_with(body), hide_errors=hide_errors) as node:
        with pytest.raises(CustomNodeFailure) as raised:
            await node.execute(X)
    return str(raised.value)


async def test_a_node_describes_itself_and_computes(tmp_path: Path) -> None:
    async with opened_python(tmp_path, factor="3") as node:
        assert node.inputs == {"x": ItemInfo("x", BY_NAME["FP32"], (1, -1))}
        assert node.outputs == {"y": ItemInfo("y", BY_NAME["FP32"], (1, -1))}
        outputs = await node.execute(X)
    assert outputs["y"].tolist() == [[3.0, 6.0]]


async def test_manager_is_passed_to_functions_that_take_it(tmp_path: Path) -> None:
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
    report = tmp_path / "report"
    async with opened_python(tmp_path, source, path=str(report)) as node:
        assert node.inputs["x"].datatype == BY_NAME["INT64"]
        assert node.outputs["y"] == ItemInfo("y", None, ())
        first = await node.execute({"x": np.zeros(1, np.int64)})
        second = await node.execute({"x": np.zeros(1, np.int64)})
        assert not report.exists()
    assert (first["y"].shape, int(first["y"]), int(second["y"])) == ((), 1, 2)
    assert report.read_text() == "2 calls"


async def test_nodes_of_one_file_share_no_modules(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("count = [0]\n")
    source = node_with("count[0] += 1\nreturn {'x': np.int32(count[0])}").replace(
        "import numpy as np", "import numpy as np\n    from helper import count"
    )
    before = set(sys.modules)
    async with opened_python(tmp_path, source) as one, opened_python(tmp_path, source) as other:
        values = [int((await node.execute(X))["x"]) for node in (one, one, other)]
    assert values == [1, 2, 1]
    assert not [name for name in set(sys.modules) - before if "node" in name or "helper" in name]


async def test_plain_functions_run_in_threads_and_async_functions_on_the_loop(tmp_path: Path) -> None:
    sync = node_with("import threading\nreturn {'x': np.uint64(threading.get_ident())}")
    asynchronous = node_with(
        "import threading, trio\nawait trio.lowlevel.checkpoint()\nreturn {'x': np.uint64(threading.get_ident())}"
    ).replace("def execute", "async def execute")
    (tmp_path / "async").mkdir()
    async with opened_python(tmp_path, sync) as node, opened_python(tmp_path / "async", asynchronous) as other:
        assert int((await node.execute(X))["x"]) != threading.get_ident()
        assert int((await other.execute(X))["x"]) == threading.get_ident()


async def test_inputs_are_read_only(tmp_path: Path) -> None:
    failure = await failure_of(tmp_path, "inputs['x'][0] = 5")
    assert "ValueError: assignment destination is read-only (node.py:7)" in failure
    assert X["x"].tolist() == [[1.0, 2.0]]


async def test_errors_have_type_text_and_line(tmp_path: Path) -> None:
    with capture_logs() as logs:
        text = await failure_of(tmp_path, "raise ValueError('no such thing')")
    assert text == (
        f"Custom node failed during execution; node 'node' of {tmp_path / 'node.py'}: ValueError: no such thing "
        "(node.py:7) (NODE_LIBRARY_EXECUTION_FAILED)"
    )
    assert [(entry["event"], entry["step"]) for entry in logs] == [("custom node raised", "execute")]
    assert "SystemExit: 3" in await failure_of(tmp_path, "import sys\nsys.exit(3)")


async def test_hidden_errors_show_only_their_type(tmp_path: Path) -> None:
    text = await failure_of(tmp_path, "raise ValueError('secret')", hide_errors=True)
    assert text.endswith("node.py: ValueError (NODE_LIBRARY_EXECUTION_FAILED)")


async def test_server_errors_keep_their_class(tmp_path: Path) -> None:
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
        ("{'y': [1, 2]}", "output 'y' must be a numpy array, not list; convert it with np.asarray"),
        ("{'y': np.array(['a'])}", "output 'y' has unsupported dtype <U1"),
        ("{'y': np.array([b'a'], object)}", "output 'y' has unsupported dtype object"),
        ("{'y': np.zeros(1, complex)}", "output 'y' has unsupported dtype complex128"),
    ],
)
async def test_invalid_outputs_fail_the_call(tmp_path: Path, returned: str, text: str) -> None:
    failure = await failure_of(tmp_path, f"return {returned}")
    assert text in failure
    assert "(node.py:6) (NODE_LIBRARY_" in failure


async def test_outputs_are_contiguous_and_in_native_order(tmp_path: Path) -> None:
    body = """return {
    't': np.arange(6, dtype='>i4').reshape(2, 3).T, 'e': np.empty((0, 3), np.uint8), 's': np.float64(2)
}"""
    async with opened_python(tmp_path, node_with(body)) as node:
        outputs = await node.execute(X)
    assert outputs["t"].dtype == np.dtype("<i4")
    assert outputs["t"].flags.c_contiguous
    assert outputs["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (outputs["e"].shape, outputs["s"].shape) == ((0, 3), ())


async def test_deinitialize_waits_for_abandoned_calls(tmp_path: Path) -> None:
    source = f"""{INFOS}
    import pathlib, time
    folder = pathlib.Path(__file__).parent
    def write(step):
        with open(folder / "order", "a") as file:
            file.write(step)
    def deinitialize(manager):
        write("deinitialize")
    def execute(inputs, params):
        (folder / "began").touch()
        while not (folder / "goes_on").exists():
            time.sleep(0.001)
        write("execute ")
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


async def test_error_of_deinitialize_is_logged(tmp_path: Path) -> None:
    source = DOUBLER + "\n    def deinitialize(manager):\n        raise OSError('disk gone')\n"
    with capture_logs() as logs:
        async with opened_python(tmp_path, source):
            pass
    assert [(entry["event"], entry["step"]) for entry in logs] == [("custom node raised", "deinitialize")]


SYM = "NODE_LIBRARY_LOAD_FAILED_SYM"
EXECUTE = "def execute(inputs, params): ...\n"


async def problems_of(folder: Path, source: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as raised:
        async with opened_python(folder, source):
            pass
    assert all(problem.file == str(folder / "node.py") for problem in raised.value.problems)
    return raised.value.problems


async def test_missing_functions_are_reported_together(tmp_path: Path) -> None:
    problems = await problems_of(tmp_path, "def execute(inputs):\n    pass\n")
    prefix = "Custom node library lacks a function of the interface; node 'node': "
    assert [(problem.line, problem.message.removeprefix(prefix), problem.suggestion) for problem in problems] == [
        (
            1,
            f"execute is not a function with the right parameters ({SYM})",
            "write def execute(inputs, params[, manager])",
        ),
        (None, f"get_inputs_info is missing ({SYM})", "write def get_inputs_info(params[, manager])"),
        (None, f"get_outputs_info is missing ({SYM})", "write def get_outputs_info(params[, manager])"),
    ]


@pytest.mark.parametrize(
    ("source", "line", "text"),
    [
        ("x = 1\ny = (\n", 2, "the file raised SyntaxError"),
        ("x = 1\n\nimport no_such_module\n", 3, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(1)\n", 1, "SystemExit: 1"),
    ],
)
async def test_files_that_do_not_import_are_reported_with_their_line(
    tmp_path: Path, source: str, line: int, text: str
) -> None:
    (problem,) = await problems_of(tmp_path, source)
    assert problem.line == line
    assert text in problem.message


async def test_error_of_initialize_has_its_line(tmp_path: Path) -> None:
    (problem,) = await problems_of(tmp_path, DOUBLER + "\n    def initialize(params):\n        params['path']\n")
    assert problem.line == 13
    assert problem.message == (
        "Custom node failed to initialize; node 'node': initialize raised KeyError: 'path' "
        "(NODE_LIBRARY_INITIALIZE_FAILED)"
    )


@pytest.mark.parametrize(
    ("infos", "texts"),
    [
        ("None", ["must return a non-empty dict, not None"]),
        ("{}", ["a non-empty dict"]),
        ("{'a': 'FP32', 3: ('FP32', [])}", ["expected a datatype and a shape", "a name must be a non-empty string"]),
        (
            "{'a': ('FP23', [1]), 'b': ('FP32', 5)}",
            ["'FP23' is not a datatype", "a shape must be a list of sizes, not 5"],
        ),
        ("{'a': ('BYTES', [1]), 'b': (complex, [1])}", ["use UINT8 with two dimensions", "not a datatype"]),
        ("{'a': ('FP32', [1, -2]), 'b': ('FP32', [True])}", ["-2 is not a size", "True is not a size"]),
    ],
)
async def test_invalid_infos_are_reported(tmp_path: Path, infos: str, texts: list[str]) -> None:
    source = f"def get_inputs_info(params):\n    return {infos}\n\nget_outputs_info = get_inputs_info\n{EXECUTE}"
    problems = await problems_of(tmp_path, source)
    assert [problem.line for problem in problems] == [1] * len(texts)
    for problem, text in zip(problems, texts, strict=True):
        assert text in problem.message


async def test_failed_load_calls_deinitialize(tmp_path: Path) -> None:
    report = tmp_path / "report"
    source = f"""
        from pathlib import Path
        def initialize(params):
            return 5
        def deinitialize(manager):
            Path({str(report)!r}).write_text(str(manager))
        def get_inputs_info(params): ...
        def get_outputs_info(params): ...
        def execute(inputs, params): ...
    """
    await problems_of(tmp_path, source)
    assert await trio.Path(report).read_text() == "5"


async def test_only_outputs_in_use_must_be_returned(tmp_path: Path) -> None:
    source = DOUBLER.replace('{"y": (np.float32, (1, 0))}', '{"y": ("FP32", [1, -1]), "z": ("FP32", [1])}')
    libraries = {"library": write_node(tmp_path, source)}
    node = make_node("one", {"x": "request.x"}, ["y", "z"], library="library")
    async with serving_pipeline(make_pipeline([node], {"o": "one.y"}, libraries=libraries)) as pipeline:
        assert (await call(pipeline, x=[[1, 2]]))["o"].tolist() == [[2, 4]]
    async with serving_pipeline(make_pipeline([node], {"o": "one.z"}, libraries=libraries)) as pipeline:
        with pytest.raises(CustomNodeFailure, match=r"did not return 'z'; it returned 'y' \(NODE_LIBRARY_MISSING"):
            await call(pipeline, x=[[1, 2]])
