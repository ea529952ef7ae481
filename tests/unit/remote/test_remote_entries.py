from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.ovms_json import parse_config
from ovmstrio.config.remote_entries import RemoteAddress, RemoteSpec
from ovmstrio.config.specs import ModelSpec, ServerSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.table import KINDS


def _parse(*configs: dict[str, Any]) -> ServerSpec:
    document = {"model_config_list": [{"config": each} for each in configs]}
    return parse_config(KINDS.values(), json.dumps(document, indent=1).encode(), Path("/etc/ovms/config.json"))


def _remote(**settings: Any) -> RemoteSpec:
    (spec,) = _parse({"name": "m", "remote": "grpc://h:9000", **settings}).of(RemoteSpec)
    return spec


def test_an_entry_has_defaults_and_all_settings() -> None:
    usual = _remote()
    assert (usual.addresses, usual.remote_name) == ((RemoteAddress("grpc", "h", 9000),), "m")
    assert (usual.hedge_after_ms, usual.max_concurrency, usual.problems) == (0, 256, ())
    spec = _remote(
        remote=["grpcs://a:1", "https://[::1]:2"],
        remote_name="far",
        remote_version=3,
        timeout_seconds=2,
        hedge_after_ms=40,
        max_concurrency=7,
        breaker={"failures": 2},
        tls={"ca": "ca.pem", "server_name": "s"},
    )
    assert [str(address) for address in spec.addresses] == ["grpcs://a:1", "https://[::1]:2"]
    assert (spec.remote_name, spec.remote_version, spec.timeout_seconds) == ("far", "3", 2)
    assert (spec.breaker.failures, spec.breaker.open_seconds, spec.max_concurrency) == (2, 10, 7)
    assert spec.tls.ca == Path("/etc/ovms/ca.pem")
    assert usual.needs_reload(spec)


@pytest.mark.parametrize("address", ["h:9000", "ftp://h:1", "grpc://h", "grpc://:1", "grpc://h:1/v2", "grpc://h:99999"])
def test_an_invalid_address_is_refused_with_its_line(address: str) -> None:
    served = _parse({"name": "m", "remote": address}, {"name": "n", "base_path": "n"})
    (spec,) = served.of(RemoteSpec)
    (problem,) = spec.errors
    assert (problem.line, problem.path) == (6, "model_config_list[0].config.remote")
    assert "grpc://HOST:PORT" in problem.expected
    assert [each.name for each in served.of(ModelSpec)] == ["n"]


def test_all_problems_are_reported_together() -> None:
    spec = _remote(remote=["x", "grpc://a:1", "grpc://a:1"], breaker={"failures": -1, "open": 1}, tls={"ca": 3})
    assert [problem.path.rpartition("config.")[2] for problem in spec.errors] == [
        "remote",
        "remote",
        "breaker.failures",
        "breaker.open",
        "tls.ca",
    ]


def test_keys_of_local_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"base_path.*has no files here"):
        _remote(base_path="x")
    with pytest.raises(ConfigError, match=r"wrong type or value"):
        _remote(max_attempts=0)


def test_a_duplicate_name_is_left_out() -> None:
    served = _parse({"name": "m", "remote": "grpc://a:1"}, {"name": "m", "remote": "grpc://b:1"})
    assert [each.addresses[0].host for each in served.of(RemoteSpec)] == ["a"]
    assert any("left out" in problem.message for problem in served.problems)
