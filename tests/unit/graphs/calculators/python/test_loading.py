"""From a handler's file to its object, and to its end."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.config.located import Located
from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.graphs.calculators.python import python_handler as handler_module
from tests.support.python_nodes import make_node, nodes
from tests.support.waits import WAIT_SECONDS, until_async

CLASS = "class OvmsPythonModel:\n    def execute(self, inputs): ...\n"
FAILED = "The Python Node state initialization failed"
SAY = "    def execute(self, inputs):\n        return [Tensor('out', {}.encode())]\n"


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """See that no load leaves anything in the interpreter."""
    path, before = list(sys.path), set(sys.modules)
    yield
    assert sys.path == path
    left = {name for name in set(sys.modules) - before if name.startswith("ovms_handlers.")}
    assert not left


async def test_the_object_is_made_without_arguments_and_initialized(tmp_path: Path) -> None:
    """Initialize gets what the graph says of the node, in the order of the file."""
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
        ((_, _, said),) = await node.run_once()
    names = {"input_names": ["b", "in", "loopback"], "output_names": ["x", "y", "loopback"]}
    names["outputs_names"] = names["output_names"]
    assert json.loads(said) == ["made", {"node_name": "node", "base_path": str(tmp_path), **names}]


@pytest.mark.parametrize("written", ["sub/handler.py", "./sub/../sub/handler.py", "sub\\handler.py", None])
async def test_paths_start_at_the_graphs_folder(tmp_path: Path, written: str | None) -> None:
    """Relative, with detours, with back-slashes, or absolute: base_path is the handler's folder."""
    source = (
        f"class OvmsPythonModel:\n    def initialize(self, kwargs):\n        self.base = kwargs['base_path']\n{SAY}"
    )
    async with nodes(tmp_path) as made:
        made.write("sub/handler.py", "from pyovms import Tensor\n" + source.format("self.base"))
        node = await made.load(make_node(written or str(tmp_path / "sub" / "handler.py")))
        assert await node.run_once() == [(0, "out", str(tmp_path / "sub"))]


async def test_a_folder_of_links_stays_the_handlers_folder(tmp_path: Path) -> None:
    """What is mounted as links to links finds its siblings where the links are."""
    (tmp_path / "data").mkdir()
    async with nodes(tmp_path) as made:
        made.write("data/real.py", "from pyovms import Tensor\nimport beside\nclass OvmsPythonModel:\n"
                   + SAY.format("beside.NAME"))  # fmt: skip
        made.write("beside.py", "NAME = 'sibling'")
        (tmp_path / "handler.py").symlink_to(tmp_path / "data" / "real.py")
        assert await (await made.load()).run_once() == [(0, "out", "sibling")]


async def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With the whole path that was looked for, and where relative ones start."""
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
                                         "install what brings 'no_such_thing'"]),
        ("def f():\n    raise OSError('text')\nf()", ["OSError: text", "handler.py:3: "]),
        ("import sys\nsys.exit(3)", ["SystemExit: 3", "handler.py:3: "]),
        ("def broken(:\n    pass", ["SyntaxError: invalid syntax", "handler.py:2: "]),
        ("import beside", ["ZeroDivisionError", "beside.py:1: "]),
        ("from beside2 import missing", ["cannot import name 'missing' from 'beside2'", "handler.py:2: "]),
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
async def test_a_handler_that_fails_is_named_with_file_and_line(tmp_path: Path, source: str, texts: list[str]) -> None:
    """The text begins as OVMS's does; the log has the user's frames and no others."""
    async with nodes(tmp_path) as made:
        made.write("beside.py", "1 / 0")
        made.write("beside2.py", "")
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


async def test_a_class_without_initialize_and_finalize_will_do(tmp_path: Path) -> None:
    """Only execute is required."""
    async with nodes(tmp_path) as made:
        node = await made.load(source="class OvmsPythonModel:\n" + SAY.format("'here'"))
        assert await node.run_once() == [(0, "out", "here")]


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
    """What it raises is logged and keeps nothing from ending."""
    source = FINALIZED.format(initialize="", prefix=prefix, finalize=finalize)
    with capture_logs() as logs:
        async with nodes(tmp_path) as made:
            node = await made.load(source=source)
            assert not (tmp_path / "finalized").exists()
            await node.resources.aclose()
    assert (tmp_path / "finalized").read_text() == "x"
    assert [(entry["step"], entry["node"]) for entry in logs] == ([("finalize", "node")] if finalize else [])


async def test_an_object_whose_initialize_failed_is_finalized(tmp_path: Path) -> None:
    """It may hold something already."""
    source = FINALIZED.format(initialize="raise OSError", prefix="", finalize="")
    async with nodes(tmp_path) as made:
        with pytest.raises(ConfigError):
            await made.load(source=source)
        assert (tmp_path / "finalized").read_text() == "x"


async def test_an_initialize_that_does_not_end_is_not_finalized(tmp_path: Path) -> None:
    """Its load can be cancelled all the same, and its thread is given up."""
    source = FINALIZED.format(
        initialize="import held_up; held_up.started.set(); held_up.gate.wait()", prefix="", finalize=""
    )
    async with nodes(tmp_path, grace_seconds=0.02) as made:
        made.write("held_up.py", "import threading\nstarted, gate = threading.Event(), threading.Event()")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.load, None, source)
            await until_async(lambda: [each for each in sys.modules if each.endswith(".held_up")])
            (held_up,) = [module for each, module in sys.modules.items() if each.endswith(".held_up")]
            await until_async(held_up.started.is_set)
            nursery.cancel_scope.cancel()
        assert made.threads.stuck == 1
        held_up.gate.set()
    assert not (tmp_path / "finalized").exists()


async def test_a_finalize_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is unloaded without it."""
    monkeypatch.setattr(handler_module, "FINALIZE_SECONDS", 0.02)
    gate = threading.Event()
    async with nodes(tmp_path, grace_seconds=0.02) as made:
        node = await made.load(source="class OvmsPythonModel:\n    def execute(self, inputs): ...\n")
        node.resources.model.finalize = gate.wait
        with capture_logs() as logs, trio.fail_after(WAIT_SECONDS):
            await node.resources.aclose()
        gate.set()
    assert "finalize did not end in time" in [entry["event"] for entry in logs]


async def test_two_nodes_of_one_file_have_objects_of_their_own(tmp_path: Path) -> None:
    """Members are shared by the instances of a node, not by nodes."""
    source = """
    class OvmsPythonModel:
        count = 0
        def execute(self, inputs):
            self.count += 1
            return [Tensor("out", b"%d" % self.count)]
    """
    async with nodes(tmp_path) as made:
        first, second = await made.load(source=source), await made.load(make_node(name="second"))
        said = [await node.run_once() for node in (first, first, second)]
    assert [text for ((_, _, text),) in said] == ["1", "2", "1"]
