from __future__ import annotations

import errno
import fcntl
import inspect
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ovmstrio.cli import serve
from ovmstrio.cli.console import EX_USAGE
from ovmstrio.cli.main import command_line
from ovmstrio.cli.serving import usage
from ovmstrio.cli.settings_options import server_parameters
from ovmstrio.config.config_file import parse_config
from ovmstrio.config.specs import TextModelSpec
from ovmstrio.server.command_line import (
    UNSUPPORTED_HINTS,
    ignored_options,
    read_settings,
    read_source_models,
    single_servable_spec,
)
from ovmstrio.server.kinds import KINDS
from ovmstrio.server.settings import option_name

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
    "--model_path /m --model_name m --task image_generation --max_resolution 1024x1024 --default_resolution 512x512",
    "--model_path /m --model_name m --task image_generation --resolution '64x64 96x96' --max_num_inference_steps 60",
    "--model_path /m --model_name m --task image_generation --resolution 64x64 --num_images_per_prompt 1",
    "--model_path /m --model_name m --task image_generation --resolution 64x64 --guidance_scale 7.5",
    "--model_path /m --model_name m --task image_generation --max_num_images_per_prompt 4",
    "--model_path /m --model_name m --task image_generation --default_num_inference_steps 9",
    "--model_path /m --model_name m --task embeddings --max_inputs 4096",
    "--model_path /m --model_name m --task speech2text --target_device CPU",
    """--model_path /m --model_name m --model_version_policy '{"latest": {"num_versions": 2}}'""",
    "--model_name m --model_path /m --metrics_enable --metrics_list ovms_requests_success,ovms_infer_req_queue_size",
    "--model_name lstm --model_path /models/lstm --stateful --idle_sequence_cleanup --low_latency_transformation",
    "--config_path /models/config.json --port 9000 --rest_port 8000",
    "--config_path /config/config.json --log_level DEBUG --file_system_poll_wait_seconds 0",
    "--model_name m --model_path /m --rest_port 5500 --log_level TRACE --cache_dir .ov_cache",
    "--model-name m --model-path /m --rest-port=8000 --grpc-bind-address 127.0.0.1",
    "--config_path /c.json --rest_port 8000 --allowed_origins '*' --allowed_methods '*' --allowed_headers '*'",
    "--config_path /c.json --rest_port 8000 --allowed_media_domains a.com,b.org --allowed_local_media_path /media",
    "--model_path /m --model_name m --task text_generation --pipeline_type VLM_CB",
]

WARNED = {
    "--rest_port 8000 --rest_workers 2 --config_path /workspace/config.json": ["rest_workers"],
    "--model_name r --model_path /r --cpu_extension /lib/libcustom.so --grpc_workers 2": [
        "cpu_extension",
        "grpc_workers",
    ],
}

