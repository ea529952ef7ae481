from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ovms_cli.script import call_script
from ovmstrio.ops import WebService
from ovmstrio.runtimes.ops.numpy_one import numpy_one, speaks_numpy_one
from ovmstrio.runtimes.ops.prepared_service import PreparedService

SCRIPT = """
import numpy as np
from paddle_serving_server.web_service import Op, WebService


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Op(name="a", input_ops=[read_op])


service = Service(name=str([np.float32(0.5), np.fromstring(b"\\x01\\x02", np.uint8).tolist()]))
service.prepare_pipeline_config(yml_dict={"rpc_port": 0})
service.run_service()
"""


def old(name: str) -> Any:
    """Give a name of numpy's that it may not have."""
    return getattr(np, name)


def test_bytes_are_read_with_fromstring() -> None:
    """Without a separator bytes are numbers, in an array that can be written; with one, text is."""
    with numpy_one():
        found = old("fromstring")(b"\x01\x00\x02\x00", np.int16)
        found += 1
        assert found.tolist() == [2, 3]
        assert old("fromstring")("ab", dtype=np.uint8, count=1).tolist() == [97]
        assert old("fromstring")("1, 2", sep=",").tolist() == [1, 2]
        with pytest.raises(ValueError, match="multiple of element size"):
            old("fromstring")(b"abc", np.int16)


def test_scalars_are_printed_plainly_in_every_thread() -> None:
    """A list of scalars reads as numbers, in threads that begin then, too."""
    found: list[str] = []
    with numpy_one():
        thread = threading.Thread(target=lambda: found.append(str([np.float32(0.5), np.int64(3)])))
        thread.start()
        thread.join()
        assert [str([np.float32(0.5), np.int64(3)])] == found == ["[0.5, 3]"]


def test_names_that_are_gone() -> None:
    """Aliases of Python's types and old names are there."""
    with numpy_one():
        assert (old("int"), old("float"), old("product")) == (int, float, np.prod)
        assert np.zeros(2, old("float_")).dtype == np.float64


def test_everything_is_put_back() -> None:
    """Afterwards numpy is what it was."""
    before, options = dict(vars(np)), np.get_printoptions()
    with numpy_one():
        assert speaks_numpy_one()
    assert not speaks_numpy_one()
    assert vars(np) == before
    assert np.get_printoptions() == options
    assert repr([np.float32(0.5)]) == "[np.float32(0.5)]"


def test_scripts_that_are_run_have_it_and_their_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script sees it while its service is served, its worker processes are told, and nobody else sees it."""
    script = tmp_path / "web_service.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.syspath_prepend(tmp_path)
    told: list[Any] = []

    def serve(service: WebService) -> None:
        source = PreparedService(service, script=script).source()
        assert source is not None
        told.extend([service.name, '"numpy_one": true' in source.argument])

    call_script(script, [], None, serve)
    assert told == ["[0.5, [1, 2]]", True]
    assert not speaks_numpy_one()
