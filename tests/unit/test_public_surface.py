"""The public surface: what it consists of, what it costs, and that its guide is true."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio

import ovmstrio
from ovmstrio_samples.add_one.prepare import write as write_add_one
from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "python.md"
PATIENCE_SECONDS = 60

SURFACE = {
    "ovmstrio": """
        Array Client ClientTls InferRequest InferResponse KINDS Kind Kinds LoadContext Running Servable
        ServableMetadata ServerSettings Service Takes Tensor TensorSpec configure_logs open_client serve table_of
    """,
    "ovmstrio.batching": """
        BatchOptions BatchPolicy Batcher open_batcher
    """,
    "ovmstrio.calculators": """
        BY_NAME Calculator CalculatorKind ContractError DefinitionScope NodeConfig NodeContext NodeContract
        NodeFailure NodeResources OvTensor Port
    """,
    "ovmstrio.client": """
        Array Client ClientTls Health ModelInfo ModelState Parameter Posted SequenceState StreamOutput StreamReply
        StreamRequest TensorInfo Unreachable open_client
    """,
    "ovmstrio.client.pipeline": """
        PipelineClient PredictFuture
    """,
    "ovmstrio.conversion": """
        Conversion Converted convert detect_state new_folder new_version parse_input_form save
    """,
    "ovmstrio.custom_nodes": """
        Array Infos Params include_folder
    """,
    "ovmstrio.errors": """
        AlreadyExists ConfigError CustomNodeFailure DeadlineExceeded FailedPrecondition GraphFailure
        InvalidRequest MalformedJson MalformedPayload MethodNotAllowed ModelFailure NotFound NotReady NotSupported
        NothingToGather Overloaded PayloadTooLarge PermissionDenied PipelineFailure Problem QueueTimeout RequestTooSlow
        SequenceEnding SequenceExists SequenceMissing ServerError ServiceLoading ServiceMissing StorageFailure
        TooManyRequests TooManySequences UserCodeError VersionLoading VersionMissing VersionRetired
    """,
    "ovmstrio.extras": """
        Extra way_to_install
    """,
    "ovmstrio.handlers": """
        HTMLResponse HTTPError JSONResponse PlainTextResponse Response StreamingResponse
    """,
    "ovmstrio.kinds": """
        ANY_SIZE BY_NAME ByteStream ConfigFile Contents Datatype Dependency Dim Findings HttpAnswer
        HttpRequest HttpRoutes InferInput InferRequest InferResponse InferStream Kind LeasedServable Listing
        LoadContext Located ONLY_VERSION Place Problem RawTensor RequestedOutput Schema Servable ServableMetadata
        ServableSpec Service StreamProblem StreamingServable Takes Tensor TensorSpec Validator check_members
        content_mark is_whole tree_mark
    """,
    "ovmstrio.ops": """
        Analyst ChannelData ChannelDataType CustomException CustomExceptionCode Op OpAnalyst PipelineRequest
        PipelineResponse PipelineTensor ProductErrCode RequestOp ResponseOp WebService
    """,
}
"""The names of each public module.  Whoever takes one away has let it be deprecated for a minor version."""

modules = pytest.mark.parametrize("module", SURFACE)


@modules
def test_a_module_has_these_names_and_no_others(module: str) -> None:
    """They are all there, and the module tells of them."""
    loaded = importlib.import_module(module)
    names = set(SURFACE[module].split())
    assert set(loaded.__all__) == names
    assert len(loaded.__all__) == len(names)
    assert names <= set(dir(loaded))
    assert all(hasattr(loaded, name) for name in names)


def test_there_are_no_other_modules_beside_the_package() -> None:
    """What lies at the top of the package is public; of what lies deeper the clients are."""
    beside = {f"ovmstrio.{path.stem}" for path in (ROOT / "ovmstrio").glob("[a-z]*.py")}
    assert beside | {"ovmstrio", "ovmstrio.client", "ovmstrio.client.pipeline"} == SURFACE.keys()


def test_the_guide_lists_every_name_with_a_line() -> None:
    """In the table of its module."""
    _, *sections = re.split(r"^### `(.*)`$", GUIDE.read_text(), flags=re.MULTILINE)
    rows = {
        module: re.findall(r"^\| `(\w+)` \| \S.* \|$", text, re.MULTILINE)
        for module, text in zip(sections[::2], sections[1::2], strict=True)
    }
    assert {module: sorted(names) for module, names in rows.items()} == {
        module: sorted(names.split()) for module, names in SURFACE.items()
    }


def test_importing_the_package_is_cheap() -> None:
    """It loads nothing of what it stands on, until a name is asked for; others are refused as usual."""
    program = """