_HUB = "models are not converted when they are downloaded"
_FILE = "model_config_list"
REFUSED = {
    "--pull --model_repository_path /models --task rerank": ["--model-repository-path, --pull: needs --source-model"],
    "--source_model Org/Model --model_path /m": ["--source-model and --model-path: cannot be combined"],
    "--source_model Org/Model --source_loras Org/Adapter": ["LoRA adapters"],
    "--pull --source_model Org/Model --model_repository_path /models --weight-format int8": [_HUB],
    "--configure --model_path /models/m --task text_generation --max_num_seqs 128 --cache_size 8": [_FILE],
    "--rest_port 8000 --model_path /m --model_name m --max_prompt_len 8000 --task text_generation": ["--plugin-config"],
    "--model_path /m --model_name m --task text_generation --pipeline_type OMNI": ["--pipeline-type: sound"],
    "--model_path /m --model_name m --enable_prefix_caching true": ["--task"],
    "--model_name r --model_path r --trace_path trace.json --port 9178": ["/metrics"],
    "--model_path /m --model_name m --task text_generation --verbose_response": ["no __verbose object"],
    "--model_path /m --model_name m --disable_input_count_validation=true": ["only the inputs of the model"],
    "--model_name m --model_path /m --stateful=maybe": ["--stateful: the value cannot be used (expected true or false"],
    "--model_path azfs://share/model --model_name m --port 9001": ["--model-path: remote storage is not supported"],
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []

    def read(options: dict[str, Any]) -> None:
        with usage():
            settings = read_settings(options)
        problems = [problem for spec in single_servable_spec(settings).services for problem in spec.problems]
        assert problems == []
        taken.append({name: getattr(settings, name) for name in settings.model_fields_set})

    monkeypatch.setattr(serve, "run_server", read)
    return taken


def _options(line: str) -> set[str]:
    return {name.replace("-", "_") for name in re.findall(r"(?:^|\s)--([a-z_-]+)", line)}


@pytest.mark.parametrize(("command", "line"), [*(([], line) for line in SERVED), (["serve"], SERVED[0])])
def test_command_lines_of_ovms_are_accepted_unchanged(
    given: list[dict[str, Any]], command: list[str], line: str
) -> None:
    result = CliRunner().invoke(command_line(), [*command, *shlex.split(line)])
    assert result.exit_code == 0, result.output
    (taken,) = given
    assert taken.keys() == _options(line)
    assert ignored_options(taken) == {}


@pytest.mark.parametrize(
    ("line", "created"),
    [
        ("serve m.onnx --port=1 --rest-port 2", {"port", "rest_port"}),
        ("--model_name m --model_path /m --no-metrics_enable", {"model_name", "model_path", "metrics_enable"}),
        ("--model_name m --model_path /m --console-bodies 3", {"model_name", "model_path", "console_body_bytes"}),
        ("serve m.onnx --prot 1", None),
        ("serve m.onnx -p 1", None),
    ],
)
def test_only_options_of_the_command_line_are_created(
    monkeypatch: pytest.MonkeyPatch, line: str, created: set[str] | None
) -> None:
    chosen: list[Any] = []

    def create(*, only: set[str] | None) -> list[inspect.Parameter]:
        chosen.append(only)
        return server_parameters(only=only)

    monkeypatch.setattr(serve, "server_parameters", create)
    monkeypatch.setattr(serve, "run_server", lambda _: None)
    CliRunner().invoke(command_line(), shlex.split(line))
    assert chosen == [created]


@pytest.mark.parametrize("value", ["=true", " true", "=false", " false", "", "=True", "=1", " True", "=F", "=0"])
def test_a_flag_may_have_a_value(given: list[dict[str, Any]], value: str) -> None:
    line = f"--model_name m --model_path /m --stateful --idle-sequence-cleanup{value} --metrics_enable"
    result = CliRunner().invoke(command_line(), shlex.split(line))
    assert result.exit_code == 0, result.output
    assert (given[0]["idle_sequence_cleanup"], given[0]["metrics_enable"]) == (
        value not in {"=false", " false", "=F", "=0"},
        True,
    )


@pytest.mark.parametrize(("line", "named"), WARNED.items())
def test_options_without_effect_are_accepted_and_listed(
    given: list[dict[str, Any]], line: str, named: list[str]
) -> None:
    assert CliRunner().invoke(command_line(), shlex.split(line)).exit_code == 0
    assert sorted(ignored_options(given[0])) == named


@pytest.mark.parametrize(("line", "messages"), REFUSED.items())
def test_unsupported_options_are_refused_with_an_alternative(
    given: list[dict[str, Any]], line: str, messages: list[str]
) -> None:
    result = CliRunner().invoke(command_line(), shlex.split(line))
    assert result.exit_code == 64
    assert not given
    for text in messages:
        assert text in result.stderr
    for name in _options(line) & UNSUPPORTED_HINTS.keys():
        assert option_name(name) in result.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["-h"]])
def test_options_of_the_command_start_no_server(given: list[dict[str, Any]], arguments: list[str]) -> None:
    assert CliRunner().invoke(command_line(), arguments).exit_code == 0
    assert not given


