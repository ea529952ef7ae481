from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.config.schema import keys_of
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ext.ops import Op
from ovmstrio.ops.config_file import (
    conf_dict,
    read_pipeline_config,
    resolve_op_settings,
    validate_pipeline_config,
)
from ovmstrio.ops.graph import OpGraph
from ovmstrio.ops.settings import (
    DagSettings,
    LocalServiceConf,
    LoggingSettings,
    OpSettings,
    PipelineSettings,
    TracerSettings,
)
from ovmstrio.ops.validate import validate_pipeline
from tests.support.ops import text_graph

_UCI = """\
worker_num: 4
http_port: 18082
rpc_port: 9998
dag:
    is_thread_op: False
    tracer:
        interval_s: 3
op:
    uci:
        concurrency: 2
        local_service_conf:
            model_config: uci_housing_model
            device_type: 0
            devices: "0, 2"
            client_type: local_predictor
            fetch_list: ["price"]
"""


_GUIDE = Path(__file__).parents[3] / "docs" / "ops_config.md"
_SETTINGS = (PipelineSettings, DagSettings, TracerSettings, OpSettings, LocalServiceConf, LoggingSettings)


def _refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_pipeline_config(yml_dict=settings)
    return str(caught.value)


# Keys and values


def test_defaults() -> None:
    read = read_pipeline_config(yml_dict={"http_port": 9999, "op": {"any": {}}})
    assert read == PipelineSettings(None, 9999, 1, False, False, DagSettings(), {"any": OpSettings("any")})
    assert read.logging == LoggingSettings(logging.INFO, None, None, None, enabled=True)
    assert asdict(read.dag) == {
        "is_thread_op": True, "retry": 1, "use_profile": False, "channel_size": 0, "channel_recv_frist_arrive": False,
        "client_type": "brpc", "tracer": {"interval_s": -1}, "enable_prometheus": False, "prometheus_port": None,
        "max_queue": None, "request_timeout": -1,
    }  # fmt: skip
    assert not read.dag.tracer.enabled
    op = read.op("any")
    assert op == replace(read.op("another"), name="any")
    local = asdict(op).pop("local_service_conf")
    assert {key: value for key, value in asdict(op).items() if key != "local_service_conf"} == {
        "name": "any", "concurrency": 1, "timeout": -1, "retry": 1, "batch_size": 1, "auto_batching_timeout": -1,
        "server_endpoints": (), "client_type": None, "client_config": None, "fetch_list": None,
        "use_encryption_model": False, "encryption_key": None, "model_name": None,
    }  # fmt: skip
    assert local == {
        "model_config": None, "client_type": None, "fetch_list": None, "workdir": "", "thread_num": 2,
        "device_type": -1, "devices": "", "mem_optim": True, "ir_optim": False, "use_mkldnn": False,
        "mkldnn_cache_capacity": 0, "mkldnn_op_list": None, "mkldnn_bf16_op_list": None, "precision": "fp32",
        "use_calib": False, "min_subgraph_size": 3, "reload_interval_s": None,
    }  # fmt: skip
    assert (op.timeout_seconds, op.batch_timeout_seconds, op.has_model) == (None, None, False)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text(_UCI)
    read = read_pipeline_config(path)
    assert (read.rpc_port, read.http_port, read.worker_num, read.source) == (9998, 18082, 4, path)
    assert read.dag == DagSettings(is_thread_op=False, tracer=TracerSettings(3))
    local = LocalServiceConf("uci_housing_model", "local_predictor", ("price",), device_type=0, devices="0, 2")
    assert read.ops == {"uci": OpSettings("uci", 2, local_service_conf=local)}
    assert read.op("uci").has_model
    assert local.device_ids == ("0", "2")


def test_empty_blocks_and_keys_have_their_defaults() -> None:
    blocks = {"dag": None, "op": {"uci": None, "b": {"local_service_conf": None, "fetch_list": None}}}
    read = read_pipeline_config(yml_dict={"rpc_port": 9998, "logging": None, **blocks})
    assert read.ops == {"uci": OpSettings("uci"), "b": OpSettings("b")}


