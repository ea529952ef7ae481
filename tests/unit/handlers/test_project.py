from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.handlers.handler_loading import HandlerDependencies, open_handler
from tests.support.projects import opened, project

HANDLER = "class Handler:\n    def handle_post(self):\n        return {}\n"
MODELS = "multi_model_reloading:\n  path: ./models\n"
TENSORFLOW = "type: tensorflow\npath: handler.py\nmodels:\n  path: ./models\n"


class _Client:
    """A client of models with the method that loads them."""

    load: Callable[[str], Any] = staticmethod(repr)

    def set_load_method(self, load: Callable[[str], Any]) -> None:
        self.load = load

    def get_model(self) -> Any:
        return self.load("/models/1")


async def problems(folder: Path, code: str, text: str = "", **settings: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        async with opened(folder, code, text, **settings):
            pass
    return list(caught.value.problems)


async def test_modules_of_the_folder_and_the_python_path_are_imported(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("import local\nWORD = local.WORD + '!'\n")
    (tmp_path / "local.py").write_text("WORD = 'mine'\n")
    before = set(sys.modules)
    code = f"import helper\nimport local\n{HANDLER}".replace("{}", "local.WORD + helper.WORD")
    async with opened(tmp_path, code, "python_path: lib\n") as handler:
        assert await handler.call("handle_post") == "minemine!"
        assert str(tmp_path) not in sys.path
    assert not {"helper", "local"} & (set(sys.modules) - before)
    assert not [name for name in sys.modules if name.startswith("ovms_handlers.")]


async def test_a_handler_with_its_own_process_has_its_folders_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "only_of_this_project.py").write_text("class Net:\n    size = 3\n")
    code = """
        import pickle
        class Handler:
            def handle_get(self):
                kind = pickle.loads(b"conly_of_this_project\\nNet\\n.")
                from only_of_this_project import Net
                return [kind is Net, kind.size]
        """
    async with opened(tmp_path, code, is_only_service=True) as handler:
        assert await handler.call("handle_get") == [True, 3]
    assert str(tmp_path) not in sys.path
    assert "only_of_this_project" not in sys.modules


@pytest.mark.parametrize(
    "code", ["from elsewhere import Handler\n", "from elsewhere import Handler as Renamed\nHandler = None\n"]
)
async def test_an_imported_class_is_found(tmp_path: Path, code: str) -> None:
    (tmp_path / "elsewhere.py").write_text(HANDLER)
    async with opened(tmp_path, code) as handler:
        assert list(handler.methods) == ["handle_post"]


async def test_a_pickled_class_is_loaded(tmp_path: Path) -> None:
    dill = pytest.importorskip("dill")
    made = type("Handler", (), {"__module__": "__main__", "handle_get": lambda self: 7})
    (tmp_path / "handler.pickle").write_bytes(dill.dumps(made))
    async with opened(tmp_path, "", "type: python\npath: handler.pickle\n") as handler:
        assert await handler.call("handle_get") == 7


async def test_a_pickled_class_needs_dill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dill", None)
    (tmp_path / "handler.pickle").touch()
    (problem,) = await problems(tmp_path, "", "type: python\npath: handler.pickle\n")
    assert "needs dill" in problem.message
    assert "[handlers]" in problem.suggestion


async def test_the_constructor_receives_arguments_by_name(tmp_path: Path) -> None:
    code = """
        class Handler:
            def __init__(self, python_client, extra=5, *, module_proto_pb2, config):
                self.seen = (python_client, extra, module_proto_pb2, config)
                config["more"]["x"] = 0
            def load_model(self, model_path):
                return model_path
            def handle_get(self):
                return 1
        """
    spec = project(tmp_path, code, MODELS + "config: {more: {x: 1}}\n")
    client, messages = _Client(), ModuleType("messages")
    async with open_handler(spec, HandlerDependencies({"model_client": client}, messages)) as handler:
        assert handler.instance.seen == (client, 5, messages, {"more": {"x": 0}})
    assert spec.config == {"more": {"x": 1}}


async def test_a_constructor_with_any_names_gets_the_client_of_its_models(tmp_path: Path) -> None:
    code = """
        class Base:
            def __init__(self, model_client):
                self.client = model_client
            def load_model(self, model_path):
                return model_path
            def handle_get(self):
                return self.client.get_model()
        class Handler(Base):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
        """
    supplies = HandlerDependencies({"model_client": _Client()})
    async with open_handler(project(tmp_path, code, MODELS), supplies) as handler:
        assert await handler.call("handle_get") == "/models/1"


@pytest.mark.parametrize(
    "code",
    [
        """
        class Other:
            def handle_get(self):
                return "made"
        class Handler:
            def __new__(cls):
                return Other()
            def handle_get(self):
                return "own"
        """,
        """
        class Single(type):
            def __call__(cls, *args, **kwargs):
                made = super().__call__(*args, **kwargs)
                made.note = "made"
                return made
        class Handler(metaclass=Single):
            def __init__(self, config):
                self.config = config
            def handle_get(self):
                return self.note
        """,
    ],
    ids=["__new__", "metaclass"],
)
async def test_a_class_may_create_its_objects_itself(tmp_path: Path, code: str) -> None:
    async with opened(tmp_path, code) as handler:
        assert await handler.call("handle_get") == "made"


async def test_the_constructor_runs_in_the_thread_of_the_methods(tmp_path: Path) -> None:
    code = """
        import threading
        class Handler:
            def __init__(self):
                self.threads = {threading.get_ident()}
            def handle_get(self):
                self.threads.add(threading.get_ident())
        """
    async with opened(tmp_path, code) as handler, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(handler.call, "handle_get")
        await trio.testing.wait_all_tasks_blocked()
    assert len(handler.instance.threads) == 1
    assert threading.get_ident() not in handler.instance.threads


async def test_provided_modules_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "local.py").write_text("A = 1\n")
    given = ModuleType("given")
    given.B = 2  # type: ignore[attr-defined]
    code = """
        import given_pb2
        from protos import given_pb2 as same, local
        import other.deep.given_pb2
        class Handler:
            def handle_get(self):
                return [local.A, same.B, given_pb2.B, other.deep.given_pb2.B]
        """
    modules = {"given_pb2": given, "protos.given_pb2": given, "other.deep.given_pb2": given}
    async with opened(tmp_path, code, dependencies=HandlerDependencies(modules=modules)) as handler:
        assert await handler.call("handle_get") == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("code", "line", "reason"),
    [
        ("import no_such_module_here\n", 1, "the import of the handler failed: ModuleNotFoundError"),
        ("x = 1\nclass Handler\n", 2, "SyntaxError"),
        (
            f"{HANDLER}    def __init__(self):\n        int('x')\n",
            5,
            "the constructor of the handler failed: ValueError",
        ),
        (f"{HANDLER}    def __init__(self):\n        raise SystemExit(3)\n", 5, "SystemExit: 3"),
        ("x = 1\n", None, "no class Handler"),
    ],
)
async def test_exceptions_of_the_file_and_constructor_have_their_line(
    tmp_path: Path, code: str, line: int | None, reason: str
) -> None:
    (problem,) = await problems(tmp_path, code)
    assert (Path(problem.file).name, problem.line) == ("handler.py", line)
    assert reason in problem.message
    if "ModuleNotFound" in reason:
        assert "install the package that provides 'no_such_module_here'" in problem.suggestion


