from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.specs import (
    BatchingSpec,
    DimensionBuckets,
    GraphSpec,
    LayoutSpec,
    MetricsSpec,
    ModelSpec,
    ServerSpec,
    ShapeSpec,
    SpecificVersions,
)
from ovmstrio.core.tensor import Dim
from ovmstrio.server.command_line import (
    UsageError,
    config_conflicts,
    ignored_options,
    listen_addresses,
    metric_families,
    read_settings,
    single_servable_spec,
)
from ovmstrio.server.settings import IGNORED, IGNORED_GROUP, ServerSettings, option_name
from ovmstrio.util.deprecation import RENAMED_SETTINGS

MODEL = {"model_name": "m", "model_path": "models/m"}


PATH_OPTIONS = [name for name, field in ServerSettings.model_fields.items() if "Path" in str(field.annotation)]


@pytest.mark.parametrize("name", PATH_OPTIONS)
def test_an_empty_path_is_not_the_current_folder(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_settings({**MODEL, name: ""})
    expected = f"{option_name(name)}: the value cannot be used (expected a path that is not empty"
    assert str(caught.value).startswith(expected)


def test_the_size_of_the_compile_cache_is_finite() -> None:
    with pytest.raises(UsageError, match="--compile-cache-gb: the value cannot be used"):
        read_settings({"compile_cache_gb": "inf"})


def test_the_defaults_serve_both_protocols() -> None:
    settings = read_settings({})
    assert (settings.port, settings.rest_port, settings.max_message_size) == (9000, 8000, 64 * 2**20)
    assert (settings.drain_seconds, settings.drain_delay, settings.file_system_poll_wait_seconds) == (30, 0, 1)
    assert single_servable_spec(settings) == ServerSpec()


def test_options_configure_a_single_model() -> None:
    options = {
        **MODEL,
        "shape": '{"a": "(1,10)"}',
        "layout": "NHWC:NCHW",
        "precision": "a:U8",
        "color_format": "BGR:RGB",
        "mean": "[1,2,3]",
        "scale": "2",
        "model_version_policy": '{"specific": {"versions": [3]}}',
        "nireq": "4",
        "batching": '{"max_batch_size": 8, "batch_timeout_ms": 2.5}',
        "shape_buckets": '{"batch": [1, 8]}',
        "plugin_config": '{"NUM_STREAMS": 2}',
        "target_device": "AUTO",
    }
    (model,) = single_servable_spec(read_settings(options)).of(ModelSpec)
    assert (model.name, model.base_path) == ("m", Path("models/m").absolute())
    assert model.shapes == {"a": ShapeSpec(dims=(Dim(1, 1), Dim(10, 10)))}
    assert model.layouts == {"": LayoutSpec(tensor="NHWC", model="NCHW")}
    assert (model.precisions, model.color_formats) == ({"a": "UINT8"}, {"": "BGR:RGB"})
    assert (model.mean, model.scale, model.nireq, model.target_device) == ((1, 2, 3), (2,), 4, "AUTO")
    assert model.batching == BatchingSpec(max_batch_size=8, batch_timeout_ms=2.5)
    assert model.shape_buckets == {"batch": DimensionBuckets(sizes=(1, 8))}
    assert model.version_policy == SpecificVersions(versions=(3,))
    assert model.plugin_config == {"NUM_STREAMS": "2"}
    assert model.problems == ()


@pytest.mark.parametrize(
    "options",
    [{"oidc_issuer": "http://localhost:80", "jwt_audience": "a"}, {"oidc_issuer": "any name", "jwks_file": "keys"}],
)
def test_an_issuer_is_any_name_with_a_key_file_and_else_an_address(options: dict[str, Any]) -> None:
    assert read_settings(options).oidc_issuer == options["oidc_issuer"]


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        ({"port": "70000", "log_level": "info", "drain_seconds": -1}, ["--port", "--drain-seconds", "--log-level"]),
        ({"prot": 1}, ["--prot"]),
        ({"port": 0, "rest_port": 0}, ["--port and --rest-port"]),
        ({"port": 8000}, ["--port and --rest-port"]),
        ({"model_name": "m"}, ["--model-name"]),
        ({"shape": "(1)"}, ["--shape"]),
        ({**MODEL, "config_path": "c.json"}, ["--model-name, --model-path"]),
        ({**MODEL, "shape": "1", "nireq": "x", "mean": "1"}, ["--nireq", "--shape", "--mean"]),
        ({**MODEL, "batching": '{"max_batch_size": 0, "batch_timeout_ms": 1}'}, ["--batching.max_batch_size"]),
        ({**MODEL, "shape_buckets": '{"batch": [2, 1]}'}, ["--shape-buckets.batch.sizes"]),
        ({**MODEL, "sequence_cleaner_poll_wait_minutes": -1}, ["--sequence-cleaner-poll-wait-minutes"]),
        ({"model_name": "", "model_path": "azfs://b/m"}, ["--model-name", "--model-path"]),
        ({"model_name": "m", "model_path": "../m"}, ["--model-path"]),
        ({"tls_cert": "c", "client_ca": "a"}, ["--tls-cert and --tls-key"]),
        ({"client_ca": "a"}, ["--client-ca"]),
        ({"jwt_audience": "a"}, ["--jwt-audience"]),
        ({"trusted_proxies": "10.0.0.0/8, proxy.example"}, ["--trusted-proxies"]),
        ({"oidc_issuer": "issuer.example"}, ["--oidc-issuer"]),
        ({"oidc_issuer": "http://issuer.example"}, ["--oidc-issuer"]),
        ({"metrics_list": "ovms_streams,x"}, ["--metrics-list"]),
        ({"metrics_list": "ovms_streams", "rest_port": 0}, ["--metrics-list"]),
        ({"metrics_list": "ovms_streams", "metrics_enable": False}, ["--metrics-list"]),
        ({"metrics_enable": True, "rest_port": 0}, ["--metrics-enable"]),
        ({"metrics_families": "ovms_*,ovmx_*,"}, ["--metrics-families", "--metrics-families"]),
        ({"metrics_families": "ovms_*", "metrics_enable": False}, ["--metrics-families"]),
        ({"metrics_families": "ovms_*", "metrics_list": "x"}, ["--metrics-list and --metrics-families"]),
    ],
)
def test_all_problems_of_a_command_line_are_reported(options: dict[str, Any], paths: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        read_settings(options)
    assert [problem.path for problem in error.value.problems] == paths


def test_ignored_options_have_reasons() -> None:
    fields = ServerSettings.model_fields.items()
    assert set(IGNORED) == {name for name, field in fields if field.json_schema_extra == {"group": IGNORED_GROUP}}
    options = dict.fromkeys(IGNORED, "1")
    assert read_settings(options).port == ServerSettings().port
    assert ignored_options({**options, "port": 1}) == IGNORED


@pytest.mark.parametrize("old", sorted(RENAMED_SETTINGS))
def test_the_old_name_of_a_setting_works_and_warns(old: str) -> None:
    new, value = RENAMED_SETTINGS[old], {"trial_load": "again", "core_sharing": "off"}.get(old, "7")
    with pytest.warns(DeprecationWarning, match=f"the setting {old} is now {new}"):
        settings = read_settings({old: value})
    assert settings.model_fields_set == {new}
    assert getattr(settings, new) == {"again": "retry", "7": 7}.get(value, value)


def test_a_batch_size_is_ignored_if_unreadable_or_with_a_shape() -> None:
    assert list(ignored_options({**MODEL, "batch_size": "2", "shape": "(1)"})) == ["batch_size"]
    assert list(ignored_options({**MODEL, "batch_size": "two"})) == ["batch_size"]
    assert ignored_options({**MODEL, "batch_size": "2"}) == {}


@pytest.mark.parametrize(
    ("options", "metrics", "message"),
    [
        ({}, MetricsSpec(), ""),
        ({"rest_port": 0}, None, ""),
        ({"rest_port": 0}, MetricsSpec(enable=False), ""),
        ({"rest_port": 0}, MetricsSpec(), "--rest-port is 0"),
        ({"metrics_enable": True}, MetricsSpec(), "by --metrics-enable"),
        ({"metrics_list": "ovms_streams"}, MetricsSpec(enable=False), "by --metrics-list"),
        ({"metrics_families": "ovms_*"}, MetricsSpec(), "by --metrics-families"),
    ],
)
def test_command_line_and_file_must_not_both_configure_metrics(
    options: dict[str, Any], metrics: MetricsSpec | None, message: str
) -> None:
    problems = config_conflicts(read_settings(options), ServerSpec(metrics=metrics))
    assert [problem.path for problem in problems] == (["monitoring.metrics"] if message else [])
    assert all(message in problem.message for problem in problems)


@pytest.mark.parametrize(
    ("addresses", "port", "expected"),
    [
        ("0.0.0.0", 9000, ["0.0.0.0:9000"]),
        ("127.0.0.1, ::1", 1, ["127.0.0.1:1", "[::1]:1"]),
        ("[::]", 1, ["[::]:1"]),
        ("localhost", 0, []),
        ("unix:/run/o.sock,localhost", 0, ["unix:/run/o.sock"]),
    ],
)
def test_listen_addresses(addresses: str, port: int, expected: list[str]) -> None:
    assert listen_addresses(addresses, port) == expected


def test_metric_families_are_chosen_by_list_or_by_patterns() -> None:
    listed = read_settings({"metrics_list": "ovms_streams, ovms_requests_fail"})
    assert metric_families(listed) == (("ovms_streams", "ovms_requests_fail"), None)
    assert metric_families(read_settings({})) == (None, None)
    chosen = ("ovms_requests_success", "ovms_requests_fail", "ovms_requests_accepted", "ovms_requests_rejected")
    settings = read_settings({"metrics_families": "ovms_requests_*, ovmstrio_ready,ovms_infer_req_active"})
    assert metric_families(settings) == (((*chosen[:2], "ovms_infer_req_active", *chosen[2:], "ovmstrio_ready"),) * 2)


@pytest.mark.parametrize(
    ("options", "beginnings"),
    [
        ({"rest_prot": 1}, ["--rest-prot: unknown option; did you mean '--rest-port'?"]),
        (
            {"metrics_families": "ovmstrio_redy,nothing_*"},
            [
                "--metrics-families: unknown metric family 'ovmstrio_redy'; did you mean 'ovmstrio_ready'?",
                "--metrics-families: unknown metric family 'nothing_*'; known are ovms_requests_success, ",
            ],
        ),
    ],
)
def test_problem_lines_suggest_the_right_spelling(options: dict[str, Any], beginnings: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        read_settings(options)
    assert [line[: len(start)] for line, start in zip(error.value.lines, beginnings, strict=True)] == beginnings


def _graph_folder(root: Path, place: str = "") -> Path:
    (root / "g" / place).mkdir(parents=True)
    (root / "g" / place / "graph.pbtxt").touch()
    return root / "g"


@pytest.mark.parametrize(("place", "path"), [("", "g"), ("1", "g"), ("", "g/graph.pbtxt")])
def test_a_folder_or_file_of_a_graph_is_served_as_a_graph(tmp_path: Path, place: str, path: str) -> None:
    folder = _graph_folder(tmp_path, place)
    spec = single_servable_spec(read_settings({"model_name": "it", "model_path": str(tmp_path / path)}))
    (graph,) = spec.of(GraphSpec)
    assert (graph.name, spec.of(ModelSpec), graph.problems) == ("it", (), ())
    assert (graph.base_path, graph.graph_path) == (folder / place, folder / place / "graph.pbtxt")
    missing = {"model_name": "g", "model_path": str(tmp_path / "x.pbtxt")}
    assert single_servable_spec(read_settings(missing)).of(GraphSpec)[0].graph_path == tmp_path / "x.pbtxt"


def test_a_graph_refuses_the_options_of_models(tmp_path: Path) -> None:
    folder = str(_graph_folder(tmp_path))
    options = {"model_name": "g", "model_path": folder, "batch_size": "2", "nireq": 1}
    with pytest.raises(UsageError) as error:
        read_settings(options)
    assert error.value.lines == [
        f"{option}: is an option of models, not of graphs; remove it" for option in ("--batch-size", "--nireq")
    ]


def test_models_of_a_subconfig_are_served_with_a_single_graph(tmp_path: Path) -> None:
    folder = _graph_folder(tmp_path)
    entries = [{"config": {"name": name, "base_path": name}} for name in ("m", "g")]
    (folder / "subconfig.json").write_text(json.dumps({"model_config_list": entries}))
    spec = single_servable_spec(read_settings({"model_name": "g", "model_path": str(folder)}))
    assert [(model.name, model.base_path) for model in spec.of(ModelSpec)] == [("m", folder / "m")]
    assert [problem.path for problem in spec.of(GraphSpec)[0].problems] == ["--model-name"]
    assert spec.of(GraphSpec)[0].problems[0].message.startswith("Given mediapipe graph name is already occupied")
