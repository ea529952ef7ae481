from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.config.documents import Located
from ovmstrio.core.errors import ConfigError
from ovmstrio.graphs.calculator import ContractError
from ovmstrio.graphs.graph_config import NodeConfig, Port
from ovmstrio.graphs.python_nodes import calculator as handler_module
from pyovms import Tensor
from tests.support.graph_nodes import LOOP, contract_of, make_node, nodes, options
from tests.support.waits import WAIT_SECONDS, until_async

CLASS = "class OvmsPythonModel:\n    def execute(self, inputs): ...\n"
FAILED = "The Python Node state initialization failed"
EXECUTE = "    def execute(self, inputs):\n        return [Tensor('out', {}.encode())]\n"


@pytest.fixture(autouse=True)
def _interpreter_unchanged() -> Iterator[None]:
    path, before = list(sys.path), set(sys.modules)
    yield
    assert sys.path == path
    left = {name for name in set(sys.modules) - before if name.startswith("ovms_handlers.")}
    assert not left


async def test_initialize_gets_names_and_base_path(tmp_path: Path) -> None:
    source = """
    import json
    class OvmsPythonModel:
        def __init__(self):
            self.made = "made"
        def initialize(self, kwargs):
            self.kwargs = kwargs
        def execute(self, inputs):
            return [Tensor("x", json.dumps([self.made, self.kwargs]).encode())]
    """
    async with nodes(tmp_path) as made:
        node = await made.load(make_node(inputs=["B:b", "IN:in"], outputs=["Z:x", "Y:y"], generative=True), source)
        ((_, _, outputs),) = await node.run_once()
    names = {"input_names": ["b", "in", "loopback"], "output_names": ["x", "y", "loopback"]}
    names["outputs_names"] = names["output_names"]
    assert json.loads(outputs) == ["made", {"node_name": "node", "base_path": str(tmp_path), **names}]


@pytest.mark.parametrize("written", ["sub/handler.py", "./sub/../sub/handler.py", "sub\\handler.py", None])
async def test_paths_are_relative_to_the_folder_of_the_graph(tmp_path: Path, written: str | None) -> None:
    initialize = "class OvmsPythonModel:\n    def initialize(self, kwargs):\n        self.base = kwargs['base_path']\n"
    async with nodes(tmp_path) as made:
        made.write("sub/handler.py", "from pyovms import Tensor\n" + initialize + EXECUTE.format("self.base"))
        node = await made.load(make_node(written or str(tmp_path / "sub" / "handler.py")))
        assert await node.run_once() == [(0, "out", str(tmp_path / "sub"))]


