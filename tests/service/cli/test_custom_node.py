from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from ovmstrio.pipelines.native.library import NodeIdentity, load_library
from tests.support.commands import CommandResult, run_command
from tests.support.native_nodes import FIXTURE_SOURCE, copy_of_fixture
from tests.support.pipelines import DOUBLER, write_node

node = partial(run_command, "custom-node")


@pytest.fixture(autouse=True)
def _own_compilers(command_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.delenv(variable, raising=False)


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def rows(result: CommandResult) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines() if line.strip().startswith(("input", "output"))]


@needs_compiler
def test_a_built_node_can_be_checked() -> None:
    shutil.copy(FIXTURE_SOURCE, "node.c")
    result = node("build", "node.c")
    assert (result.exit_code, result.stdout) == (
        0,
        "ok: built libcustom_node_node.so; try it: ovms custom-node check libcustom_node_node.so\n",
    )
    result = node("check", "libcustom_node_node.so")
    assert result.exit_code == 0
    assert rows(result) == [["input", "x", "FP32", "[1,", "-1]"], ["output", "y", "FP32", "[1,", "-1]"]]
    assert result.stdout.endswith("ok: libcustom_node_node.so, no problem found\n")


@needs_compiler
def test_an_undefined_function_fails_the_build_and_keeps_the_previous_library() -> None:
    Path("node.c").write_text("int here(void) { return 1; }\n")
    assert node("build", "node.c").exit_code == 0
    library = Path("libcustom_node_node.so")
    before = library.read_bytes()
    Path("node.c").write_text("int elsewhere(void);\nint here(void) { return elsewhere(); }\n")
    result = node("build", "node.c")
    assert result.exit_code == 1
    assert "undefined reference to `elsewhere'" in result.stderr
    assert "hint: build the directory with all sources, or link the library that defines the symbol" in result.stderr
    assert "-o libcustom_node_node.so" in result.stderr
    assert ".new" not in result.stderr
    assert library.read_bytes() == before
    assert sorted(each.name for each in Path.cwd().iterdir()) == [library.name, "node.c"]
    assert node("build", "node.c", "--flag=-Wl,-z,undefs").exit_code == 0


@needs_compiler
def test_two_builds_in_one_process_share_no_variables() -> None:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    Path("node").mkdir()
    shutil.copy(FIXTURE_SOURCE, "node/node.c")
    source = """
        inline int number = VALUE;
        template <class T> struct Held { static T value; };
        template <class T> T Held<T>::value = VALUE;
        extern "C" int sum() { return number + Held<int>::value; }
    """
    Path("node/more.cpp").write_text(source)
    library = Path.cwd() / "made.so"
    for value in (1, 2):
        result = node("build", "node", "--output", str(library), "--flag=-std=c++17", f"--flag=-DVALUE={value}")
        assert result.exit_code == 0, result.stderr
        assert load_library(NodeIdentity("n", library)).symbols["sum"]() == 2 * value


@needs_compiler
def test_compiler_errors_are_shown_with_the_command() -> None:
    Path("node.c").write_text('#include "../../custom_node_interface.h"\nint broken = ;\n')
    result = node("build", "node.c")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cc -shared -fPIC")
    assert "node.c:1:" in result.stderr
    assert 'hint: include the interface without a path: #include "custom_node_interface.h"' in result.stderr
    assert not Path("libcustom_node_node.so").exists()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("none.c", "no such file or directory"),
        (".", "there is no C or C++ file"),
        ("notes.txt", "expected a file that ends"),
    ],
)
def test_a_source_that_cannot_be_built_is_a_usage_error(source: str, text: str) -> None:
    Path("notes.txt").touch()
    result = node("build", source)
    assert result.exit_code == 64
    assert text in result.stderr


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    Path("node.c").touch()
    result = node("build", "node.c")
    assert result.exit_code == 1
    assert "there is no compiler 'no-such-compiler': install gcc, or set CC to another one" in result.stderr


@needs_compiler
def test_a_library_that_crashes_on_load_leaves_no_files() -> None:
    Path("node.c").write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) static void begin(void) { abort(); }\n"
    )
    assert node("build", "node.c").exit_code == 0
    result = node("check", "libcustom_node_node.so")
    assert result.exit_code == 1
    assert "libcustom_node_node.so" in result.stdout
    assert "crashed with SIGABRT" in result.stdout
    assert sorted(each.name for each in Path.cwd().iterdir()) == ["libcustom_node_node.so", "node.c"]


def test_python_files_and_built_in_nodes_are_checked() -> None:
    write_node(Path.cwd())
    result = node("check", "node.py")
    assert (result.exit_code, rows(result)) == (
        0,
        [["input", "x", "FP32", "[1,", "-1]"], ["output", "y", "FP32", "[1,", "-1]"]],
    )
    result = node("check", "/ovms/lib/custom_nodes/libcustom_node_add_one.so", "--param", "ad_number=3")
    assert result.exit_code == 0
    assert rows(result)[0] == ["input", "input_numbers", "FP32", "[1,", "10]"]
    assert "did you mean 'add_number'?" in result.stdout


def test_problems_of_nodes_have_places() -> None:
    write_node(Path.cwd(), DOUBLER + "\n    def initialize(params):\n        params['path']\n")
    result = node("check", "node.py", "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["ok"], facts["inputs"]) == (1, False, [])
    assert [(Path(each["file"]).name, each["line"]) for each in facts["problems"]] == [("node.py", 13)]
    facts = json.loads(node("check", "face_blur", "--json").stdout)
    assert {each["path"] for each in facts["problems"]} >= {
        "params.original_image_width",
        "params.confidence_threshold",
    }
    write_node(Path.cwd(), DOUBLER + "\n    def deinitialize(manager):\n        raise OSError('disk gone')\n")
    result = node("check", "node.py")
    assert result.exit_code == 1
    assert "OSError: disk gone" in result.stdout
    assert len(rows(result)) == 2


@pytest.mark.parametrize(
    ("library", "options", "code", "reason"),
    [
        ("libfixture.so", ("--param=inputs_info=error",), 1, "NODE_LIBRARY_METADATA_FAILED"),
        (
            "libfixture.so",
            ("--param", "initialize=abort"),
            1,
            "the library crashed with SIGABRT while it was being loaded, initialized and queried for its inputs",
        ),
        ("text.so", (), 1, "it is not a shared library"),
        ("exits.py", (), 1, "the library ended the process with exit code 3"),
        ("hangs.py", ("--timeout", "3"), 1, "the library did not finish within 3 seconds"),
        ("add_one", ("--param", "add_number"), 64, "expected NAME=VALUE"),
    ],
)
def test_a_failed_check_has_a_reason(library: str, options: tuple[str, ...], code: int, reason: str) -> None:
    copy_of_fixture(Path.cwd())
    Path("text.so").write_text("no library")
    Path("exits.py").write_text("import os\nos._exit(3)\n")
    Path("hangs.py").write_text("import threading\nthreading.Event().wait()\n")
    result = node("check", library, *options)
    assert (result.exit_code, reason in result.output) == (code, True), result.output