async def test_all_problems_of_a_class_are_reported(tmp_path: Path) -> None:
    code = """\
        class Handler:
            def __init__(self, cfg):
                pass
            def handle_post(self, payloads, headers, /):
                return payloads
            def handle_get(self, query_params, token, extra=1, *args, **kwargs):
                return token
        """
    found = await problems(tmp_path, code, MODELS)
    assert [(problem.line, problem.message) for problem in found] == [
        (2, "__init__ asks for 'cfg', which the server does not provide"),
        (2, "the constructor does not take model_client, although the project has models"),
        (1, "the Handler has no load_model, although the project has models"),
        (4, "handle_post takes payloads by position only; arguments are passed by name"),
        (4, "handle_post takes headers by position only; arguments are passed by name"),
        (6, "handle_get asks for 'token', which the server does not provide"),
    ]
    assert {problem.file for problem in found} == {str(tmp_path / "handler.py")}
    assert (found[5].expected, found[5].found) == ("headers, payload, query_params", "token")
    assert found[0].expected == "config, model_client, python_client"


@pytest.mark.parametrize(
    ("body", "text", "reason"),
    [
        ("def handle_pots(self): pass", "", "did you mean handle_pots?"),
        ("def handle_post(self, payloads): pass", "", "did you mean payload?"),
        ("def predict(self): pass", "", "handle_post or handle_get or handle_put or handle_patch or handle_delete"),
        (
            "def handle_get(self): pass",
            "server_side_batching: {max_batch_size: 2, batch_interval_seconds: 1}",
            "handle_post",
        ),
        (
            "def handle_post(self): yield",
            "server_side_batching: {max_batch_size: 2, batch_interval_seconds: 1}",
            "must return a list",
        ),
        ("def __init__(self, model_client): pass\n    def load_model(self): pass", MODELS, "(self, model_path)"),
        (
            "def __init__(self, model_client): pass\n    async def load_model(self, m): pass",
            MODELS,
            "load_model is async",
        ),
        ("def handle_get(self): pass", TENSORFLOW, "tensorflow_client"),
    ],
)
async def test_each_problem_of_a_class_has_a_suggestion(tmp_path: Path, body: str, text: str, reason: str) -> None:
    found = await problems(tmp_path, f"class Handler:\n    {body}\n", text)
    assert any(reason in str(problem) for problem in found), found


async def test_a_handler_has_every_method_of_its_service(tmp_path: Path) -> None:
    code = """
        class Handler:
            def Predict(self, payload, headers): pass
            def Watch(self, context, payload): pass
        """
    (tmp_path / "iris.proto").touch()
    text = "protobuf_path: iris.proto\n"
    dependencies = HandlerDependencies(rpc_names=("Predict", "Watch", "Train"))
    found = await problems(tmp_path, code, text, dependencies=dependencies)
    assert [problem.message for problem in found] == [
        "Predict asks for 'headers', which the server does not provide",
        "the Handler does not implement the method Train of its service",
    ]
    async with opened(tmp_path, code, text, dependencies=HandlerDependencies(rpc_names=("Watch",))) as handler:
        assert handler.methods["Watch"].arguments == {"payload", "context"}


async def test_static_and_inherited_methods_are_called(tmp_path: Path) -> None:
    code = """
        class Base:
            @classmethod
            def handle_put(cls, payload):
                return ["put", payload]
        class Handler(Base):
            @staticmethod
            def handle_get(query_params):
                return ["get", query_params]
        """
    async with opened(tmp_path, code) as handler:
        assert await handler.call("handle_put", payload=1, headers=2) == ["put", 1]
        assert await handler.call("handle_get", query_params=3) == ["get", 3]