def test_all_problems_of_a_file_are_reported_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text(
        "rpc_port: 80\nhttp_port: '9999'\nworker_num: 0\nworker_num: 1\ndag:\n  is_thread_op: 1\n  retry: 0\nop:\n"
        "  uci:\n    concurrency: true\n    server_endpoints: host:1\n    local_service_conf:\n      devices: 0\n"
        "      device_type: 9\n  det: 5\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_pipeline_config(path)
    assert str(caught.value).replace(str(path), "F").splitlines() == [
        "F:1: rpc_port: the value cannot be used (expected an integer of 1024 to 65535 or 0, found 80)",
        (
            "F:2: http_port: the value cannot be used (expected an integer of 1024 to 65535 or 0, "
            'found "9999"); remove the quotes'
        ),
        "F:3: worker_num: the value cannot be used (expected an integer of 1 or more, found 0)",
        "F:4: worker_num: the key is given twice in one mapping; remove one of them",
        "F:6: dag.is_thread_op: the value cannot be used (expected true or false, found 1)",
        "F:7: dag.retry: the value cannot be used (expected an integer of 1 or more, found 0)",
        "F:10: op.uci.concurrency: the value cannot be used (expected an integer of 1 or more, found true)",
        (
            'F:11: op.uci.server_endpoints: the value cannot be used (expected a list of texts, found "host:1"); '
            'write a list: ["host:1"]'
        ),
        (
            "F:13: op.uci.local_service_conf.devices: the value cannot be used (expected a text, found 0); "
            'put it in quotes: "0"'
        ),
        (
            "F:14: op.uci.local_service_conf.device_type: the value cannot be used "
            "(expected an integer of -1 to 6, found 9)"
        ),
        "F:15: op.det: the value cannot be used (expected a mapping of keys to values, found 5)",
    ]


@pytest.mark.parametrize(
    ("block", "key", "value"),
    [
        ({"worker_num": 1.5}, "worker_num", "1.5"),
        ({"build_dag_each_worker": "yes"}, "build_dag_each_worker", '"yes"'),
        ({"dag": {"channel_size": -1}}, "dag.channel_size", "-1"),
        ({"dag": {"client_type": "grcp"}}, "dag.client_type", '"grcp"'),
        ({"dag": {"tracer": {"interval_s": "3s"}}}, "dag.tracer.interval_s", '"3s"'),
        ({"dag": {"tracer": 3}}, "dag.tracer", "3"),
        ({"dag": {"use_profile": 0}}, "dag.use_profile", "0"),
        ({"dag": {"enable_prometheus": True, "prometheus_port": 70000}}, "dag.prometheus_port", "70000"),
        ({"op": {"a": {"timeout": "3"}}}, "op.a.timeout", '"3"'),
        ({"op": {"a": {"retry": 0}}}, "op.a.retry", "0"),
        ({"op": {"a": {"batch_size": 0}}}, "op.a.batch_size", "0"),
        ({"op": {"a": {"fetch_list": [1]}}}, "op.a.fetch_list[0]", "1"),
        ({"op": {"a": {"local_service_conf": {"thread_num": 0}}}}, "op.a.local_service_conf.thread_num", "0"),
        ({"op": {"a": {"local_service_conf": {"precision": 16}}}}, "op.a.local_service_conf.precision", "16"),
        ({"logging": {"level": "loud"}}, "logging.level", '"loud"'),
        ({"logging": {"rate_limit": 0}}, "logging.rate_limit", "0"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(block: dict[str, Any], key: str, value: str) -> None:
    message = _refused(http_port=9999, **block)
    assert message.startswith(f"yml_dict: {key}: the value cannot be used (expected ")
    assert f", found {value})" in message
    assert len(message.splitlines()) == 1


def test_unknown_keys_are_warnings() -> None:
    settings = {"http_prot": 1, "rpc_port": 9998, "op": {"a": {"concurency": 2}}}
    examined = validate_pipeline_config(yml_dict=settings)
    assert [str(problem) for problem in examined.problems] == [
        "yml_dict: http_prot: unknown key 'http_prot', ignored; did you mean 'http_port'?",
        "yml_dict: op.a.concurency: unknown key 'concurency', ignored; did you mean 'concurrency'?",
    ]
    assert examined.settings.op("a").concurrency == 1
    assert not examined.errors


def test_keys_without_effect_are_named() -> None:
    local = {"use_mkldnn": True, "workdir": "w", "thread_num": 3}
    settings = {"rpc_port": 9998, "grpc_gateway_port": 5, "op": {"a": {"local_service_conf": local}}}
    examined = validate_pipeline_config(yml_dict=settings)
    assert not examined.problems
    inner = "op.a.local_service_conf"
    assert set(examined.without_effect) == {"grpc_gateway_port", f"{inner}.use_mkldnn", f"{inner}.workdir"}
    assert examined.settings.op("a").local_service_conf.thread_num == 3


@pytest.mark.parametrize("spelling", ["channel_recv_frist_arrive", "channel_recv_first_arrive"])
def test_channel_recv_first_arrive_has_two_spellings(spelling: str) -> None:
    assert read_pipeline_config(yml_dict={"rpc_port": 9998, "dag": {spelling: True}}).dag.channel_recv_frist_arrive


_METRICS = {"enable_prometheus": True, "prometheus_port": 9999}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "rpc_port and http_port are both missing"),
        ({"rpc_port": 9999, "http_port": 9999}, "port 9999 is already rpc_port"),
        ({"rpc_port": 9999, "dag": _METRICS}, "dag.prometheus_port: port 9999 is already rpc_port"),
    ],
    ids=["none", "one for both", "metrics on another"],
)
def test_ports_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    assert message in _refused(**settings)


def test_port_0_is_any_and_metrics_may_share_the_http_port() -> None:
    both = read_pipeline_config(yml_dict={"rpc_port": 0, "http_port": 0})
    assert (both.rpc_port, both.http_port) == (0, 0)
    assert read_pipeline_config(yml_dict={"http_port": 9999, "dag": _METRICS}).dag.prometheus_port == 9999


@pytest.mark.parametrize(("yml_file", "yml_dict"), [(None, None), ("config.yml", {})])
def test_either_a_file_or_a_dictionary_is_read(yml_file: str | None, yml_dict: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError, match="expected exactly one of yml_file and yml_dict"):
        read_pipeline_config(yml_file, yml_dict)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "F:1"),
        (b"- 1", "expected a mapping .*found \\[1\\]"),
        (b"\xff", "not UTF-8"),
        (b"a: !!python/tuple []", "tag"),
    ],
    ids=["syntax", "list", "encoding", "tag"],
)
def test_files_that_are_no_configuration(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "F"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_pipeline_config(path)


def test_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yml: cannot be read: No such file"):
        read_pipeline_config(tmp_path / "missing.yml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"No such file.*; relative to the current directory.*{tmp_path}"):
        read_pipeline_config("missing.yml")


def test_overrides_change_values_and_keep_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text(_UCI)
    options = ["op.uci.concurrency=5", "op.uci.local_service_conf={thread_num: 7}", "dag.retry=2", "op.new.timeout=10"]
    read = read_pipeline_config(path, overrides=options)
    assert (read.op("uci").concurrency, read.dag.retry, read.dag.tracer.interval_s) == (5, 2, 3)
    assert read.op("uci").local_service_conf.thread_num == 7
    assert read.op("uci").local_service_conf.fetch_list == ("price",)
    assert read.op("new").timeout_seconds == 0.01
    plain = conf_dict(path, ["op.uci.local_service_conf.devices=''"])
    assert plain["op"]["uci"]["local_service_conf"]["devices"] == ""
    assert plain["worker_num"] == 4


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("worker_num", r"worker_num: malformed option \(expected key.key=value"),
        ("worker_num=x", r"worker_num: the value cannot be used .* found \"x\""),
        ("worker_num=[", "option value is not YAML"),
    ],
)
def test_wrong_overrides(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_pipeline_config(yml_dict={"rpc_port": 0}, overrides=[option])


def test_the_logging_block_is_read() -> None:
    block = {"level": "debug", "max_bytes": 1000, "backups": 0, "rate_limit": 5, "enabled": False}
    read = read_pipeline_config(yml_dict={"rpc_port": 0, "logging": block, "http_status": True})
    assert read.logging == LoggingSettings(logging.DEBUG, 1000, 0, 5, enabled=False)
    assert read.http_status


def test_later_problems_have_the_line_of_their_key_or_block(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text(_UCI)
    examined = validate_pipeline_config(path)
    lines = {"op.uci.concurrency": 10, "op.uci.timeout": 9, "op.uci.local_service_conf.devices": 14}
    for key, line in lines.items():
        placed = examined.place(Problem("no such device", path=key))
        assert (placed.file, placed.line) == (str(path), line)
    assert examined.place(Problem("of no key")) == Problem("of no key")
    of_dictionary = validate_pipeline_config(yml_dict={"rpc_port": 0})
    assert of_dictionary.place(Problem("m", path="op.a")).line is None


_SCALARS: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-5, 70_000) | st.text(max_size=5) | st.floats() | st.just([])
)
_KEYS = st.sampled_from(
    ["rpc_port", "dag", "op", "tracer", "uci", "local_service_conf", "retry", "fetch_list", "logging", "level"]
)


