from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.ops.config.pipeline_file import read_pipeline_config
from paddle_serving_server.util import CONFIG_VARIABLE, ArgsParser

_CONFIG = "http_port: 18082\nworker_num: 1\nop:\n  det: {concurrency: 2, local_service_conf: {devices: '0'}}\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Give a configuration's file."""
    path = tmp_path / "config.yml"
    path.write_text(_CONFIG)
    return str(path)


def test_options_over_a_file(config: str) -> None:
    """``-o`` puts values over those of the file of ``-c``, and the result configures a pipeline."""
    options = ["-o", "op.det.concurrency=5", "worker_num=3", "op.rec.batch_size=4"]
    args = ArgsParser().parse_args(["-c", config, *options])
    read = read_pipeline_config(yml_dict=args.conf_dict)
    assert (read.http_port, read.worker_num) == (18082, 3)
    assert (read.op("det").concurrency, read.op("rec").batch_size) == (5, 4)
    assert read.op("det").local_service_conf.devices == "0"


def test_file_of_the_command_that_runs_the_script(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``-c`` the file is the one that the runner names; without either the command line is wrong."""
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    with pytest.raises(SystemExit):
        ArgsParser().parse_args([])
    monkeypatch.setenv(CONFIG_VARIABLE, config)
    assert ArgsParser().parse_args([]).conf_dict["http_port"] == 18082


@pytest.mark.parametrize(("option", "message"), [("worker_num", "expected key.key=value"), ("a=[", "is not YAML")])
def test_options_that_are_none(config: str, option: str, message: str) -> None:
    """What is not ``key=value`` is refused by name."""
    with pytest.raises(ConfigError, match=message):
        ArgsParser().parse_args(["-c", config, "-o", option])


def test_file_that_is_not_there() -> None:
    """A missing file is named."""
    with pytest.raises(ConfigError, match=r"nothing\.yml: cannot be read"):
        ArgsParser().parse_args(["-c", "nothing.yml"])
