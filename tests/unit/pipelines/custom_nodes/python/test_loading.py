"""Python files that cannot be used as custom nodes: every problem with its line and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ovmstrio.core.errors import ConfigError, Problem
from tests.support.custom_nodes import DOUBLER, opened_python

SYM = "NODE_LIBRARY_LOAD_FAILED_SYM"
GOOD_EXECUTE = "def execute(inputs, params): ...\n"


async def problems_of(folder: Path, source: str) -> tuple[Problem, ...]:
    """Open a node that cannot be opened."""
    with pytest.raises(ConfigError) as raised:
        async with opened_python(folder, source):
            pass
    assert all(problem.file == str(folder / "node.py") for problem in raised.value.problems)
    return raised.value.problems


async def test_all_missing_functions_are_told_at_once(tmp_path: Path) -> None:
    """Each with how to write it."""
    problems = await problems_of(tmp_path, "def execute(inputs):\n    pass\n")
    prefix = "Custom node library lacks a function of the interface; node 'node': "
    assert [(problem.line, problem.message.removeprefix(prefix), problem.suggestion) for problem in problems] == [
        (1, f"execute is no function of the right arguments ({SYM})", "write def execute(inputs, params[, manager])"),
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
async def test_files_that_do_not_import(tmp_path: Path, source: str, line: int, text: str) -> None:
    """The line is the file's own."""
    (problem,) = await problems_of(tmp_path, source)
    assert problem.line == line
    assert text in problem.message


async def test_an_error_in_initialize_names_its_line(tmp_path: Path) -> None:
    """A parameter that is missing shows there."""
    (problem,) = await problems_of(tmp_path, DOUBLER + "\n    def initialize(params):\n        params['path']\n")
    assert problem.line == 13
    assert problem.message == (
        "Custom node failed to initialize; node 'node': initialize raised KeyError: 'path' "
        "(NODE_LIBRARY_INITIALIZE_FAILED)"
    )


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("None", ["must give a dict with at least one name, not None"]),
        ("{}", ["at least one name"]),
        ("{'a': 'FP32', 3: ('FP32', [])}", ["an element type and a shape are expected", "a name must be a text"]),
        ("{'a': ('FP23', [1]), 'b': ('FP32', 5)}", ["'FP23' is no element type", "a shape is a list of sizes, not 5"]),
        ("{'a': ('BYTES', [1]), 'b': (complex, [1])}", ["texts travel as UINT8", "no element type"]),
        ("{'a': ('FP32', [1, -2]), 'b': ('FP32', [True])}", ["-2 is no size", "True is no size"]),
    ],
)
async def test_infos_that_say_nothing_usable(tmp_path: Path, given: str, texts: list[str]) -> None:
    """All entries are looked at."""
    source = f"def get_inputs_info(params):\n    return {given}\n\nget_outputs_info = get_inputs_info\n{GOOD_EXECUTE}"
    problems = await problems_of(tmp_path, source)
    assert [problem.line for problem in problems] == [1] * len(texts)
    for problem, text in zip(problems, texts, strict=True):
        assert text in problem.message


async def test_what_was_initialized_is_deinitialized_when_loading_fails(tmp_path: Path) -> None:
    """Nothing is left behind."""
    told = tmp_path / "told"
    source = f"""
        from pathlib import Path
        def initialize(params):
            return 5
        def deinitialize(manager):
            Path({str(told)!r}).write_text(str(manager))
        def get_inputs_info(params): ...
        def get_outputs_info(params): ...
        def execute(inputs, params): ...
    """
    await problems_of(tmp_path, source)
    assert await trio.Path(told).read_text() == "5"
