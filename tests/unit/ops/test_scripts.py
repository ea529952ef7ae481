from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.ops.prepared_service import load_in_worker
from ovmstrio.runtimes.ops.scripts import run_as_main

SCRIPT = """
import sys
from ovmstrio.ops import Op, WebService


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Op(name=sys.argv[1], input_ops=[read_op])


service = Service(name="uci")
service.prepare_pipeline_config(yml_dict={"rpc_port": 0, "dag": {"is_thread_op": False}, "op": {"a": {"retry": 3}}})
service.run_service()
raise RuntimeError("a service ends its script")
"""


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what running a script changes."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def _argument(script: Path, name: str = "uci", config: str | None = None) -> str:
    return json.dumps(
        {
            "script": str(script),
            "argv": [str(script), "a"],
            "name": name,
            "config": config,
            "folder": None,
            "numpy_one": False,
        }
    )


def test_a_worker_process_makes_the_same_pipeline(tmp_path: Path) -> None:
    """The script is run with the arguments of the server, as far as to where it would serve."""
    script = tmp_path / "web_service.py"
    script.write_text(SCRIPT)
    loaded = load_in_worker(_argument(script))
    assert list(loaded.graph.ops) == ["a"]
    assert loaded.settings.op("a").retry == 3
    assert not loaded.settings.dag.is_thread_op
    assert sys.modules["__main__"].__file__ == str(script)


def test_a_file_of_the_command_line_goes_before_that_of_the_script(tmp_path: Path) -> None:
    """A worker reads the configuration that the server was given."""
    script = tmp_path / "web_service.py"
    body = SCRIPT.replace(SCRIPT[SCRIPT.index("yml_dict=") : SCRIPT.index(")\nservice.run")], '"nope.yml"')
    script.write_text(body)
    other = tmp_path / "other.yml"
    other.write_text("rpc_port: 0\nop: {a: {retry: 5}}\n")
    assert load_in_worker(_argument(script, config=str(other))).settings.op("a").retry == 5


def test_a_script_that_does_not_run_the_service_again(tmp_path: Path) -> None:
    """A service of another name, or none at all, is told with the script."""
    script = tmp_path / "web_service.py"
    script.write_text(SCRIPT.replace('raise RuntimeError("a service ends its script")', ""))
    with pytest.raises(ConfigError, match="runs no service named 'other' in a worker process"):
        load_in_worker(_argument(script, name="other"))


def test_a_script_is_the_main_module(tmp_path: Path) -> None:
    """A script finds itself as ``__main__``, with its file, and what it raises comes out."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert sys.modules['__main__'].__file__ == __file__\nraise KeyError(__name__)\n")
    with pytest.raises(KeyError, match="__main__"):
        run_as_main(script)
