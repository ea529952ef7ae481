from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.ops.config.op_settings import (
    DagSettings,
    LocalServiceConf,
    LoggingSettings,
    OpSettings,
    PipelineSettings,
    TracerSettings,
)
from ovmstrio.runtimes.ops.config.overrides import conf_dict
from ovmstrio.runtimes.ops.config.pipeline_file import examine_pipeline_config, read_pipeline_config

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


def _refused(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_pipeline_config(yml_dict={"http_port": 9999, **settings})
    return str(caught.value)


def test_defaults() -> None:
    """A dictionary with nothing but a port gives every default."""
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


def test_file(tmp_path: Path) -> None:
    """A file's blocks are read, and the file is remembered."""
    path = tmp_path / "config.yml"
    path.write_text(_UCI)
    read = read_pipeline_config(path)
    assert (read.rpc_port, read.http_port, read.worker_num, read.source) == (9998, 18082, 4, path)
    assert read.dag == DagSettings(is_thread_op=False, tracer=TracerSettings(3))
    local = LocalServiceConf("uci_housing_model", "local_predictor", ("price",), device_type=0, devices="0, 2")
    assert read.ops == {"uci": OpSettings("uci", 2, local_service_conf=local)}
    assert read.op("uci").has_model
    assert local.device_ids == ("0", "2")


def test_empty_blocks_are_as_none_at_all() -> None:
    """An Op, a block or a key without a value has its defaults."""
    blocks = {"dag": None, "op": {"uci": None, "b": {"local_service_conf": None, "fetch_list": None}}}
    read = read_pipeline_config(yml_dict={"rpc_port": 9998, "logging": None, **blocks})
    assert read.ops == {"uci": OpSettings("uci"), "b": OpSettings("b")}


def test_all_problems_with_places(tmp_path: Path) -> None:
    """Every problem of a file is told at once: file, line, key, what was expected and what was found."""
    path = tmp_path / "config.yml"
    path.write_text(
        "rpc_port: 80\nhttp_port: '9999'\nworker_num: 0\nworker_num: 1\ndag:\n  is_thread_op: 1\n  retry: 0\nop:\n"
        "  uci:\n    concurrency: true\n    server_endpoints: host:1\n    local_service_conf:\n      devices: 0\n"
        "      device_type: 9\n  det: 5\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_pipeline_config(path)
    assert str(caught.value).replace(str(path), "F").splitlines() == [
        "F:1: rpc_port: the value cannot be used (expected a whole number of 1024 to 65535 or 0, found 80)",
        (
            "F:2: http_port: the value cannot be used (expected a whole number of 1024 to 65535 or 0, "
            'found "9999"); remove the quotes'
        ),
        "F:3: worker_num: the value cannot be used (expected a whole number of 1 or more, found 0)",
        "F:4: worker_num: the key is given twice in one mapping; remove one of them",
        "F:6: dag.is_thread_op: the value cannot be used (expected true or false, found 1)",
        "F:7: dag.retry: the value cannot be used (expected a whole number of 1 or more, found 0)",
        "F:10: op.uci.concurrency: the value cannot be used (expected a whole number of 1 or more, found true)",
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
            "(expected a whole number of -1 to 6, found 9)"
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
        ({"op": {"a": {"fetch_list": [1]}}}, "op.a.fetch_list", "[1]"),
        ({"op": {"a": {"local_service_conf": {"thread_num": 0}}}}, "op.a.local_service_conf.thread_num", "0"),
        ({"op": {"a": {"local_service_conf": {"precision": 16}}}}, "op.a.local_service_conf.precision", "16"),
        ({"logging": {"level": "loud"}}, "logging.level", '"loud"'),
        ({"logging": {"rate_limit": 0}}, "logging.rate_limit", "0"),
    ],
)
def test_each_rule_names_key_and_value(block: dict[str, Any], key: str, value: str) -> None:
    """A value of a wrong type or out of bounds is refused with its key and itself."""
    message = _refused(block)
    assert message.startswith(f"yml_dict: {key}: the value cannot be used (expected ")
    assert f", found {value})" in message
    assert len(message.splitlines()) == 1


def test_unknown_keys_are_warnings() -> None:
    """A misspelt key stops nothing, but is told with the key that was meant."""
    settings = {"http_prot": 1, "rpc_port": 9998, "op": {"a": {"concurency": 2}}}
    examined = examine_pipeline_config(yml_dict=settings)
    assert [str(problem) for problem in examined.problems] == [
        "yml_dict: http_prot: unknown key 'http_prot', which has no effect; did you mean 'http_port'?",
        "yml_dict: op.a.concurency: unknown key 'concurency', which has no effect; did you mean 'concurrency'?",
    ]
    assert examined.settings.op("a").concurrency == 1
    assert not examined.errors


def test_keys_without_effect() -> None:
    """Keys that belong to another engine are taken, and named with the reason."""
    local = {"use_mkldnn": True, "workdir": "w", "thread_num": 3}
    settings = {"rpc_port": 9998, "grpc_gateway_port": 5, "op": {"a": {"local_service_conf": local}}}
    examined = examine_pipeline_config(yml_dict=settings)
    assert not examined.problems
    inner = "op.a.local_service_conf"
    assert set(examined.without_effect) == {"grpc_gateway_port", f"{inner}.use_mkldnn", f"{inner}.workdir"}
    assert examined.settings.op("a").local_service_conf.thread_num == 3


@pytest.mark.parametrize("spelling", ["channel_recv_frist_arrive", "channel_recv_first_arrive"])
def test_both_spellings(spelling: str) -> None:
    """The key that is misspelt since ever can be written rightly too."""
    assert read_pipeline_config(yml_dict={"rpc_port": 9998, "dag": {spelling: True}}).dag.channel_recv_frist_arrive


def test_ports() -> None:
    """One port is enough, 0 is any free one; none at all, or one for both, is refused."""
    assert read_pipeline_config(yml_dict={"rpc_port": 0}).rpc_port == 0
    with pytest.raises(ConfigError, match="rpc_port and http_port are both missing"):
        read_pipeline_config(yml_dict={})
    assert "port 9999 is that of rpc_port already" in _refused({"rpc_port": 9999})
    metrics = {"enable_prometheus": True, "prometheus_port": 9999}
    assert read_pipeline_config(yml_dict={"http_port": 9999, "dag": metrics}).dag.prometheus_port == 9999
    with pytest.raises(ConfigError, match=r"dag.prometheus_port: port 9999 is that of rpc_port already"):
        read_pipeline_config(yml_dict={"rpc_port": 9999, "dag": metrics})
    assert read_pipeline_config(yml_dict={"rpc_port": 0, "http_port": 0}).http_port == 0


def test_exactly_one_source() -> None:
    """A file and a dictionary together, or neither, is refused."""
    sources: list[tuple[str | None, dict[str, Any] | None]] = [(None, None), ("config.yml", {})]
    for yml_file, yml_dict in sources:
        with pytest.raises(ConfigError, match="give either yml_file or yml_dict"):
            read_pipeline_config(yml_file, yml_dict)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "F:1"),
        (b"- 1", "expected a mapping .*found \\[1\\]"),
        (b"\xff", "not UTF-8"),
        (b"a: !!python/tuple []", "tag"),
    ],
)
def test_files_that_are_no_configuration(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no YAML, or no mapping, is refused with the file's name; what is not there, with where it would be."""
    path = tmp_path / "F"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_pipeline_config(path)
    with pytest.raises(ConfigError, match=r"missing\.yml: cannot be read: No such file"):
        read_pipeline_config(tmp_path / "missing.yml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"No such file.*; a relative path begins .*{tmp_path}"):
        read_pipeline_config("missing.yml")


def test_overrides(tmp_path: Path) -> None:
    """Options change a value, merge a mapping, make blocks that are not there, and keep the rest."""
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


def test_wrong_overrides() -> None:
    """An option that is none, or has a wrong value, is told as such."""
    with pytest.raises(ConfigError, match=r"worker_num: the option cannot be used \(expected key.key=value"):
        read_pipeline_config(yml_dict={"rpc_port": 0}, overrides=["worker_num"])
    with pytest.raises(ConfigError, match=r"worker_num: the value cannot be used .* found \"x\""):
        read_pipeline_config(yml_dict={"rpc_port": 0}, overrides=["worker_num=x"])
    with pytest.raises(ConfigError, match="the option's value is not YAML"):
        read_pipeline_config(yml_dict={"rpc_port": 0}, overrides=["worker_num=["])


def test_logging() -> None:
    """The block ``logging`` sets level, sizes and limits."""
    block = {"level": "debug", "max_bytes": 1000, "backups": 0, "rate_limit": 5, "enabled": False}
    read = read_pipeline_config(yml_dict={"rpc_port": 0, "logging": block, "http_status": True})
    assert read.logging == LoggingSettings(logging.DEBUG, 1000, 0, 5, enabled=False)
    assert read.http_status


def test_places_of_later_problems(tmp_path: Path) -> None:
    """What is found after reading has the line of its key, or of the block that the key would be in."""
    path = tmp_path / "config.yml"
    path.write_text(_UCI)
    examined = examine_pipeline_config(path)
    lines = {"op.uci.concurrency": 10, "op.uci.timeout": 9, "op.uci.local_service_conf.devices": 14}
    for key, line in lines.items():
        placed = examined.place(Problem("no such device", path=key))
        assert (placed.file, placed.line) == (str(path), line)
    assert examined.place(Problem("of no key")) == Problem("of no key")
    of_dictionary = examine_pipeline_config(yml_dict={"rpc_port": 0})
    assert of_dictionary.place(Problem("m", path="op.a")).line is None


_SCALARS: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-5, 70_000) | st.text(max_size=5) | st.floats() | st.just([])
)
_KEYS = st.sampled_from(
    ["rpc_port", "dag", "op", "tracer", "uci", "local_service_conf", "retry", "fetch_list", "logging", "level"]
)


@given(st.dictionaries(_KEYS, st.recursive(_SCALARS, lambda inner: st.dictionaries(_KEYS, inner, max_size=4))))
def test_any_dictionary_is_read_or_refused(settings: dict[str, Any]) -> None:
    """Whatever the dictionary holds, the answer is settings or a list of problems."""
    try:
        read = read_pipeline_config(yml_dict=settings)
    except ConfigError:
        return
    assert read.worker_num >= 1
    assert all(op.retry >= 1 for op in read.ops.values())