@given(st.dictionaries(_KEYS, st.recursive(_SCALARS, lambda inner: st.dictionaries(_KEYS, inner, max_size=4))))
def test_any_dictionary_is_read_or_refused(settings: dict[str, Any]) -> None:
    try:
        read = read_pipeline_config(yml_dict=settings)
    except ConfigError:
        return
    assert read.worker_num >= 1
    assert all(op.retry >= 1 for op in read.ops.values())


def test_every_key_is_in_the_guide() -> None:
    text = _GUIDE.read_text()
    keys = set[str]().union(*map(keys_of, _SETTINGS))
    assert not {key for key in keys if f"`{key}`" not in text and f".{key}`" not in text}


# Arguments of Ops


def _resolve(of_file: dict[str, Any] | None, **arguments: Any) -> OpSettings:
    settings = read_pipeline_config(yml_dict={"rpc_port": 0, "op": {"a": of_file}})
    return resolve_op_settings(Op(name="a", **arguments), settings)


@pytest.mark.parametrize(
    ("key", "argument", "of_file", "default"),
    [
        ("concurrency", 3, 2, 1),
        ("timeout", 300, 200, -1),
        ("retry", 3, 2, 1),
        ("batch_size", 3, 2, 1),
        ("auto_batching_timeout", 300, 200, -1),
        ("client_type", "kserve", "grpc", None),
        ("client_config", "c", "f", None),
    ],
)
def test_an_argument_precedes_the_file_and_the_file_the_default(
    key: str, argument: Any, of_file: Any, default: Any
) -> None:
    assert getattr(_resolve({key: of_file}, **{key: argument}), key) == argument
    assert getattr(_resolve({key: of_file}), key) == of_file
    assert getattr(_resolve(None), key) == default


