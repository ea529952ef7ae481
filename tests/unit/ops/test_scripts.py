from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ovmstrio.cli.script import call_script
from ovmstrio.core.errors import ConfigError
from ovmstrio.ext.ops import Op, ResponseOp, WebService
from ovmstrio.ops.graph import set_service_runner
from ovmstrio.ops.numpy1_compat import has_numpy1_compat, numpy1_compat
from ovmstrio.ops.prepared_service import PreparedService, load_in_worker, run_as_main

_SCRIPT = """
import sys
from ovmstrio.ext.ops import Op, WebService


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Op(name=sys.argv[1], input_ops=[read_op])


service = Service(name="uci")
service.prepare_pipeline_config(yml_dict={"rpc_port": 0, "dag": {"is_thread_op": False}, "op": {"a": {"retry": 3}}})
service.run_service()
raise RuntimeError("a service ends its script")
"""


class _Service(WebService):
    def get_pipeline_response(self, read_op: Op) -> Op:
        return Op(name="only", input_ops=[read_op])


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield
    set_service_runner(None)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "web_service.py"
    file.write_text(_SCRIPT)
    return file


# Services


@pytest.mark.parametrize(
    "end", [lambda op: op, lambda op: ResponseOp(input_ops=[op])], ids=["the last Op", "a ResponseOp"]
)
def test_a_prepared_service_has_a_graph(end: Callable[[Op], Op]) -> None:
    class Service(_Service):
        def get_pipeline_response(self, read_op: Op) -> Op:
            return end(super().get_pipeline_response(read_op))

    service = Service()
    service.prepare_pipeline_config(yml_dict={"rpc_port": 0})
    assert list(service.graph().ops) == ["only"]
    assert (service.name, service.yml_file, service.yml_dict) == ("default_service", None, {"rpc_port": 0})


@pytest.mark.parametrize("arguments", [{}, {"yml_file": "config.yml", "yml_dict": {}}], ids=["none", "both"])
def test_a_service_needs_one_configuration(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        _Service().prepare_pipeline_config(**arguments)


def test_a_service_needs_an_op_and_its_preparation() -> None:
    with pytest.raises(ValueError, match="default_service must return the last Op, got NoneType"):
        WebService().prepare_pipeline_config("config.yml")
    with pytest.raises(ConfigError, match="call prepare_pipeline_config before"):
        _Service().graph()


def test_a_runner_receives_the_services_of_a_script() -> None:
    received: list[WebService] = []
    set_service_runner(received.append)
    service = _Service(name="uci")
    service.run_service()
    assert received == [service]


# Scripts


def _argument(script: Path, name: str = "uci", config: str | None = None) -> str:
    argv = [str(script), "a"]
    return json.dumps(
        {"script": str(script), "argv": argv, "name": name, "config": config, "folder": None, "numpy1_compat": False}
    )


def test_a_worker_process_makes_the_same_pipeline(script: Path) -> None:
    loaded = load_in_worker(_argument(script))
    assert list(loaded.graph.ops) == ["a"]
    assert loaded.settings.op("a").retry == 3
    assert not loaded.settings.dag.is_thread_op
    assert sys.modules["__main__"].__file__ == str(script)


def test_a_configuration_of_the_command_line_replaces_that_of_the_script(script: Path, tmp_path: Path) -> None:
    configuration = _SCRIPT[_SCRIPT.index("yml_dict=") : _SCRIPT.index(")\nservice.run")]
    script.write_text(_SCRIPT.replace(configuration, '"nope.yml"'))
    other = tmp_path / "other.yml"
    other.write_text("rpc_port: 0\nop: {a: {retry: 5}}\n")
    assert load_in_worker(_argument(script, config=str(other))).settings.op("a").retry == 5


def test_a_script_without_the_service_is_refused_in_a_worker(script: Path) -> None:
    script.write_text(_SCRIPT[: _SCRIPT.index("raise")])
    with pytest.raises(ConfigError, match="runs no service 'other' in a worker process"):
        load_in_worker(_argument(script, name="other"))


def test_a_script_is_the_main_module(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert sys.modules['__main__'].__file__ == __file__\nraise KeyError(__name__)\n")
    with pytest.raises(KeyError, match="__main__"):
        run_as_main(script)


# Scripts for numpy 1


def _old(name: str) -> Any:
    return getattr(np, name)


def test_numpy_1_reads_bytes_with_fromstring() -> None:
    with numpy1_compat():
        found = _old("fromstring")(b"\x01\x00\x02\x00", np.int16)
        found += 1
        assert found.tolist() == [2, 3]
        assert _old("fromstring")("ab", dtype=np.uint8, count=1).tolist() == [97]
        assert _old("fromstring")("1, 2", sep=",").tolist() == [1, 2]
        with pytest.raises(ValueError, match="multiple of element size"):
            _old("fromstring")(b"abc", np.int16)


def test_numpy_1_prints_scalars_as_numbers_in_every_thread() -> None:
    found: list[str] = []
    with numpy1_compat():
        thread = threading.Thread(target=lambda: found.append(str([np.float32(0.5), np.int64(3)])))
        thread.start()
        thread.join()
        assert [str([np.float32(0.5), np.int64(3)])] == found == ["[0.5, 3]"]


def test_numpy_1_has_its_old_names() -> None:
    with numpy1_compat():
        assert (_old("int"), _old("float"), _old("product")) == (int, float, np.prod)
        assert np.zeros(2, _old("float_")).dtype == np.float64


def test_numpy_2_is_restored() -> None:
    before, options = dict(vars(np)), np.get_printoptions()
    with numpy1_compat():
        assert has_numpy1_compat()
    assert not has_numpy1_compat()
    assert vars(np) == before
    assert np.get_printoptions() == options
    assert repr([np.float32(0.5)]) == "[np.float32(0.5)]"


def test_a_script_and_its_workers_have_numpy_1(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = 'str([np.float32(0.5), np.fromstring(b"\\x01\\x02", np.uint8).tolist()])'
    text = _SCRIPT.replace("sys.argv[1]", '"a"').replace('"uci"', scalars)
    script.write_text("import numpy as np\n" + text[: text.index("raise")])
    monkeypatch.syspath_prepend(script.parent)
    served: list[Any] = []

    def serve(service: WebService) -> None:
        source = PreparedService(service, script=script).source()
        assert source is not None
        served.extend([service.name, '"numpy1_compat": true' in source.argument])

    call_script(script, [], None, serve)
    assert served == ["[0.5, [1, 2]]", True]
    assert not has_numpy1_compat()
