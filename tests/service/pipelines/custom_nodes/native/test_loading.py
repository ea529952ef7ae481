"""Libraries of custom nodes that load, and that do not."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_library import load_library
from tests.support.native_nodes import FIXTURE_SOURCE, INCLUDE, compiled, copy_of_fixture

X86_64, AARCH64 = 62, 183


def problem_of(path: Path) -> str:
    """Try to load a file, and give the message."""
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert problem.file == str(path)
    return problem.message


def test_a_library_is_loaded_once_for_each_path(tmp_path: Path) -> None:
    """However the path is written."""
    path = copy_of_fixture(tmp_path)
    other = copy_of_fixture(tmp_path, "other.so")
    library = load_library(NodeIdentity("n", path)).symbols
    assert load_library(NodeIdentity("m", tmp_path / "x" / ".." / path.name)).symbols is library
    assert load_library(NodeIdentity("n", other)).symbols is not library


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    """The message says so, with the code."""
    message = problem_of(tmp_path / "none.so")
    assert message.endswith("No such file or directory (NODE_LIBRARY_LOAD_FAILED_OPEN)")


@pytest.mark.parametrize("content", [b"", b"\x7fEL", b"\x7fELF", b"print('no library')\n" * 10])
def test_a_file_that_is_no_library(tmp_path: Path, content: bytes) -> None:
    """Empty, cut, or something else."""
    path = tmp_path / "text.so"
    path.write_bytes(content)
    assert "it is no shared library (no ELF header) (NODE_LIBRARY_LOAD_FAILED_OPEN)" in problem_of(path)


def test_a_library_of_another_machine(tmp_path: Path) -> None:
    """The message names both, where the dynamic loader would say that there is no such file."""
    path = copy_of_fixture(tmp_path)
    other = X86_64 if platform.machine() == "aarch64" else AARCH64
    image = bytearray(path.read_bytes())
    image[18:20] = other.to_bytes(2, "little")
    path.write_bytes(image)
    name = "x86_64" if other == X86_64 else "aarch64"
    assert f"it is built for {name}, and this machine is {platform.machine()} (NODE_LIB" in problem_of(path)


def test_a_library_of_32_bits(tmp_path: Path) -> None:
    """The message says what is expected."""
    path = copy_of_fixture(tmp_path)
    image = bytearray(path.read_bytes())
    image[4] = 1
    path.write_bytes(image)
    assert "not 64-bit little-endian" in problem_of(path)


def test_a_program_is_no_library(tmp_path: Path) -> None:
    """The way out is named."""
    path = copy_of_fixture(tmp_path)
    image = bytearray(path.read_bytes())
    image[16] = 2
    path.write_bytes(image)
    assert "link it with -shared" in problem_of(path)


def test_functions_that_are_missing(tmp_path: Path) -> None:
    """All of them are named, and where they come from."""
    source = tmp_path / "node.c"
    source.write_text("int initialize(void) { return 0; } int execute(void) { return 0; }")
    path = compiled(source, tmp_path / "node.so")
    with pytest.raises(ConfigError, match="NODE_LIBRARY_LOAD_FAILED_SYM") as caught:
        load_library(NodeIdentity("n", path))
    assert "deinitialize, getInputsInfo, getOutputsInfo, release missing" in str(caught.value)
    assert "custom_node_interface.h" in str(caught.value)


def library_that_lacks(tmp_path: Path, declaration: str, call: str) -> Path:
    """Compile the fixture with a function that calls what is nowhere, to be looked up when that is called."""
    source = tmp_path / "node.c"
    source.write_text(f'#include "{FIXTURE_SOURCE}"\n{declaration};\nvoid never(void) {{ {call}; }}\n')
    return compiled(source, tmp_path / "node.so", "-Wl,-z,lazy")


def test_a_library_with_an_undefined_symbol_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    """A call of it would end the process; symbol, library and the line of its source are named, and the way out."""
    path = library_that_lacks(tmp_path, "void found_nowhere(void)", "found_nowhere()")
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert problem.file == str(path)
    assert f"node.so uses found_nowhere ({tmp_path / 'node.c'}:2), and nothing that it is linked" in problem.message
    assert problem.message.endswith("(NODE_LIBRARY_LOAD_FAILED_OPEN)")
    assert "link it with the file or library that has it" in problem.suggestion


def test_the_source_beside_a_library_that_defines_what_it_lacks_is_named(tmp_path: Path) -> None:
    """It was forgotten when the library was built."""
    (tmp_path / "more.c").write_text("#include <math.h>\nint half(int value)\n{\n    return value / 2;\n}\n")
    path = library_that_lacks(tmp_path, "int half(int)", "half(3)")
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert f"uses half, which is defined in {tmp_path / 'more.c'}:2," in problem.message
    assert problem.suggestion.startswith("link it with more.c;")


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")
def test_a_symbol_of_c_plus_plus_is_told_as_it_is_written(tmp_path: Path) -> None:
    """The dynamic loader knows it by another name."""
    source = tmp_path / "node.cpp"
    source.write_text("namespace far { int away(int, float); }\nint here() { return far::away(1, 2); }\n")
    path = compiled(source, tmp_path / "node.so", "-x", "c++")
    message = problem_of(path)
    assert f"uses far::away(int, float) ({source}:1)" in message


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_has_the_layout_of_the_interface(tmp_path: Path, language: str) -> None:
    """Sizes and places are those that existing libraries were built with; it compiles as C and as C++."""
    word = "_Static_assert" if language == "c" else "static_assert"
    places = {"CustomNodeTensor": {"name": 0, "data": 8, "dataBytes": 16, "dims": 24, "dimsCount": 32, "precision": 40}}
    places["CustomNodeTensorInfo"] = {"name": 0, "dims": 8, "dimsCount": 16, "precision": 24}
    places["CustomNodeParam"] = {"key": 0, "value": 8}
    sizes = {"CustomNodeTensor": 48, "CustomNodeTensorInfo": 32, "CustomNodeParam": 16, "CustomNodeTensorPrecision": 4}
    lines = ["#include <stddef.h>", '#include "custom_node_interface.h"']
    lines += [
        f'{word}(offsetof(struct {struct}, {field}) == {place}, "");'
        for struct, fields in places.items()
        for field, place in fields.items()
    ]
    for name, size in sizes.items():
        kind = "enum" if name.endswith("Precision") else "struct"
        lines.append(f'{word}(sizeof({kind} {name}) == {size}, "");')
    lines.append(f'{word}(UNSPECIFIED == 0 && FP32 == 1 && U8 == 3 && I32 == 7 && I64 == 9, "");')
    source = tmp_path / "layout.c"
    source.write_text("\n".join(lines) + "\n")
    compiled(source, tmp_path / "layout.so", "-x", language, "-Wall", "-Wextra", "-Werror")


def test_the_header_is_in_the_package_and_beside_the_other_interfaces() -> None:
    """One file, found by importlib.resources and under protos/."""
    header = INCLUDE / "custom_node_interface.h"
    assert (Path(__file__).parents[5] / "protos" / header.name).samefile(header)