def test_arguments_of_0_and_minus_1_are_values_except_for_retry() -> None:
    assert _resolve({"timeout": 200}, timeout=0).timeout_seconds is None
    assert _resolve({"auto_batching_timeout": 5}, auto_batching_timeout=-1).batch_timeout_seconds is None
    assert _resolve({"retry": 4}, retry=0).retry == 4


_LOCAL = {"model_config": "m", "fetch_list": ["inner"], "client_type": "local_predictor"}


@pytest.mark.parametrize(
    ("of_file", "argument", "expected"),
    [
        ({"local_service_conf": _LOCAL, "fetch_list": ["outer"]}, ["mine"], ("mine",)),
        ({"local_service_conf": _LOCAL, "fetch_list": ["outer"]}, None, ("inner",)),
        ({"local_service_conf": {"model_config": "m"}, "fetch_list": ["outer"]}, None, ("outer",)),
        ({"local_service_conf": {"model_config": "m"}}, None, None),
    ],
    ids=["argument", "local_service_conf", "key of the Op", "none"],
)
def test_precedence_of_fetch_lists(of_file: dict[str, Any], argument: Any, expected: Any) -> None:
    resolved = _resolve(of_file, fetch_list=argument)
    assert resolved.fetch_list == resolved.local_service_conf.fetch_list == expected