_TEXT = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")
_RESNET = '{"model_config_list": [{"config": {"name": "resnet", "base_path": "resnet"}}]}'
_EMPTY = '{"model_config_list": []}'


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(command_line(), list(arguments), env={"COLUMNS": "1000"})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    texts = [f"org/words/{name}" for name in _TEXT]
    for name in ["meta/llama4/graph.pbtxt", "resnet/1/model.xml", "small/tiny.gguf", *texts, "notes/readme.md"]:
        (tmp_path / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name).touch()
    (tmp_path / "models" / ".git" / "1").mkdir(parents=True)
    return tmp_path / "models"


def _edit(command: str, repository: Path, name: str, *options: str) -> Result:
    where = ["--config_path", str(repository / "config.json"), "--model_name", name]
    where += ["--model_repository_path", str(repository)] if command == "add" else []
    return _run({"add": "--add_to_config", "remove": "--remove_from_config"}[command], *where, *options)


def _config(repository: Path) -> Any:
    return json.loads((repository / "config.json").read_text())


def _names(repository: Path) -> list[str]:
    return [each["config"]["name"] for each in _config(repository)["model_config_list"]]


def test_models_of_a_repository_are_listed_without_unreadable_folders(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "lost+found").mkdir()
    read = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return read(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    done = _run("--model_repository_path", str(repository), "--list_models")
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == ["meta/llama4", "org/words", "resnet", "small"]


def test_models_are_added_to_a_file_and_removed(repository: Path) -> None:
    options = ["--batch_size", "2", "--plugin_config", '{"NUM_STREAMS": 1}', "--shape=(1,3)", "--target-device", "CPU"]
    for name, more in (("resnet", options), ("org/words", ["--cache_size", "2"]), ("meta/llama4", [])):
        done = _edit("add", repository, name, *more)
        assert done.exit_code == 0, done.output
    settings = {"batch_size": 2, "plugin_config": {"NUM_STREAMS": 1}, "shape": "(1,3)", "target_device": "CPU"}
    assert _config(repository) == {
        "model_config_list": [
            {"config": {"name": "resnet", "base_path": "resnet", **settings}},
            {"config": {"name": "meta/llama4", "base_path": "meta/llama4"}},
        ],
        "text_model_config_list": [{"config": {"name": "org/words", "base_path": "org/words", "cache_size": 2}}],
    }
    file = repository / "config.json"
    (text,) = parse_config(KINDS.values(), file.read_bytes(), file).of(TextModelSpec)
    assert (text.path, text.cache_size) == (repository / "org/words", 2)
    for name in ("resnet", "org/words"):
        assert _edit("remove", repository, name).exit_code == 0
    assert (_names(repository), _config(repository)["text_model_config_list"]) == (["meta/llama4"], [])
    assert [each for each in repository.iterdir() if each.is_file()] == [file]


@pytest.mark.parametrize("place", ["", "config.json"])
@pytest.mark.parametrize("form", [" ", "="])
def test_the_file_may_be_the_value_of_the_command(repository: Path, place: str, form: str) -> None:
    for command, options in (("add_to", ["--model_path", "small"]), ("remove_from", [])):
        named = f"--{command}_config{form}{repository / place}".split(" ")
        done = _run(*named, "--model_name", "small", *options)
        assert done.exit_code == 0, done.output
    assert _config(repository)["text_model_config_list"] == []


def test_the_repository_may_be_in_the_environment(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVMS_MODEL_REPOSITORY_PATH", str(repository))
    assert _run("--list_models").stdout.split()[0] == "meta/llama4"
    assert _run("--add_to_config", "--model_name", "small").exit_code == 0
    assert _config(repository)["text_model_config_list"][0]["config"]["name"] == "small"


@pytest.mark.parametrize(
    ("address", "options", "section"),
    [
        ("s3://bucket/one", ["--batch_size", "2"], "model_config_list"),
        ("s3://bucket/one", ["--cache_size", "2"], "text_model_config_list"),
        ("gs://bucket/tiny.gguf", [], "text_model_config_list"),
        ("hf://org/name@v1", [], "text_model_config_list"),
    ],
)
def test_a_model_at_a_remote_address_is_added(repository: Path, address: str, options: list[str], section: str) -> None:
    file = repository / "config.json"
    done = _run("--add_to_config", str(file), "--model_name", "one", "--model_path", address, *options)
    assert done.exit_code == 0, done.output
    (entry,) = _config(repository)[section]
    assert entry["config"]["base_path"] == address


_ADD_SMALL = ["--add_to_config", "--model_name", "small", "--model_path", "small"]


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (_RESNET, ["--add_to_config", "--model_name", "resnet", "--model_path", "resnet"], 'a model "resnet" already'),
        (_RESNET, ["--add_to_config", "--model_name", "other", "--model_path", "nowhere"], "models are not downloaded"),
        (_RESNET, ["--add_to_config", "--model_name", "x"], "expected --model-path or --model-repository-path"),
        (_RESNET, [*_ADD_SMALL, "--max_num_seqs", "0"], "max_num_seqs"),
        (_RESNET, [*_ADD_SMALL, "--batch_size", "2"], "unknown key"),
        (_RESNET, ["--add_to_config", "--model_path", "small"], "--model-name"),
        (_RESNET, ["--add_to_config", "--model_name", "x", "--pull"], "--pull"),
        (_RESNET, ["--remove_from_config", "--model_name", "other"], 'has no model "other"'),
        (_RESNET, ["--remove_from_config", "--add_to_config", "--model_name", "other"], "not allowed with"),
        ('{"text_model_config_list": null}', _ADD_SMALL, "--config-path: "),
        ('{"model_config_list": {}}', _ADD_SMALL, "--config-path: "),
        ("[]", _ADD_SMALL, "--config-path: "),
        ("", _ADD_SMALL, "--config-path: "),
    ],
)
def test_a_refused_change_leaves_the_file_unchanged(
    repository: Path, content: str, arguments: list[str], message: str
) -> None:
    file = repository / "config.json"
    file.write_text(content)
    done = _run(*arguments, "--config_path", str(file))
    assert (done.exit_code, message in done.output) == (EX_USAGE, True), done.output
    assert file.read_text() == content


