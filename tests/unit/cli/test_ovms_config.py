"""OVMS's options that are commands of their own: models of a repository listed, and put into a configuration or out."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ovms_cli import serve
from ovms_cli.all_commands import app
from ovms_cli.console import EX_USAGE
from ovmstrio.config.ovms_json import parse_config
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.runtimes.table import KINDS

_TEXT = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "1000"})


def _fill(repository: Path, *files: str) -> Path:
    for name in files:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("")
    return repository


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Give a folder with each sort of model."""
    texts = [f"org/words/{name}" for name in _TEXT]
    files = ["meta/llama4/graph.pbtxt", "resnet/1/model.xml", "small/tiny.gguf", *texts, "notes/readme.md", ".git/1/x"]
    return _fill(tmp_path / "models", *files)


def _config(file: Path) -> Any:
    return json.loads(file.read_text())


def test_models_of_a_repository_are_listed_by_their_folders(repository: Path) -> None:
    """As deep as folders of organizations are."""
    done = _run("--model_repository_path", str(repository), "--list_models")
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == ["meta/llama4", "org/words", "resnet", "small"]


def test_a_model_is_added_to_a_file_and_taken_out_again(repository: Path) -> None:
    """The file is made where there is none; paths in its own folder are relative, and options are settings."""
    file = repository / "config.json"
    where = ["--config_path", str(file), "--model_repository_path", str(repository)]
    options = ["--batch_size", "2", "--plugin_config", '{"NUM_STREAMS": 1}', "--shape=(1,3)", "--target-device", "CPU"]
    for name, more in (("resnet", options), ("org/words", ["--cache_size", "2"]), ("meta/llama4", [])):
        done = _run("--add_to_config", *where, "--model_name", name, *more)
        assert done.exit_code == 0, done.output
    written = _config(file)
    settings = {"batch_size": 2, "plugin_config": {"NUM_STREAMS": 1}, "shape": "(1,3)", "target_device": "CPU"}
    assert written["model_config_list"] == [
        {"config": {"name": "resnet", "base_path": "resnet", **settings}},
        {"config": {"name": "meta/llama4", "base_path": "meta/llama4"}},
    ]
    assert written["text_model_config_list"] == [
        {"config": {"name": "org/words", "base_path": "org/words", "cache_size": 2}}
    ]
    (text,) = parse_config(KINDS.values(), file.read_bytes(), file).of(TextModelSpec)
    assert (text.path, text.cache_size) == (repository / "org/words", 2)
    for name in ("resnet", "org/words"):
        assert _run("--remove_from_config", "--config_path", str(file), "--model_name", name).exit_code == 0
    assert _config(file)["text_model_config_list"] == []
    assert [each["config"]["name"] for each in _config(file)["model_config_list"]] == ["meta/llama4"]
    assert sorted(each.name for each in repository.iterdir() if each.is_file()) == ["config.json"]


