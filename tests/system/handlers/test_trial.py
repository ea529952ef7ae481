from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.core.errors import Problem
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.handlers.trial import trial_load
from tests.support.processes import is_at_work
from tests.support.projects import PYTHON, write
from tests.support.saved_models import CLASSIFY, DOUBLE, open_tensorflow_models, predict, single_model, write_classifier
from tests.support.servables import trying, verdicts
from tests.support.waits import until_async

GOOD = "class Handler:\n    def handle_post(self, payload): return payload\n"


async def _try(folder: Path, code: str, text: str = PYTHON, **files: str) -> tuple[Problem, ...]:
    write(folder, text, **files)
    (folder / "handler.py").write_text(code)
    project, _ = read_project(folder)
    return await trial_load(project, seconds=60)


async def test_a_good_handler_has_no_problems(tmp_path: Path) -> None:
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
    assert await _try(tmp_path, code, text, sibling__py="", late__py="", __env="B=dot\n") == ()


async def test_processes_of_a_handler_end_with_the_trial(tmp_path: Path) -> None:
    code = f"""import pathlib, subprocess
{GOOD}
    def __init__(self, config):
        pathlib.Path("pid").write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
"""
    assert await _try(tmp_path, code) == ()
    await until_async(lambda: not is_at_work(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(
    ("code", "line", "reason"),
    [
        (f"x = 1\nimport not_there_at_all\n{GOOD}", 2, "not_there_at_all"),
        ("class Handler:\n    def handle_post(self, payloat): ...\n", 2, "payloat"),
        (
            f"{GOOD}    def __init__(self, config):\n        raise SystemExit(3)\n",
            4,
            "the constructor of the handler failed: SystemExit: 3",
        ),
    ],
    ids=["import", "method", "constructor"],
)
async def test_a_problem_of_the_code_has_its_line(tmp_path: Path, code: str, line: int, reason: str) -> None:
    (problem,) = await _try(tmp_path, code)
    assert (problem.file, problem.line) == (str(tmp_path / "handler.py"), line)
    assert reason in problem.message


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import os; os._exit(7)", "ended the process with exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crashed with SIGKILL"),
        (f"{GOOD}    def __init__(self): __import__('os')._exit(7)", "ended the process with exit code 7"),
    ],
    ids=["exit", "signal", "exit of the constructor"],
)
async def test_the_end_of_the_process_is_the_problem(tmp_path: Path, code: str, end: str) -> None:
    problems = await _try(tmp_path, code)
    assert problems == (Problem(f"the handler {end} while loading", file=str(tmp_path / "handler.py")),)


async def test_threads_of_a_handler_do_not_keep_the_process(tmp_path: Path) -> None:
    code = f"import threading\nthreading.Thread(target=threading.Event().wait).start()\n{GOOD}"
    assert await _try(tmp_path, code) == ()


async def test_a_handler_that_does_not_end_is_killed(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "handler.py").write_text("import threading\nthreading.Event().wait()\n")
    project, _ = read_project(tmp_path)
    (problem,) = await trial_load(project, seconds=0.5)
    assert problem.message == "the handler did not finish within 0.5 seconds while loading"


async def test_methods_of_a_service_are_checked(tmp_path: Path) -> None:
    proto = """syntax = "proto3";
message Text { string text = 1; }
service Echo { rpc Say (Text) returns (Text); }
"""
    text = f"{PYTHON}protobuf_path: echo.proto\n"
    code = "import echo_pb2\nclass Handler:\n    def __init__(self, proto_module_pb2): ...\n"
    (problem,) = await _try(tmp_path, code, text, echo__proto=proto)
    assert "Say" in problem.message
    assert await _try(tmp_path, f"{code}    def Say(self, payload, context): ...\n", text, echo__proto=proto) == ()


async def test_tensorflow_models_are_tried_before_their_load(tmp_path: Path) -> None:
    write_classifier(tmp_path / "up", a=CLASSIFY, b=DOUBLE)
    models = single_model(tmp_path / "up", "b")
    async with trying(tmp_path / "trials"), open_tensorflow_models(tmp_path, models) as opened:
        assert await predict(opened, {"features": [[1, 0, 0]]}) == {"doubled": [0.0, 2.0]}
        (verdict,) = verdicts(tmp_path / "trials")
        assert verdict["crash"] == ""
