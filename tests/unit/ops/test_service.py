from __future__ import annotations

from collections.abc import Iterator

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.ops import Op, ResponseOp, WebService
from ovmstrio.runtimes.ops.web_service import set_service_runner


class _Service(WebService):
    def get_pipeline_response(self, read_op: Op) -> Op:
        return Op(name="only", input_ops=[read_op])


@pytest.fixture(autouse=True)
def _no_runner() -> Iterator[None]:
    yield
    set_service_runner(None)


def test_a_prepared_service_has_a_graph() -> None:
    """The Op that a service gives is joined to a ResponseOp, unless it is one."""
    service = _Service(name="uci")
    service.prepare_pipeline_config(yml_dict={"rpc_port": 0})
    assert list(service.graph().ops) == ["only"]
    assert (service.yml_file, service.yml_dict) == (None, {"rpc_port": 0})

    class Ended(_Service):
        def get_pipeline_response(self, read_op: Op) -> Op:
            return ResponseOp(input_ops=[super().get_pipeline_response(read_op)])

    ended = Ended()
    ended.prepare_pipeline_config("config.yml")
    assert list(ended.graph().ops) == ["only"]
    assert ended.name == "default_service"


def test_what_cannot_be_prepared() -> None:
    """Both configurations or none, a service without an Op, and a run before preparation are told."""
    for arguments in ({}, {"yml_file": "config.yml", "yml_dict": {}}):
        with pytest.raises(ValueError, match="exactly one"):
            _Service().prepare_pipeline_config(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="default_service must return the last Op, got NoneType"):
        WebService().prepare_pipeline_config("config.yml")
    with pytest.raises(ConfigError, match="before prepare_pipeline_config"):
        _Service().graph()


def test_a_runner_takes_services() -> None:
    """Whoever runs a script gets the service that it would run."""
    taken: list[WebService] = []
    set_service_runner(taken.append)
    service = _Service(name="uci")
    service.run_service()
    assert taken == [service]