@pytest.mark.parametrize(
    ("line", "folder", "is_pull"),
    [
        ("--pull --model_name org/new --task rerank", "org/new", True),
        ("--model_name=org/new --overwrite_models --task rerank", "org/new", False),
    ],
)
def test_the_name_of_a_model_is_the_default_of_its_source(
    repository: Path, line: str, folder: str, is_pull: bool
) -> None:
    models = read_source_models([*shlex.split(line), "--model_repository_path", str(repository)])
    assert [each.folder for each in models.downloads] == [repository / folder]
    assert models.is_pull is is_pull
    assert models.arguments[models.arguments.index("--model-path") + 1] == str(repository / folder)
    assert "--model-name" not in models.arguments


def test_a_repository_has_no_effect_with_the_path_of_a_model() -> None:
    line = ["--model_name", "m", "--model_path", "/m"]
    models = read_source_models([*line, "--model_repository_path", "/models"])
    assert (models.arguments, models.downloads, models.is_pull) == (line, (), False)


@pytest.mark.parametrize(
    ("source", "options", "path"),
    [("org/words", [], "org/words"), ("small", ["--gguf_filename", "tiny.gguf"], "small/tiny.gguf")],
)
def test_a_local_model_of_a_hub_is_served(
    repository: Path, monkeypatch: pytest.MonkeyPatch, source: str, options: list[str], path: str
) -> None:
    taken: list[dict[str, Any]] = []
    monkeypatch.setattr(serve, "run_server", taken.append)
    where = [f"--source_model={source}", "--model_repository_path", str(repository), *options]
    for name in ([], ["--model_name", "mine"]):
        done = _run(*where, *name, "--task", "text_generation", "--rest_port", "8000")
        assert done.exit_code == 0, done.output
    assert [(each["model_name"], each["task"]) for each in taken] == [
        (source, "text_generation"),
        ("mine", "text_generation"),
    ]
    assert {str(each["model_path"]) for each in taken} == {str(repository / path)}


def test_a_model_that_is_there_is_not_pulled(repository: Path) -> None:
    where = ["--model_repository_path", str(repository), "--task", "text_generation"]
    done = _run("--pull", "--source_model", "org/words", *where)
    assert (done.exit_code, "already there" in done.output) == (0, True)


