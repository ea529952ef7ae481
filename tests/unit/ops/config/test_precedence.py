from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.ops.config.op_settings import OpSettings
from ovmstrio.runtimes.ops.config.overrides import settings_of
from ovmstrio.runtimes.ops.config.pipeline_file import read_pipeline_config


@dataclass
class _Arguments:
    name: str = "a"
    server_endpoints: list[str] | None = None
    fetch_list: list[str] | None = None
    client_config: str | None = None
    client_type: str | None = None
    concurrency: int | None = None
    timeout: int | None = None
    retry: int | None = 0
    batch_size: int | None = None
    auto_batching_timeout: int | None = None


def _resolve(of_file: dict[str, Any] | None, **arguments: Any) -> OpSettings:
    settings = read_pipeline_config(yml_dict={"rpc_port": 0, "op": {"a": of_file}})
    return settings_of(_Arguments(**arguments), settings)


_ROWS: list[tuple[str, Any, Any, Any]] = [
    ("concurrency", 3, 2, 1),
    ("timeout", 300, 200, -1),
    ("retry", 3, 2, 1),
    ("batch_size", 3, 2, 1),
    ("auto_batching_timeout", 300, 200, -1),
    ("client_type", "kserve", "grpc", None),
    ("client_config", "c", "f", None),
]


@pytest.mark.parametrize(("key", "argument", "of_file", "default"), _ROWS)
def test_constructor_then_file_then_default(key: str, argument: Any, of_file: Any, default: Any) -> None:
    """A constructor's argument counts most, then the file's value, then the default; ``retry`` is no exception."""
    assert getattr(_resolve({key: of_file}, **{key: argument}), key) == argument
    assert getattr(_resolve({key: of_file}), key) == of_file
    assert getattr(_resolve(None), key) == default


def test_values_below_the_default_count_as_given() -> None:
    """A constructor can turn off what the file turns on: 0 and -1 are values, except for ``retry``."""
    assert _resolve({"timeout": 200}, timeout=0).timeout_seconds is None
    assert _resolve({"auto_batching_timeout": 5}, auto_batching_timeout=-1).batch_timeout_seconds is None
    assert _resolve({"retry": 4}, retry=0).retry == 4


def test_fetch_list_of_the_constructor_wins() -> None:
    """The constructor's outputs count more than those of the model's block, which count more than the Op's key."""
    local = {"model_config": "m", "fetch_list": ["inner"]}
    for of_file, argument, expected in (
        ({"local_service_conf": local, "fetch_list": ["outer"]}, ["mine"], ("mine",)),
        ({"local_service_conf": local, "fetch_list": ["outer"]}, None, ("inner",)),
        ({"local_service_conf": {"model_config": "m"}, "fetch_list": ["outer"]}, None, ("outer",)),
        ({"local_service_conf": {"model_config": "m"}}, None, None),
    ):
        resolved = _resolve(of_file, fetch_list=argument)
        assert resolved.fetch_list == expected
        assert resolved.local_service_conf.fetch_list == expected


def test_local_block_is_nothing_with_endpoints() -> None:
    """With endpoints the Op's own keys count, whatever the model's block says."""
    local = {"model_config": "m", "fetch_list": ["inner"], "client_type": "local_predictor"}
    of_file = {"local_service_conf": local, "fetch_list": ["outer"], "client_type": "kserve"}
    resolved = _resolve(of_file, server_endpoints=["h:1"])
    assert (resolved.fetch_list, resolved.client_type, resolved.server_endpoints) == (("outer",), "kserve", ("h:1",))
    assert _resolve(of_file).client_type == "local_predictor"


def test_op_without_entry_has_defaults() -> None:
    """An Op that the file does not name has its name and the defaults."""
    settings = read_pipeline_config(yml_dict={"rpc_port": 0, "op": {"other": {"timeout": 1}}})
    assert settings_of(_Arguments(), settings) == OpSettings("a")


def test_arguments_that_cannot_be_used() -> None:
    """Arguments of a wrong type or out of bounds are refused as the file's are, all of an Op at once."""
    with pytest.raises(ConfigError) as caught:
        _resolve(None, concurrency=0, batch_size="4", retry=-1, server_endpoints="host:1")
    assert str(caught.value).splitlines() == [
        "argument concurrency of Op a cannot be used (expected a whole number of 1 or more, found 0)",
        (
            'argument batch_size of Op a cannot be used (expected a whole number of 1 or more, found "4"); '
            "remove the quotes"
        ),
        "argument retry of Op a cannot be used (expected a whole number of 1 or more, found -1)",
        (
            'argument server_endpoints of Op a cannot be used (expected a list of texts, found "host:1"); '
            'write a list: ["host:1"]'
        ),
    ]
    assert _resolve(None, server_endpoints=("h:1", "h:2")).server_endpoints == ("h:1", "h:2")
