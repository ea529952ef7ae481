from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.errors import CustomNodeFailure
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_node import open_native_node
from tests.support.examples import examples
from tests.support.native_nodes import FIXTURE_SOURCE, Account, compiled, copy_of_fixture
from tests.support.tasks import hosting

GOOD: Final = frozenset("gzca")
PROGRAM: Final = Path(__file__).with_name("memory_program.py")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_fixture(tmp_path_factory.mktemp("native"))


@settings(max_examples=examples(100), deadline=None)
@given(letters=st.text("gzcanpqsdmhrxi", min_size=1, max_size=12), held_numbers=st.sets(st.integers(0, 9)))
def test_outputs_are_released_once(library: Path, letters: str, held_numbers: set[int]) -> None:

    async def example() -> None:
        async with hosting() as tasks:
            node = await open_native_node(library, "n", {"execute": "outputs", "outputs": letters}, tasks=tasks)
            account = Account(library)
            try:
                outputs = await node.execute({})
            except CustomNodeFailure:
                assert not set(letters) <= GOOD
                account.check()
            else:
                assert set(letters) <= GOOD
                held = [array for name, array in outputs.items() if int(name[1:]) in held_numbers]
                expected = [array.copy() for array in held]
                outputs.clear()
                for array, values in zip(held, expected, strict=True):
                    np.testing.assert_array_equal(array, values)
                held.clear()
            # What is left are references in variables of this function.
            outputs = array = None  # type: ignore[assignment]
            await node.aclose()
            account.check()
            assert account.count("initialized") == account.count("deinitialized")

    trio.run(example)


@pytest.mark.slow
@pytest.mark.parametrize("leaks", [False, True])
def test_address_sanitizer_reports_no_error_and_no_leak(tmp_path: Path, leaks: bool) -> None:
    """Memory of a library that was built with it is used rightly in all modes, and a leak would be seen.

    The interpreter keeps memory of its own to the end; what counts is what the library has allocated.
    """
    path = compiled(FIXTURE_SOURCE, tmp_path / "asan.so", "-fsanitize=address", "-O1", "-fno-omit-frame-pointer")
    environment = {
        **os.environ,
        "LD_PRELOAD": _runtime("libasan.so"),
        "ASAN_OPTIONS": "detect_leaks=1:exitcode=99",
        "LSAN_OPTIONS": "exitcode=0",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, str(PROGRAM), str(path), *(["leak"] if leaks else [])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nodes were called" in done.stdout
    # The copy that was opened is gone when the report is made, which has its name and places in it.
    assert (f"/.{path.name}." in done.stderr) is leaks, done.stderr


def _runtime(name: str) -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    found = subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    path = found.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"needs {name}")
    return path
