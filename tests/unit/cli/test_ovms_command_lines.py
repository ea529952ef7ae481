"""Command lines in the ways that OpenVINO Model Server's pages start it: taken as they are, or with a way out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ovms_cli import serve
from ovms_cli.all_commands import app
from ovms_cli.serving import usage
from ovmstrio.server.command_line import ignored_options, read_settings, single_servable
from ovmstrio.server.ovms_options import WAYS_OUT
from ovmstrio.server.settings import ServerSettings

Run = Callable[[str], Result]

SERVED = [
    "--model_name dummy --model_path /models --port 9000",
    "--model_name resnet --model_path /models/resnet50.xml --port 9000 --rest_port 8000",
    "--model_path /opt/model --model_name resnet --port 9000 --target_device GPU",
    "--model_path /opt/model --model_name resnet --port 9000 --target_device NPU --batch_size 1",
    '--model_path /opt/model --model_name resnet --port 9000 --target_device "HETERO:GPU,CPU"',
    '--model_path m --model_name m --plugin_config \'{"AUTO_BATCH_TIMEOUT": 200}\' --target_device "BATCH:CPU(16)"',
    r'--model_path m --model_name m --plugin_config "{\"PERFORMANCE_HINT\": \"LATENCY\"}" --target_device AUTO:GPU,CPU',
    r'--model_path model --model_name resnet --plugin_config "{\"NUM_STREAMS\": \"1\"}"',
    r'--model_name usem --model_path encoder/ --plugin_config "{\"NUM_STREAMS\": 1}" --target_device CPU',
    '--model_name r --model_path /r --mean "[123.6,116.2,103.5]" --scale "[58.3,57.1,57.3]" --layout "NHWC:NCHW"',
    '--model_path /m --model_name m --layout NHWC:NCHW --shape "(1,224,224,3)" --precision uint8:fp32',
    "--model_path /m --model_name m --layout NHWC:NCHW --color_format BGR:RGB",
    '--model_name m --model_path /models/resnet --layout NHWC:NCHW --plugin_config \'{"PERFORMANCE_HINT":"LATENCY"}\'',
    "--model_path /models/resnet --model_name resnet --port 9000 --layout NHWC",
    '--model_path /models --model_name face --shape "(-1,3,-1,-1)" --port 9000 --rest_port 8000',
    """--model_path /models --model_name bert --shape '{"input_ids": "(1,-1)", "token_type_ids": "(1,-1)"}'""",
    "--model_name resnet --model_path /models/resnet50 --port 9178 --batch_size 2 --nireq 4",
    "--model_path /model --model_name m --rest_port 8000 --task text_generation --target_device CPU",
    "--model_path /model --model_name m --task text_generation --tool_parser none --reasoning_parser none",
    "--model_path /m --model_name m --task text_generation --enable_prefix_caching true --cache_size 8",
    "--model_path /m --model_name m --task text_generation --dynamic_split_fuse false --pipeline_type LM_CB",
    "--model_path /m --model_name m --task text_generation --kv_cache_precision u8 --max_num_batched_tokens 512",
    "--model_path /m --model_name m --task text_generation --enable_tool_guided_generation=true --tool_parser hermes3",
    "--model_path /m --model_name m --task embeddings --pooling LAST --normalize false --truncate true",
    "--model_path /m --model_name m --task rerank --max_allowed_chunks 100",
    "--model_path /m --model_name m --task speech2text --target_device CPU",
    """--model_path /m --model_name m --model_version_policy '{"latest": {"num_versions": 2}}'""",
    "--model_name m --model_path /m --metrics_enable --metrics_list ovms_requests_success,ovms_infer_req_queue_size",
    "--model_name lstm --model_path /models/lstm --stateful --idle_sequence_cleanup --low_latency_transformation",
    "--config_path /models/config.json --port 9000 --rest_port 8000",
    "--config_path /config/config.json --log_level DEBUG --file_system_poll_wait_seconds 0",
    "--model_name m --model_path /m --rest_port 5500 --log_level TRACE --cache_dir .ov_cache",
    "--model-name m --model-path /m --rest-port=8000 --grpc-bind-address 127.0.0.1",
    "--config_path /c.json --rest_port 8000 --allowed_origins '*' --allowed_methods '*' --allowed_headers '*'",
]

WARNED = {
    "--rest_port 8000 --rest_workers 2 --config_path /workspace/config.json": ["rest_workers"],
    "--model_name r --model_path /r --cpu_extension /lib/libcustom.so --grpc_workers 2": [
        "cpu_extension",
        "grpc_workers",
    ],
}

_HUB = "models are fetched from no hub"
_IMAGES = "models that take or make images are not served"
_FILE = "model_config_list"
REFUSED = {
    "--source_model Org/Model-int4-ov --model_repository_path /models --rest_port 8000": [_HUB],
    "--pull --source_model Org/Model --model_repository_path /models --task rerank": [_HUB, "--sample chat"],
    "--pull --source_model Org/Model --model_repository_path /models --weight-format int8": [_HUB],
    "--pull --source_model Org/M-GGUF --model_repository_path /m --gguf_filename M-Q4_K_M.gguf": [_HUB],
    "--configure --model_path /models/m --task text_generation --max_num_seqs 128 --cache_size 8": [_FILE],
    "--rest_port 8000 --model_path /m --model_name m --max_prompt_len 8000 --task text_generation": ["--plugin_config"],
    "--rest_port 8000 --config_path /c.json --allowed_media_domains example.com": [_IMAGES],
    "--model_path /m --model_name m --task image_generation --resolution 512x512": [_IMAGES],
    "--model_path /m --model_name m --task text_generation --draft_source_model Org/Small": ["no hub"],
    "--model_path /m --model_name m --task text_generation --pipeline_type VLM_CB": [
        "--pipeline_type: models that take"
    ],
    "--model_path /m --model_name m --enable_prefix_caching true": ["--task"],
    "--model_name r --model_path r --trace_path trace.json --port 9178": ["/metrics"],
    "--model_path s3://bucket/model --model_name m --port 9000": [
        "--model_path: remote storage is not served",
        "mount",
    ],
    "--model_path azfs://share/model --model_name m --port 9001": ["--model_path: remote storage is not served"],
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Have options read and no server started; gives what was read."""
    taken: list[dict[str, Any]] = []

    def read(options: dict[str, Any]) -> None:
        with usage():
            settings = read_settings(options)
        problems = [problem for spec in single_servable(settings).services for problem in spec.problems]
        assert problems == []
        taken.append({name: getattr(settings, name) for name in settings.model_fields_set})

    monkeypatch.setattr(serve, "run_server", read)
    return taken


