from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_library import load_library
from tests.support.native_nodes import FIXTURE_SOURCE, INCLUDE, compiled, copy_of_fixture

OTHER_MACHINE, OTHER_NAME = (62, "x86_64") if platform.machine() == "aarch64" else (183, "aarch64")


def refusal_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert problem.file == str(path)
    return problem.message


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal_of(tmp_path / "none.so").endswith("No such file or directory (NODE_LIBRARY_LOAD_FAILED_OPEN)")


@pytest.mark.parametrize("content", [b"", b"\x7fEL", b"\x7fELF", b"print('no library')\n" * 10])
def test_file_without_elf_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.so"
    path.write_bytes(content)
    assert "it is no shared library (no ELF header) (NODE_LIBRARY_LOAD_FAILED_OPEN)" in refusal_of(path)


def test_missing_functions_are_named(tmp_path: Path) -> None:
    source = tmp_path / "node.c"
    source.write_text("int initialize(void) { return 0; } int execute(void) { return 0; }")
    path = compiled(source, tmp_path / "node.so")
    with pytest.raises(ConfigError, match="NODE_LIBRARY_LOAD_FAILED_SYM") as caught:
        load_library(NodeIdentity("n", path))
    assert "deinitialize, getInputsInfo, getOutputsInfo, release missing" in str(caught.value)
    assert "custom_node_interface.h" in str(caught.value)


def library_that_lacks(tmp_path: Path, declaration: str, call: str) -> Path:
    source = tmp_path / "node.c"
    source.write_text(f'#include "{FIXTURE_SOURCE}"\n{declaration};\nvoid never(void) {{ {call}; }}\n')
    return compiled(source, tmp_path / "node.so", "-Wl,-z,lazy")


def test_undefined_symbol_is_refused_with_its_place(tmp_path: Path) -> None:
    path = library_that_lacks(tmp_path, "void found_nowhere(void)", "found_nowhere()")
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert problem.file == str(path)
    assert f"node.so uses found_nowhere ({tmp_path / 'node.c'}:2), and nothing that it is linked" in problem.message
    assert problem.message.endswith("(NODE_LIBRARY_LOAD_FAILED_OPEN)")
    assert "link it with the file or library that has it" in problem.suggestion


def test_source_that_defines_a_missing_symbol_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "more.c").write_text("#include <math.h>\nint half(int value)\n{\n    return value / 2;\n}\n")
    path = library_that_lacks(tmp_path, "int half(int)", "half(3)")
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert f"uses half, which is defined in {tmp_path / 'more.c'}:2," in problem.message
    assert problem.suggestion.startswith("link it with more.c;")


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")
def test_symbols_of_c_plus_plus_are_demangled(tmp_path: Path) -> None:
    source = tmp_path / "node.cpp"
    source.write_text("namespace far { int away(int, float); }\nint here() { return far::away(1, 2); }\n")
    path = compiled(source, tmp_path / "node.so", "-x", "c++")
    message = refusal_of(path)
    assert f"uses far::away(int, float) ({source}:1)" in message


@pytest.mark.parametrize("language", ["c", "c++"])
def test_header_has_the_layout_of_the_interface(tmp_path: Path, language: str) -> None:
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


def test_header_is_in_the_package_and_under_protos() -> None:
    header = INCLUDE / "custom_node_interface.h"
    assert (Path(__file__).parents[5] / "protos" / header.name).samefile(header)


@pytest.mark.parametrize(
    ("offset", "byte", "text"),
    [
        pytest.param(4, 1, "not 64-bit little-endian", id="32 bits"),
        pytest.param(16, 2, "link it with -shared", id="program"),
        pytest.param(
            18,
            OTHER_MACHINE,
            f"it is built for {OTHER_NAME}, and this machine is {platform.machine()} (NODE_LIB",
            id="other machine",
        ),
    ],
)
def test_library_for_other_systems_is_refused(tmp_path: Path, offset: int, byte: int, text: str) -> None:
    path = copy_of_fixture(tmp_path)
    image = bytearray(path.read_bytes())
    image[offset] = byte
    path.write_bytes(image)
    assert text in refusal_of(path)