import sys
before = set(sys.modules)
import ovmstrio
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
print(*sorted(name for name in sys.modules if name.startswith("ovmstrio")))
ovmstrio.Tensor
print("openvino" in sys.modules, "Tensor" in vars(ovmstrio))
try:
    ovmstrio.Sensor
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "ovmstrio",
        "ovmstrio",
        "False True",
        "module 'ovmstrio' has no attribute 'Sensor'",
    ]


def test_type_checkers_and_programs_find_the_same() -> None:
    """Each name comes from the module that is named twice: for either."""
    homes = {name: f"ovmstrio.{home}" for name, home in ovmstrio._HOMES.items()}
    assert _imports(ovmstrio) == homes


@modules
def test_every_name_has_a_docstring_of_its_own(module: str) -> None:
    """Classes and functions; constants and types have theirs below them."""
    loaded = importlib.import_module(module)
    missing = [name for name in SURFACE[module].split() if not _is_documented(loaded, name)]
    assert not missing


def _is_documented(module: ModuleType, name: str) -> bool:
    value: Any = getattr(module, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        # A dataclass without one is given its signature.
        return text is not None and not text.startswith(f"{name}(")
    home = _imports(module).get(name)
    if home is not None:
        return _is_documented(importlib.import_module(home), name)
    body = ast.parse(inspect.getsource(module)).body
    return any(
        name in ast.unparse(statement).partition("=")[0].partition(":")[0]
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
        and isinstance(following.value.value, str)
        for statement, following in pairwise(body)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
    )


def _imports(module: ModuleType) -> dict[str, str]:
    """Tell from which modules of the package a module imports what, as type checkers see it."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("ovmstrio.")
        for alias in node.names
    }


def test_guides_and_samples_import_only_what_is_public() -> None:
    """Guides in their examples, samples everywhere."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("samples/**/*.md")]
    programs = {page: "".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)) for page in pages}
    programs |= {path: path.read_text() for path in ROOT.glob("samples/**/*.py")}
    private = {
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path, program in programs.items()
        for module, name in _imported(program)
        if name not in SURFACE.get(module, "").split() and f"{module}.{name}" not in SURFACE
    }
    assert not private


def _imported(program: str) -> set[tuple[str, str]]:
    """Give what a program imports of the package: modules and names in them."""
    found = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found |= {tuple(each.name.rpartition(".")[::2]) for each in node.names if each.name.startswith("ovmstrio.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ovmstrio":
            found |= {(node.module or "", each.name) for each in node.names}
    return {(module, name) for module, name in found}


# The examples of the guide


def _example(name: str, folder: Path) -> Path:
    """Write an example of the guide, which begins with its name, into a folder."""
    (text,) = re.findall(rf'```python\n("""{name}: .*?)```', GUIDE.read_text(), re.DOTALL)
    path = folder / name
    path.write_text(text)
    return path


async def test_the_server_and_the_client_of_the_guide_understand_each_other(tmp_path: Path) -> None:
    """One program serves a model, the other calls it, and a signal ends the first gently."""
    server, client = (_example(name, tmp_path) for name in ("own_server.py", "own_client.py"))
    grpc, rest = free_ports(2)
    for program in (server, client):
        program.write_text(program.read_text().replace("9000", str(grpc)).replace("8000", str(rest)))
    version = tmp_path / "models" / "add_one" / "1"
    version.mkdir(parents=True)
    write_add_one(tmp_path, version)
    entry = '{"model_config_list": [{"config": {"name": "add_one", "base_path": "add_one"}}]}'
    (tmp_path / "models" / "config.json").write_text(entry)
    run = partial(trio.run_process, cwd=tmp_path)
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            serving = await nursery.start(partial(run, [sys.executable, server], stdout=subprocess.PIPE))
            said = b""
            while b"everything was loaded" not in said:
                piece = await serving.stdout.receive_some()
                assert piece, said
                said += piece
            done = await run([sys.executable, client], capture_stdout=True)
            serving.terminate()
    assert said.startswith(f"gRPC at 127.0.0.1:{grpc} and HTTP at 127.0.0.1:{rest}\n".encode())
    assert b"TensorInfo(name='x', datatype='FP32', shape=(-1, 10))" in done.stdout
    assert done.stdout.endswith(b"[[ 1.  2.  3.  4.  5.  6.  7.  8.  9. 10.]]\n")


async def test_the_kind_of_the_guide_is_served(tmp_path: Path) -> None:
    """With its own section of the configuration, through public names alone."""
    program = _example("own_kind.py", tmp_path)
    with trio.fail_after(PATIENCE_SECONDS):
        done = await trio.run_process([sys.executable, program], cwd=tmp_path, capture_stdout=True)
    assert b"[2. 4. 6.]\n" in done.stdout
