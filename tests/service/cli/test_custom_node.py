"""Building and checking custom nodes from the command line."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_library import load_library
from tests.support.commands import CommandResult, run_command
from tests.support.custom_nodes import DOUBLER, write_node
from tests.support.native_nodes import FIXTURE_SOURCE, copy_of_fixture

run = partial(run_command, "custom-node")


@pytest.fixture(autouse=True)
def _own_compilers(command_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.delenv(variable, raising=False)


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def rows(result: CommandResult) -> list[list[str]]:
    """Give the words of each line of the table."""
    return [line.split() for line in result.stdout.splitlines() if line.strip().startswith(("input", "output"))]


# build


@needs_compiler
def test_a_file_is_built_beside_itself_and_can_be_checked() -> None:
    """The header is the one that is shipped."""
    shutil.copy(FIXTURE_SOURCE, "node.c")
    result = run("build", "node.c")
    assert (result.exit_code, result.stdout) == (
        0,
        "ok: built libcustom_node_node.so; try it: ovms custom-node check libcustom_node_node.so\n",
    )
    result = run("check", "libcustom_node_node.so")
    assert result.exit_code == 0
    assert rows(result) == [["input", "x", "FP32", "[1,", "-1]"], ["output", "y", "FP32", "[1,", "-1]"]]
    assert result.stdout.endswith("ok: libcustom_node_node.so, no problem found\n")


@needs_compiler
def test_a_directory_may_mix_c_and_c_plus_plus() -> None:
    """C is compiled as C; the output may be named, and flags given."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    Path("node").mkdir()
    shutil.copy(FIXTURE_SOURCE, "node/node.c")
    Path("node/more.cpp").write_text(
        '#include <vector>\nextern "C" int more() { return std::vector<int>(VALUE)[0]; }\n'
    )
    result = run("build", "node", "--output", "made.so", "--flag=-DVALUE=3")
    assert result.exit_code == 0, result.stderr
    assert run("check", "made.so").exit_code == 0


@needs_compiler
def test_a_function_that_is_nowhere_is_an_error_of_the_build() -> None:
    """The linker names it and the file that calls it; what is linked by other means may be left out on purpose."""
    Path("node.c").write_text("int elsewhere(void);\nint here(void) { return elsewhere(); }\n")
    result = run("build", "node.c")
    assert result.exit_code == 1
    assert "undefined reference to `elsewhere'" in result.stderr
    assert "node.c" in result.stderr
    assert "hint: build the directory with all sources, or name the library that has it" in result.stderr
    assert run("build", "node.c", "--flag=-Wl,-z,undefs").exit_code == 0


@needs_compiler
def test_a_build_that_fails_leaves_the_library_before() -> None:
    """A server that has it configured goes on with it; nothing else is left, and the messages name the library."""
    Path("node.c").write_text("int here(void) { return 1; }\n")
    assert run("build", "node.c").exit_code == 0
    library = Path("libcustom_node_node.so")
    before = library.read_bytes()
    Path("node.c").write_text("int elsewhere(void);\nint here(void) { return elsewhere(); }\n")
    result = run("build", "node.c")
    assert result.exit_code == 1
    assert "-o libcustom_node_node.so" in result.stderr
    assert ".new" not in result.stderr
    assert library.read_bytes() == before
    assert sorted(each.name for each in Path.cwd().iterdir()) == [library.name, "node.c"]


@needs_compiler
def test_builds_in_c_plus_plus_have_variables_of_their_own() -> None:
    """A second build in the same process has its own values, inline variables and those of templates too."""
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
        result = run("build", "node", "--output", str(library), "--flag=-std=c++17", f"--flag=-DVALUE={value}")
        assert result.exit_code == 0, result.stderr
        assert load_library(NodeIdentity("n", library)).symbols["sum"]() == 2 * value


