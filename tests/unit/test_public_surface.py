from __future__ import annotations

import ast
import importlib
import inspect
import re
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ovmstrio

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "public_api.md"

# Names of public modules; a name is deprecated for a minor version before it is removed.
SURFACE = {
    "ovmstrio": """
        Array AsyncClient Client ClientTls InferRequest InferResponse KINDS Kind Kinds LoadContext Running Servable
        ServableMetadata ServerSettings Service Tensor TensorSpec configure_logs open_client serve
        settings_of table_of CallType
    """,
    "ovmstrio.ext.batching": """
        BatchOptions BatchPolicy Batcher open_batcher
    """,
    "ovmstrio.ext.calculators": """
        BY_NAME Calculator CalculatorKind ContractError DefinitionScope NodeConfig NodeContext NodeContract
        NodeFailure NodeResources OvTensor Port
    """,
    "ovmstrio.client": """
        Array AsyncClient ChatAnswer ChatDelta ChatMessage ChatUsage Client ClientTls Health InferResult ModelInfo
        ModelState Parameter Posted SequenceState ServerInfo StreamOutput StreamReply StreamRequest TensorInfo
        Unreachable open_client
    """,
    "ovmstrio.client.pipeline": """
        PipelineClient PredictFuture
    """,
    "ovmstrio.conversion": """
        Conversion Converted convert detect_state new_folder new_version parse_input_form save
    """,
    "ovmstrio.ext.custom_nodes": """
        Array Infos Params include_folder
    """,
    "ovmstrio.errors": """
        AlreadyExists ConfigError CustomNodeFailure DeadlineExceeded FailedPrecondition GraphFailure
        InvalidRequest MalformedJson MalformedPayload MethodNotAllowed ModelFailure NotFound NotReady
        NotSupported NothingToGather Overloaded PayloadTooLarge PermissionDenied PipelineFailure Problem
        QueueTimeExceeded QueueTimeout RequestTooSlow SequenceEnding SequenceExists SequenceMissing
        SequenceRestored ServerError ServiceLoading ServiceMissing StorageFailure TooManyRequests
        TooManySequences UserCodeError VersionLoading VersionMissing VersionRetired
    """,
    "ovmstrio.extras": """
        COMPAT_FOLDER Extra add_compat_path install_command
    """,
    "ovmstrio.ext.handlers": """
        HTMLResponse HTTPError JSONResponse PlainTextResponse Response StreamingResponse
    """,
    "ovmstrio.ext.kinds": """
        ANY_SIZE BY_NAME ByteStream ConfigFile Contents Datatype Dependency Dim Findings HttpAnswer
        HttpRequest HttpRoutes InferInput InferRequest InferResponse InferStream Kind LeasedServable Listing
        LoadContext Located ONLY_VERSION Place Problem RawTensor RequestedOutput Schema Servable ServableMetadata
        ServableSpec Service StreamProblem StreamingServable Tensor TensorSpec Validator check_members
        content_fingerprint is_whole tree_fingerprint CallType
    """,
    "ovmstrio.testing": """
        FakeClock LocalServer MemoryServer serving serving_async serving_in_memory
    """,
    "ovmstrio.ext.ops": """
        Analyst ChannelData ChannelDataType CustomException CustomExceptionCode Op OpAnalyst PipelineRequest
        PipelineResponse PipelineTensor ProductErrCode RequestOp ResponseOp WebService
    """,
}

modules = pytest.mark.parametrize("module", SURFACE)


@modules
def test_a_public_module_has_exactly_these_documented_names(module: str) -> None:
    loaded = importlib.import_module(module)
    names = set(SURFACE[module].split())
    assert set(loaded.__all__) == names
    assert len(loaded.__all__) == len(names)
    assert names <= set(dir(loaded))
    assert all(hasattr(loaded, name) for name in names)
    assert [name for name in sorted(names) if not _is_documented(loaded, name)] == []


MOVED = {
    f"ovmstrio.{name}": f"ovmstrio.ext.{name}"
    for name in ("batching", "calculators", "custom_nodes", "handlers", "kinds", "ops")
}
"""Public modules of the last release, by their old names."""


def test_the_guide_lists_every_public_name_of_every_public_module() -> None:
    _, *sections = re.split(r"^## `(.*)`$", GUIDE.read_text(), flags=re.MULTILINE)
    rows = {
        module: re.findall(r"^\| `(\w+)` \| \S.* \|$", text, re.MULTILINE)
        for module, text in zip(sections[::2], sections[1::2], strict=True)
    }
    assert {module: sorted(names) for module, names in rows.items()} == {
        module: sorted(names.split()) for module, names in SURFACE.items()
    }
    modules = {f"ovmstrio.{path.stem}" for path in (ROOT / "ovmstrio").glob("[a-z]*.py")} - MOVED.keys()
    modules |= {f"ovmstrio.ext.{path.stem}" for path in (ROOT / "ovmstrio" / "ext").glob("[a-z]*.py")}
    assert modules | {"ovmstrio", "ovmstrio.client", "ovmstrio.client.pipeline"} == SURFACE.keys()


@pytest.mark.parametrize("module", MOVED)
def test_moved_names_work_with_a_warning(module: str) -> None:
    for name in SURFACE[MOVED[module]].split():
        with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now {MOVED[module]}.{name}"):
            moved = getattr(importlib.import_module(module), name)
        assert moved is getattr(importlib.import_module(MOVED[module]), name)
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        _ = importlib.import_module(module).unknown


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("ovmstrio", "Takes", "CallType"),
        ("ovmstrio.ext.kinds", "Takes", "CallType"),
        ("ovmstrio.ext.kinds", "content_mark", "content_fingerprint"),
        ("ovmstrio.ext.kinds", "tree_mark", "tree_fingerprint"),
        ("ovmstrio.extras", "way_to_install", "install_command"),
    ],
)
def test_renamed_names_work_with_a_warning(module: str, old: str, new: str) -> None:
    loaded = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {module}.{new}"):
        assert getattr(loaded, old) is getattr(loaded, new)


def test_lazy_imports_equal_those_of_type_checkers() -> None:
    imports = _imports(ovmstrio)
    assert set(imports) == set(ovmstrio.__all__)
    for name, home in imports.items():
        assert getattr(ovmstrio, name) is getattr(importlib.import_module(home), name)


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
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("ovmstrio.")
        for alias in node.names
    }


def test_guides_and_samples_import_only_public_names() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("ovmstrio/samples/**/*.md")]
    programs = {page: "".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)) for page in pages}
    programs |= {path: path.read_text() for path in ROOT.glob("ovmstrio/samples/*/**/*.py")}
    private = {
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path, program in programs.items()
        for module, name in _imported(program)
        if not f"{module}.{name}".startswith("ovmstrio.samples")
        if name not in SURFACE.get(module, "").split() and f"{module}.{name}" not in SURFACE
    }
    assert not private


def _imported(program: str) -> set[tuple[str, str]]:
    found = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found |= {tuple(each.name.rpartition(".")[::2]) for each in node.names if each.name.startswith("ovmstrio.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ovmstrio":
            found |= {(node.module or "", each.name) for each in node.names}
    return {(module, name) for module, name in found}
