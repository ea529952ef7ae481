from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.core.errors import Problem
from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio.runtimes.handlers.trial import try_handler
from tests.support.projects import PYTHON, write

GOOD = "class Handler:\n    def handle_post(self, payload): return payload\n"


async def _tried(folder: Path, code: str, text: str = PYTHON, **files: str) -> tuple[Problem, ...]:
    write(folder, text, **files)
    (folder / "handler.py").write_text(code)
    project, _ = read_project(folder)
    return await try_handler(project, seconds=60)


async def test_a_good_handler_has_no_problems(tmp_path: Path) -> None:
    """Its environment, working directory and sibling modules are there, when it is made as well."""
    code = f"""import os, sibling
from deep import value
assert (os.environ["A"], os.environ["B"]) == ("3", "dot")
assert os.getcwd() == {str(tmp_path)!r} and os.path.exists("nucleus.yaml")
{GOOD}
    def __init__(self, config):
        import late
"""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "deep.py").write_text("value = 1\n")
    text = f"{PYTHON}python_path: src\nenv: {{A: 3, B: 4}}\n"
    assert await _tried(tmp_path, code, text, sibling__py="", late__py="", __env="B=dot\n") == ()


async def test_a_handler_that_cannot_be_imported_is_told_with_its_line(tmp_path: Path) -> None:
    """As is one with methods that do not fit."""
    (problem,) = await _tried(tmp_path, f"x = 1\nimport not_there_at_all\n{GOOD}")
    assert (problem.file, problem.line) == (str(tmp_path / "handler.py"), 2)
    assert "not_there_at_all" in problem.message
    (problem,) = await _tried(tmp_path, "class Handler:\n    def handle_post(self, payloat): ...\n")
    assert (Path(problem.file).name, problem.line) == ("handler.py", 2)


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import os; os._exit(7)", "ended the process with exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crashed with SIGKILL"),
    ],
)
async def test_a_handler_that_ends_its_process_hurts_nobody(tmp_path: Path, code: str, end: str) -> None:
    """Who asks is told how it ended."""
    problems = await _tried(tmp_path, code)
    assert problems == (Problem(f"the handler {end} while it was being loaded", file=str(tmp_path / "handler.py")),)


@pytest.mark.parametrize(
    ("raised", "message"),
    [("SystemExit(3)", "SystemExit: 3"), ("RuntimeError('no licence')", "RuntimeError: no licence")],
)
async def test_a_handler_whose_constructor_fails_is_told_as_when_it_is_served(
    tmp_path: Path, raised: str, message: str
) -> None:
    """With the line of its code, for a server could not load it either."""
    (problem,) = await _tried(tmp_path, f"{GOOD}    def __init__(self, config):\n        raise {raised}\n")
    assert (problem.file, problem.line) == (str(tmp_path / "handler.py"), 4)
    assert problem.message == f"the constructor of the handler failed: {message}"


async def test_a_constructor_that_ends_its_process_hurts_nobody(tmp_path: Path) -> None:
    """As an import that does."""
    (problem,) = await _tried(tmp_path, f"{GOOD}    def __init__(self, config):\n        import os; os._exit(7)\n")
    assert problem.message == "the handler ended the process with exit code 7 while it was being loaded"


async def test_threads_of_a_handler_do_not_keep_the_process(tmp_path: Path) -> None:
    """It ends when everything is known."""
    code = f"import threading\nthreading.Thread(target=threading.Event().wait).start()\n{GOOD}"
    assert await _tried(tmp_path, code) == ()


async def test_a_handler_that_never_comes_to_an_end_is_killed(tmp_path: Path) -> None:
    """After the time that it is given."""
    write(tmp_path)
    (tmp_path / "handler.py").write_text("import threading\nthreading.Event().wait()\n")
    project, _ = read_project(tmp_path)
    (problem,) = await try_handler(project, seconds=0.5)
    assert problem.message == "the handler had not come to an end after 0.5 seconds while it was being loaded"


async def test_methods_of_a_service_are_checked(tmp_path: Path) -> None:
    """Against the file that declares it."""
    proto = """syntax = "proto3";
message Text { string text = 1; }
service Echo { rpc Say (Text) returns (Text); }
"""
    text = f"{PYTHON}protobuf_path: echo.proto\n"
    code = "import echo_pb2\nclass Handler:\n    def __init__(self, proto_module_pb2): ...\n"
    (problem,) = await _tried(tmp_path, code, text, echo__proto=proto)
    assert "Say" in problem.message
    assert await _tried(tmp_path, f"{code}    def Say(self, payload, context): ...\n", text, echo__proto=proto) == ()