@needs_compiler
def test_errors_of_the_compiler_are_shown_with_the_command() -> None:
    """A header that is looked for in the folders of another project gets a hint."""
    Path("node.c").write_text('#include "../../custom_node_interface.h"\nint broken = ;\n')
    result = run("build", "node.c")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cc -shared -fPIC")
    assert "node.c:1:" in result.stderr
    assert 'hint: the interface is found by its name alone: #include "custom_node_interface.h"' in result.stderr
    assert not Path("libcustom_node_node.so").exists()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("none.c", "no such file or directory"),
        (".", "there is no C or C++ file"),
        ("notes.txt", "expected a file that ends"),
    ],
)
def test_where_there_is_nothing_to_build_the_command_line_is_wrong(source: str, text: str) -> None:
    """The exit code is that of usage errors."""
    Path("notes.txt").touch()
    result = run("build", source)
    assert result.exit_code == 64
    assert text in result.stderr


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the way out."""
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    Path("node.c").touch()
    result = run("build", "node.c")
    assert result.exit_code == 1
    assert "there is no compiler 'no-such-compiler': install gcc, or set CC to another one" in result.stderr


# check


def test_a_library_that_crashes_is_reported() -> None:
    """The command itself lives on."""
    copy_of_fixture(Path.cwd())
    result = run("check", "libfixture.so", "--param", "initialize=abort")
    assert result.exit_code == 1
    assert (
        "the library crashed with SIGABRT while it was being loaded, initialized and asked for its inputs and outputs"
        in result.stdout
    )
    assert result.stdout.endswith("not ok: 1 error and 0 warnings in 1 file\n")


@needs_compiler
def test_a_library_that_crashes_when_it_is_loaded_leaves_nothing_beside_it() -> None:
    """It is reported by its own name."""
    Path("node.c").write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) static void begin(void) { abort(); }\n"
    )
    assert run("build", "node.c").exit_code == 0
    result = run("check", "libcustom_node_node.so")
    assert result.exit_code == 1
    assert "libcustom_node_node.so" in result.stdout
    assert "crashed with SIGABRT" in result.stdout
    assert sorted(each.name for each in Path.cwd().iterdir()) == ["libcustom_node_node.so", "node.c"]


def test_what_a_library_refuses_is_reported() -> None:
    """A parameter that it cannot use, and a function that is missing."""
    copy_of_fixture(Path.cwd())
    result = run("check", "libfixture.so", "--param=inputs_info=error")
    assert (result.exit_code, "NODE_LIBRARY_METADATA_FAILED" in result.stdout) == (1, True)
    Path("text.so").write_text("no library")
    result = run("check", "text.so")
    assert (result.exit_code, "it is no shared library" in result.stdout) == (1, True)


def test_python_files_and_built_in_nodes_are_checked_too() -> None:
    """A warning is no error."""
    write_node(Path.cwd())
    result = run("check", "node.py")
    assert (result.exit_code, rows(result)) == (
        0,
        [["input", "x", "FP32", "[1,", "-1]"], ["output", "y", "FP32", "[1,", "-1]"]],
    )
    result = run("check", "/ovms/lib/custom_nodes/libcustom_node_add_one.so", "--param", "ad_number=3")
    assert result.exit_code == 0
    assert rows(result)[0] == ["input", "input_numbers", "FP32", "[1,", "10]"]
    assert "did you mean 'add_number'?" in result.stdout


def test_every_problem_has_its_place_in_json() -> None:
    """File and line of Python, parameters of built-in nodes."""
    write_node(Path.cwd(), DOUBLER + "\n    def initialize(params):\n        params['path']\n")
    result = run("check", "node.py", "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["ok"], facts["inputs"]) == (1, False, [])
    assert [(Path(each["file"]).name, each["line"]) for each in facts["problems"]] == [("node.py", 13)]
    facts = json.loads(run("check", "face_blur", "--json").stdout)
    assert {each["path"] for each in facts["problems"]} >= {
        "params.original_image_width",
        "params.confidence_threshold",
    }


def test_an_error_of_deinitialize_is_an_error() -> None:
    """The server would only log it."""
    write_node(Path.cwd(), DOUBLER + "\n    def deinitialize(manager):\n        raise OSError('disk gone')\n")
    result = run("check", "node.py")
    assert result.exit_code == 1
    assert "OSError: disk gone" in result.stdout
    assert len(rows(result)) == 2


def test_a_library_that_hangs_is_killed() -> None:
    """After the time that is given."""
    write_node(Path.cwd(), "import threading\nthreading.Event().wait()\n")
    result = run("check", "node.py", "--timeout", "3")
    assert result.exit_code == 1
    assert "the library had not come to an end after 3 seconds" in result.stdout


def test_an_exit_in_a_library_is_reported() -> None:
    """It ends the process without a signal."""
    write_node(Path.cwd(), "import os\nos._exit(3)\n")
    result = run("check", "node.py")
    assert (result.exit_code, "the library ended the process with exit code 3" in result.stdout) == (1, True)


def test_parameters_are_names_and_values() -> None:
    """Anything else is a wrong command line."""
    result = run("check", "add_one", "--param", "add_number")
    assert (result.exit_code, "write name=value" in result.stderr) == (64, True)