def _options(line: str) -> set[str]:
    return {name.replace("-", "_") for name in re.findall(r"(?:^|\s)--([a-z_-]+)", line)}


@pytest.mark.parametrize(("command", "line"), [*(([], line) for line in SERVED), (["serve"], SERVED[0])])
def test_a_command_line_of_ovms_is_taken_as_it_stands(
    given: list[dict[str, Any]], command: list[str], line: str
) -> None:
    """Without a command as with ours; every option arrives, and none is warned about."""
    result = CliRunner().invoke(app, [*command, *shlex.split(line)])
    assert result.exit_code == 0, result.output
    (taken,) = given
    assert taken.keys() == _options(line)
    assert ignored_options(taken) == {}


@pytest.mark.parametrize("value", ["=true", " true", "=false", " false", ""])
def test_a_flag_may_have_a_value(given: list[dict[str, Any]], value: str) -> None:
    """Attached to it or behind it."""
    line = f"--model_name m --model_path /m --stateful --idle-sequence-cleanup{value} --metrics_enable"
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 0, result.output
    assert (given[0]["idle_sequence_cleanup"], given[0]["metrics_enable"]) == ("false" not in value, True)


@pytest.mark.parametrize(("line", "named"), WARNED.items())
def test_options_without_a_meaning_here_are_taken_and_told(
    given: list[dict[str, Any]], line: str, named: list[str]
) -> None:
    """The server starts all the same."""
    assert CliRunner().invoke(app, shlex.split(line)).exit_code == 0
    assert sorted(ignored_options(given[0])) == named


@pytest.mark.parametrize(("line", "said"), REFUSED.items())
def test_what_is_not_served_is_refused_with_the_way_out(
    given: list[dict[str, Any]], line: str, said: list[str]
) -> None:
    """All at once, as a wrong command line."""
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 64
    assert not given
    for text in said:
        assert text in result.stderr
    for name in _options(line) & WAYS_OUT.keys():
        assert f"--{name}" in result.stderr


def test_no_option_is_served_and_refused_at_once() -> None:
    """The table of ways out names foreign options alone."""
    assert not WAYS_OUT.keys() & ServerSettings.model_fields.keys()


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["-h"]])
def test_options_of_the_command_itself_stay_its_own(given: list[dict[str, Any]], arguments: list[str]) -> None:
    """They are not taken for the server's."""
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not given


def test_a_misspelt_option_gets_a_suggestion() -> None:
    """With what would have been meant of the command itself."""
    result = CliRunner().invoke(app, ["--verion"])
    assert result.exit_code != 0
    assert "--version" in result.output