def test_a_source_model_without_a_repository_is_served_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, Any]] = []
    monkeypatch.setattr(serve, "run_server", taken.append)
    done = _run("--source_model", "org/words", "--draft_source_model=org/draft", "--task", "text_generation")
    assert done.exit_code == 0, done.output
    (given,) = taken
    assert (given["model_name"], given["model_path"]) == ("org/words", "hf://org/words")
    assert given["draft_models_path"] == "hf://org/draft"


@pytest.mark.parametrize("command", ["ovms", "ovms serve"])
def test_shell_completion_changes_no_file(command: str, repository: Path) -> None:
    file = repository / "config.json"
    file.write_text(_RESNET)
    for first in ("--remove_from_config", "--pull", "--metrics_enable=true"):
        words = [*command.split(), first, "--config_path", str(file), "--model_name", "resnet", "--rest_p"]
        line = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        done = CliRunner().invoke(command_line(), [], prog_name="ovms", env={"_OVMS_COMPLETE": "complete_bash", **line})
        assert done.exit_code == 0, done.output
        assert "--rest-port" in done.output.split()
    assert file.read_text() == _RESNET


def test_a_library_with_the_name_of_a_model_is_unchanged(repository: Path) -> None:
    library = {"name": "resnet", "base_path": "/opt/lib.so"}
    before = {"custom_node_library_config_list": [library], "model_config_list": []}
    (repository / "config.json").write_text(json.dumps(before))
    assert [_edit(command, repository, "resnet").exit_code for command in ("remove", "add", "remove")] == [
        EX_USAGE,
        0,
        0,
    ]
    assert _config(repository) == before


def test_an_unwritable_file_is_reported_without_traceback(repository: Path) -> None:
    nowhere = repository / "not" / "there.json"
    done = _edit("add", repository, "resnet", "--config_path", str(nowhere))
    assert (done.exit_code, f"{nowhere} cannot be written" in done.output) == (EX_USAGE, True), done.output
    (repository / "config.json").write_text(_RESNET.replace('"resnet"', '["a"]', 1))
    assert isinstance(_edit("add", repository, "resnet").exception, SystemExit | None)


def test_a_symbolic_link_is_kept_and_its_target_written(repository: Path) -> None:
    file, link = repository / "real.json", repository / "config.json"
    file.write_text(_EMPTY)
    file.chmod(0o600)
    link.symlink_to(file)
    done = _edit("add", repository, "resnet")
    assert done.exit_code == 0, done.output
    assert (link.is_symlink(), _names(repository), file.stat().st_mode & 0o777) == (True, ["resnet"], 0o600)
    assert sorted(each.name for each in repository.iterdir() if "json" in each.name) == ["config.json", "real.json"]


def test_the_file_is_read_after_the_folder_is_locked(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = repository / "config.json"
    file.write_text(_EMPTY)

    def wait(descriptor: int, operation: int) -> None:
        assert Path(f"/proc/self/fd/{descriptor}").resolve() == repository
        assert operation == fcntl.LOCK_EX
        file.write_text(_RESNET.replace('"resnet"', '"other"', 1))

    monkeypatch.setattr(fcntl, "flock", wait)
    done = _edit("add", repository, "resnet")
    assert done.exit_code == 0, done.output
    assert _names(repository) == ["other", "resnet"]


@pytest.mark.parametrize(("code", "is_written"), [(errno.EBUSY, True), (errno.ENOSPC, False)])
def test_a_file_that_cannot_be_replaced_is_rewritten_or_unchanged(
    repository: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, is_written: bool
) -> None:
    """Containers mount single files, which cannot be replaced."""
    (repository / "config.json").write_text(_EMPTY)

    def refuse(path: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code), str(path), None, str(target))

    monkeypatch.setattr(Path, "replace", refuse)
    done = _edit("add", repository, "resnet")
    assert (done.exit_code == 0, "cannot be written: No space left" in done.output) == (is_written, not is_written)
    assert _names(repository) == ["resnet"] * is_written
    assert [each.name for each in repository.iterdir() if each.is_file()] == ["config.json"]