def test_the_repository_may_be_in_the_environment(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the one in it then."""
    monkeypatch.setenv("OVMS_MODEL_REPOSITORY_PATH", str(repository))
    assert _run("--list_models").stdout.split()[0] == "meta/llama4"
    assert _run("--add_to_config", "--model_name", "small").exit_code == 0
    assert _config(repository / "config.json")["text_model_config_list"][0]["config"]["name"] == "small"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--add_to_config", "--model_name", "resnet", "--model_path", "resnet"], 'has a model "resnet" already'),
        (["--add_to_config", "--model_name", "other", "--model_path", "nowhere"], "fetched from no hub"),
        (["--add_to_config", "--model_name", "other"], "expected --model_path or --model_repository_path"),
        (["--add_to_config", "--model_name", "x", "--model_path", "small", "--max_num_seqs", "0"], "max_num_seqs"),
        (["--add_to_config", "--model_name", "x", "--model_path", "small", "--batch_size", "2"], "unknown key"),
        (["--add_to_config", "--model_path", "small"], "--model_name"),
        (["--add_to_config", "--model_name", "x", "--pull"], "--pull"),
        (["--remove_from_config", "--model_name", "other"], 'has no model "other"'),
        (["--remove_from_config", "--add_to_config", "--model_name", "other"], "not allowed with"),
    ],
)
def test_what_cannot_be_done_leaves_the_file_as_it_is(repository: Path, arguments: list[str], words: str) -> None:
    """And says why."""
    file = repository / "config.json"
    file.write_text('{"model_config_list": [{"config": {"name": "resnet", "base_path": "resnet"}}]}')
    before = file.read_bytes()
    done = _run(*arguments, "--config_path", str(file))
    assert done.exit_code == EX_USAGE
    assert words in done.output
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("source", "file", "path"), [("org/words", "", "org/words"), ("small", "tiny.gguf", "small/tiny.gguf")]
)
def test_a_model_of_a_hub_that_is_there_is_served(
    repository: Path, monkeypatch: pytest.MonkeyPatch, source: str, file: str, path: str
) -> None:
    """Under its name, or the one that it is given, with nothing fetched."""
    taken: list[dict[str, Any]] = []
    monkeypatch.setattr(serve, "run_server", taken.append)
    more = ["--gguf_filename", file] if file else []
    where = [f"--source_model={source}", "--model_repository_path", str(repository), *more]
    for named in ([], ["--model_name", "mine"]):
        done = _run(*where, *named, "--task", "text_generation", "--rest_port", "8000")
        assert done.exit_code == 0, done.output
    assert [each["model_name"] for each in taken] == [source, "mine"]
    assert {str(each["model_path"]) for each in taken} == {str(repository / path)}
    assert taken[0]["task"] == "text_generation"


def test_a_model_that_is_not_there_is_refused_with_the_way_out(repository: Path) -> None:
    """As is one that is to be fetched once more."""
    where = ["--model_repository_path", str(repository), "--task", "text_generation"]
    for arguments in (["--source_model", "org/other"], ["--source_model", "org/words", "--pull"]):
        done = _run(*arguments, *where)
        assert done.exit_code == EX_USAGE
        assert "models are fetched from no hub" in done.output


@pytest.mark.parametrize("command", ["ovms", "ovms serve"])
def test_a_shell_that_completes_a_line_changes_nothing(command: str, repository: Path) -> None:
    """The line is not meant yet, and what would be refused in it is completed, too."""
    file = repository / "config.json"
    where = ["--config_path", str(file), "--model_name", "resnet"]
    assert _run("--add_to_config", *where, "--model_repository_path", str(repository)).exit_code == 0
    before = file.read_bytes()
    for first in ("--remove_from_config", "--pull", "--metrics_enable=true"):
        words = [*command.split(), first, *where, "--rest_p"]
        line = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        done = CliRunner().invoke(app, [], prog_name="ovms", env={"_OVMS_COMPLETE": "complete_bash", **line})
        assert done.exit_code == 0, done.output
        assert "--rest_port" in done.output.split()
    assert file.read_bytes() == before


def test_a_library_of_a_models_name_is_left_alone(repository: Path) -> None:
    """Names in lists of libraries are no models'."""
    file = repository / "config.json"
    library = {"name": "resnet", "base_path": "/opt/lib.so"}
    file.write_text(json.dumps({"custom_node_library_config_list": [library], "model_config_list": []}))
    where = ["--config_path", str(file), "--model_name", "resnet"]
    assert _run("--remove_from_config", *where).exit_code == EX_USAGE
    for command in (["--add_to_config", "--model_repository_path", str(repository)], ["--remove_from_config"]):
        done = _run(*command, *where)
        assert done.exit_code == 0, done.output
    assert _config(file) == {"custom_node_library_config_list": [library], "model_config_list": []}


def test_a_file_that_cannot_be_written_is_told_of_in_a_sentence(repository: Path) -> None:
    """As is one that names a model by something else than a text."""
    where = ["--model_repository_path", str(repository), "--model_name", "resnet"]
    nowhere = repository / "not" / "there.json"
    done = _run("--add_to_config", "--config_path", str(nowhere), *where)
    assert done.exit_code == EX_USAGE, done.output
    assert f"{nowhere} cannot be written" in done.output
    odd = repository / "odd.json"
    odd.write_text(json.dumps({"model_config_list": [{"config": {"name": ["a"], "base_path": "/x"}}]}))
    assert isinstance(_run("--add_to_config", "--config_path", str(odd), *where).exception, SystemExit | None)


def test_a_link_to_a_file_stays_one(repository: Path) -> None:
    """What it leads to is written, with the rights that it has."""
    file, link = repository / "real.json", repository / "config.json"
    file.write_text('{"model_config_list": []}')
    file.chmod(0o600)
    link.symlink_to(file)
    where = ["--model_repository_path", str(repository), "--model_name", "resnet"]
    done = _run("--add_to_config", "--config_path", str(link), *where)
    assert done.exit_code == 0, done.output
    assert link.is_symlink()
    assert [each["config"]["name"] for each in _config(file)["model_config_list"]] == ["resnet"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in repository.iterdir() if "json" in each.name) == ["config.json", "real.json"]


def test_what_others_write_meanwhile_is_not_lost(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read once nobody else has its folder."""
    file = repository / "config.json"
    others = {"config": {"name": "other", "base_path": "resnet"}}
    file.write_text('{"model_config_list": []}')

    def wait(descriptor: int, operation: int) -> None:
        assert Path(f"/proc/self/fd/{descriptor}").resolve() == repository
        assert operation == fcntl.LOCK_EX
        file.write_text(json.dumps({"model_config_list": [others]}))

    monkeypatch.setattr(fcntl, "flock", wait)
    done = _run("--add_to_config", "--config_path", str(file), "--model_name", "resnet", "--model_path", "resnet")
    assert done.exit_code == 0, done.output
    assert [each["config"]["name"] for each in _config(file)["model_config_list"]] == ["other", "resnet"]


@pytest.mark.parametrize(("code", "is_written"), [(errno.EBUSY, True), (errno.ENOSPC, False)])
def test_a_file_that_cannot_be_replaced_is_written_in_its_place_or_left(
    repository: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, is_written: bool
) -> None:
    """Containers mount single files; nothing else is left in the folder, and nobody sees a traceback."""
    file = repository / "config.json"
    file.write_text('{"model_config_list": []}')

    def refuse(path: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code), str(path), None, str(target))

    monkeypatch.setattr(Path, "replace", refuse)
    done = _run("--add_to_config", "--config_path", str(file), "--model_name", "resnet", "--model_path", "resnet")
    assert (done.exit_code == 0) is is_written, done.output
    assert ("cannot be written: No space left" in done.output) is not is_written
    assert bool(_config(file)["model_config_list"]) is is_written
    assert [each.name for each in repository.iterdir() if each.is_file()] == ["config.json"]


@pytest.mark.parametrize("content", ['{"text_model_config_list": null}', '{"model_config_list": {}}', "[]", ""])
def test_a_file_that_is_no_configuration_is_left_alone(repository: Path, content: str) -> None:
    """Whichever list a model would go to."""
    file = repository / "config.json"
    file.write_text(content)
    done = _run("--add_to_config", "--config_path", str(file), "--model_name", "small", "--model_path", "small")
    assert done.exit_code == EX_USAGE
    assert f"--config_path: {file}" in done.output
    assert file.read_text() == content


def test_folders_that_cannot_be_read_are_passed_over(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one that a file system of its own has."""
    (repository / "lost+found").mkdir()
    read = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return read(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    done = _run("--list_models", "--model_repository_path", str(repository))
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == ["meta/llama4", "org/words", "resnet", "small"]