async def test_linked_handler_imports_from_the_folder_of_the_link(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    async with nodes(tmp_path) as made:
        made.write("data/real.py", "from pyovms import Tensor\nimport helper\nclass OvmsPythonModel:\n"
                   + EXECUTE.format("helper.NAME"))  # fmt: skip
        made.write("helper.py", "NAME = 'sibling'")
        (tmp_path / "handler.py").symlink_to(tmp_path / "data" / "real.py")
        assert await (await made.load()).run_once() == [(0, "out", "sibling")]


async def test_missing_file_is_reported_with_its_path(tmp_path: Path) -> None:
    async with nodes(tmp_path) as made:
        with pytest.raises(ConfigError) as raised:
            await made.load(make_node("nowhere.py", at=Located(None, 7)))
        (problem,) = raised.value.problems
        assert problem.message.startswith("The Python Node file path does not exist - Python node handler_path: ")
        assert str(tmp_path / "nowhere.py") in problem.message
        assert (problem.line, problem.path) == (7, "node 'node'")
        with pytest.raises(ConfigError, match="is a folder"):
            await made.load(make_node("."))


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("x = 1", ["No OvmsPythonModel class found in", "handler.py"]),
        ("class OvmsPythonModel:\n    pass", ["OvmsPythonModel class defined in", "does not implement execute method"]),
        ("import no_such_thing.inside", ["ModuleNotFoundError: No module named 'no_such_thing'", "handler.py:2: ",
                                         "install the package that provides 'no_such_thing'"]),
        ("def f():\n    raise OSError('text')\nf()", ["OSError: text", "handler.py:3: "]),
        ("import sys\nsys.exit(3)", ["SystemExit: 3", "handler.py:3: "]),
        ("def broken(:\n    pass", ["SyntaxError: invalid syntax", "handler.py:2: "]),
        ("import helper", ["ZeroDivisionError", "helper.py:1: "]),
        ("from helper2 import missing", ["cannot import name 'missing' from 'helper2'", "handler.py:2: "]),
        (CLASS + "    def __init__(self):\n        raise KeyError(1)",
         ["KeyError: 1", "handler.py:5: "]),
        (CLASS + "    def __init__(self, more): ...",
         ["missing 1 required positional argument: 'more'"]),
        (CLASS + "    def initialize(self, kwargs):\n        1 / 0",
         ["ZeroDivisionError: division by zero", "handler.py:5: "]),
        (CLASS + "    async def initialize(self, kwargs):\n        1 / 0",
         ["ZeroDivisionError: division by zero", "handler.py:5: "]),
        (CLASS + "    def initialize(self): ...",
         ["takes 1 positional argument but 2 were given"]),
    ],
)  # fmt: skip
async def test_failed_load_is_reported_with_file_and_line(tmp_path: Path, source: str, texts: list[str]) -> None:
    async with nodes(tmp_path) as made:
        made.write("helper.py", "1 / 0")
        made.write("helper2.py", "")
        with capture_logs() as logs, pytest.raises(ConfigError) as raised:
            await made.load(source=source)
    (problem,) = raised.value.problems
    assert problem.message.startswith(FAILED)
    assert problem.path == "node 'node'"
    for text in texts:
        assert text in str(problem)
    for entry in logs:
        frame = entry["exc_info"][2]
        while frame is not None:
            assert Path(frame.tb_frame.f_code.co_filename).parent == tmp_path
            frame = frame.tb_next


FINALIZED = """
from pathlib import Path
class OvmsPythonModel:
    def initialize(self, kwargs):
        self.file = Path(kwargs["base_path"]) / "finalized"
        {initialize}
    def execute(self, inputs):
        return []
    {prefix}def finalize(self):
        with self.file.open("a") as file:
            file.write("x")
        {finalize}
"""


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize("finalize", ["", "raise ValueError('text')", "raise SystemExit"])
async def test_finalize_runs_once(tmp_path: Path, prefix: str, finalize: str) -> None:
    source = FINALIZED.format(initialize="", prefix=prefix, finalize=finalize)
    with capture_logs() as logs:
        async with nodes(tmp_path) as made:
            node = await made.load(source=source)
            assert not (tmp_path / "finalized").exists()
            await node.resources.aclose()
    assert (tmp_path / "finalized").read_text() == "x"
    assert [(entry["step"], entry["node"]) for entry in logs] == ([("finalize", "node")] if finalize else [])


async def test_failed_initialize_is_followed_by_finalize(tmp_path: Path) -> None:
    source = FINALIZED.format(initialize="raise OSError", prefix="", finalize="")
    async with nodes(tmp_path) as made:
        with pytest.raises(ConfigError):
            await made.load(source=source)
        assert (tmp_path / "finalized").read_text() == "x"


async def test_initialize_that_does_not_end_is_not_finalized(tmp_path: Path) -> None:
    source = FINALIZED.format(
        initialize="import held_up; held_up.started.set(); held_up.gate.wait()", prefix="", finalize=""
    )
    async with nodes(tmp_path, grace_seconds=0.02) as made:
        made.write("held_up.py", "import threading\nstarted, gate = threading.Event(), threading.Event()")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.load, None, source)
            # A copy, because the thread of the load changes sys.modules; a module is there before its names are.
            await until_async(
                lambda: [
                    name
                    for name, each in sys.modules.copy().items()
                    if name.endswith(".held_up") and hasattr(each, "gate")
                ]
            )
            (held_up,) = [sys.modules[each] for each in list(sys.modules) if each.endswith(".held_up")]
            await until_async(held_up.started.is_set)
            nursery.cancel_scope.cancel()
        assert made.threads.stuck == 1
        held_up.gate.set()
    assert not (tmp_path / "finalized").exists()