def test_endpoints_disable_the_local_block() -> None:
    of_file = {"local_service_conf": _LOCAL, "fetch_list": ["outer"], "client_type": "kserve"}
    resolved = _resolve(of_file, server_endpoints=["h:1"])
    assert (resolved.fetch_list, resolved.client_type, resolved.server_endpoints) == (("outer",), "kserve", ("h:1",))
    assert _resolve(of_file).client_type == "local_predictor"


def test_wrong_arguments_are_all_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        _resolve(None, concurrency=0, batch_size="4", retry=-1, server_endpoints="host:1")
    assert str(caught.value).splitlines() == [
        "argument concurrency of Op a is invalid (expected an integer of 1 or more, found 0)",
        ('argument batch_size of Op a is invalid (expected an integer of 1 or more, found "4"); remove the quotes'),
        "argument retry of Op a is invalid (expected an integer of 1 or more, found -1)",
        (
            'argument server_endpoints of Op a is invalid (expected a list of texts, found "host:1"); '
            'write a list: ["host:1"]'
        ),
    ]
    assert _resolve(None, server_endpoints=("h:1", "h:2")).server_endpoints == ("h:1", "h:2")


def test_a_mapping_changes_only_what_the_constructor_was_not_given() -> None:
    op = Op("op", concurrency=9, fetch_list=["a"])
    op.init_from_dict({"concurrency": 1, "timeout": 5, "retry": 2, "server_endpoints": ["here"], "fetch_list": ["b"]})
    assert (op.concurrency, op.timeout, op.retry, op.server_endpoints, op.fetch_list) == (9, 5, 2, ["here"], ["a"])


# Examination of a pipeline with its settings


async def _problems(tmp_path: Path, config: str, graph: OpGraph | None = None, *, load: bool = True) -> list[str]:
    file = tmp_path / "config.yml"
    file.write_text(f"rpc_port: 0\n{config}")
    found = await validate_pipeline(graph or text_graph("a<@", "b<a"), validate_pipeline_config(file), load=load)
    return [str(problem).replace(str(file), "F") for problem in found]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("  a: {batch_size: 4, auto_batching_timeout: 5}\n  b: {timeout: 10, retry: 2}\n", ""),
        ("  aa: {}", "F:3: op.aa: the pipeline has no Op 'aa'; did you mean 'a'?"),
        ("  xyz: {}", "F:3: op.xyz: the pipeline has no Op 'xyz'; its Ops are a, b"),
        (
            "  a:\n    batch_size: 2",
            ("F:4: op.a.batch_size: partial batches of Op a wait until the pipeline stalls; set auto_batching_timeout"),
        ),
        (
            "  b:\n    auto_batching_timeout: 2",
            (
                "F:4: op.b.auto_batching_timeout: auto_batching_timeout of Op b has no effect with batches of 1; "
                "set batch_size"
            ),
        ),
        (
            "  b:\n    retry: 2",
            "F:4: op.b.retry: retry of Op b has no effect without a timeout; set timeout",
        ),
    ],
    ids=["no problem", "misspelt Op", "unknown Op", "batches without a time", "time without batches", "retry"],
)
async def test_settings_without_effect(tmp_path: Path, config: str, expected: str) -> None:
    assert "\n".join(await _problems(tmp_path, f"op:\n{config}")) == expected


async def test_wrong_arguments_of_every_op_are_reported(tmp_path: Path) -> None:
    problems = await _problems(tmp_path, "", text_graph("a<@", "b<a", make=partial(Op, concurrency=0)))
    assert [text.partition(" is invalid")[0] for text in problems] == [
        f"argument concurrency of Op {name}" for name in "ab"
    ]


async def test_loops_with_first_arrivals_are_refused(tmp_path: Path) -> None:
    graph = text_graph("a<@", "b<a", "c<a b", "d<c", jumps={"c": "a"})
    (text,) = await _problems(tmp_path, "dag:\n  channel_recv_frist_arrive: true\n", graph)
    assert text.startswith("F:3: dag.channel_recv_frist_arrive: ")