async def test_finalize_that_does_not_end_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler_module, "FINALIZE_SECONDS", 0.02)
    gate = threading.Event()
    async with nodes(tmp_path, grace_seconds=0.02) as made:
        node = await made.load(source="class OvmsPythonModel:\n    def execute(self, inputs): ...\n")
        node.resources.model.finalize = gate.wait
        with capture_logs() as logs, trio.fail_after(WAIT_SECONDS):
            await node.resources.aclose()
        gate.set()
    assert "finalize timed out" in [entry["event"] for entry in logs]


async def test_nodes_of_one_file_have_separate_objects(tmp_path: Path) -> None:
    source = """
    class OvmsPythonModel:
        count = 0
        def execute(self, inputs):
            self.count += 1
            return [Tensor("out", b"%d" % self.count)]
    """
    async with nodes(tmp_path) as made:
        first, second = await made.load(source=source), await made.load(make_node(name="second"))
        outputs = [await node.run_once() for node in (first, first, second)]
    assert [text for ((_, _, text),) in outputs] == ["1", "2", "1"]


def test_streams_carry_tensors_and_the_loopback_booleans() -> None:
    made = contract_of(make_node(inputs=["B:b", "A:a"], outputs=["OUT:0:c"], generative=True))
    assert made.inputs == {Port("B", 0): Tensor, Port("A", 0): Tensor, LOOP: bool}
    assert made.outputs == {Port("OUT", 0): Tensor, LOOP: bool}
    assert set(made.side_inputs) == {Port("PYTHON_NODE_RESOURCES", 0)}
    assert not made.propagates_bounds


@pytest.mark.parametrize(("inputs", "outputs"), [(["a"], ["b"]), (["IN:a"], ["OUT:b"]), (["IN:0:a"], ["OUT:0:b"])])
def test_tags_and_indexes_are_optional(inputs: list[str], outputs: list[str]) -> None:
    assert len(contract_of(make_node(inputs=inputs, outputs=outputs)).inputs) == 1


@pytest.mark.parametrize(
    ("node", "text", "fix"),
    [
        (make_node(inputs=[]), "at least one input stream", "input_stream"),
        (make_node(outputs=[]), "at least one output stream", "output_stream"),
        (make_node(inputs=["a", "b"]), 'Tag "" index 1 was not expected', "unique tag"),
        (make_node(inputs=["IN:a", "IN:1:b"]), 'Tag "IN" index 1 was not expected', "IN1:b"),
        (make_node(outputs=["OUT:1:b"]), 'Tag "OUT" index 1 was not expected', "OUT1:b"),
        (make_node(side=[]), 'Failed to get tag "PYTHON_NODE_RESOURCES" index 0', "PYTHON_NODE_RESOURCES:py"),
        (make_node(side=["PYTHON_NODE_RESOURCES:py", "OTHER:x"]), 'Tag "OTHER" index 0 was not expected', "remove"),
        (make_node(side_outputs=(make_node().side_inputs)), "has no output side packets", "remove"),
        (make_node(inputs=["IN:a", "LOOPBACK:l"]), "If LOOPBACK is used, it must be defined on both", "output_stream"),
        (make_node(outputs=["OUT:a", "LOOPBACK:l"]), "If LOOPBACK is used, it must be defined on both", "input_stream"),
        (make_node(node_options=()), "The Python Node is missing options definition", "handler_path"),
        (
            make_node(node_options=(), options=(options("PythonExecutorCalculatorOptions", handler_path="a"),)),
            "The Python Node is missing options definition - node_options is empty; options { ... } is ignored",
            "handler_path",
        ),
        (make_node(node_options=(options("Other", x="y"),)), "found mediapipe.Other", "PythonExecutor"),
        (make_node(""), "handler_path is empty", "handler_path"),
        (make_node(name=""), "The Python Node is missing name definition", "name"),
        (make_node(canonical_name="node_1"), "The Python Node name is already present in nodes list", "unique"),
    ],
)
def test_invalid_nodes_are_refused_with_a_suggestion(node: NodeConfig, text: str, fix: str) -> None:
    with pytest.raises(ContractError) as raised:
        contract_of(node)
    assert text in raised.value.message
    assert fix in raised.value.fix
