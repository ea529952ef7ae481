from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ovmstrio.runtimes.handlers.config.project_file import expanded, read_project
from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
from tests.support.projects import PYTHON, TENSORFLOW, good, write

_RICH = """
config: {a: [1, {b: ü}]}
env: {A: 1}
serve_port: 1
processes: 3
threads_per_process: 4
max_concurrency: 5
log_level: error
"""


def test_defaults_are_written_out(tmp_path: Path) -> None:
    """Sections that are off are left out, as are keys of the other type."""
    assert yaml.safe_load(expanded(good(tmp_path))) == {
        "type": "python",
        "py_version": "3.6.9",
        "gpu": False,
        "dependencies": {"pip": "requirements.txt", "conda": "conda-packages.txt", "shell": "dependencies.sh"},
        "serve_port": 8080,
        "env": {},
        "config": {},
        "python_path": ".",
        "path": "handler.py",
        "processes": 1,
        "threads_per_process": 1,
        "max_concurrency": 0,
        "log_level": "info",
        "use_local_cortex_libs": False,
    }


@pytest.mark.parametrize(
    "text",
    [
        PYTHON,
        PYTHON + _RICH,
        f"{PYTHON}server_side_batching: {{max_batch_size: 1, batch_interval_seconds: 2}}\n",
        f"{PYTHON}server_side_batching: {{max_batch_size: 1, batch_interval_seconds: 2, retry_singly: yes}}\n",
        f"{PYTHON}protobuf_path: a.proto\npython_path: src\n",
        f"{PYTHON}multi_model_reloading: {{dir: s3://b/a, cache_size: 1, disk_cache_size: 2, latest_versions: 3}}\n",
        f"{TENSORFLOW}models: {{path: s3://b/a, signature_key: k}}\ntfs_container_dns: tfs\n",
        f"{TENSORFLOW}models: {{paths: [{{name: a, path: s3://b/a}}, {{name: b, path: gs://b/c, signature_key: k}}]}}",
        f"{PYTHON}gpu: true\ngpu_version: {{cuda: 12.4.1, cudnn: 9}}\npy_version: 3.12\n",
    ],
    ids=range(9),
)
def test_the_expanded_file_says_the_same(tmp_path: Path, text: str) -> None:
    """Reading it again gives the same project, except for what is written out now."""
    (tmp_path / "src").mkdir()
    before = good(tmp_path, text, a__proto="")
    after, _ = read_project(write(tmp_path, expanded(before)))
    assert _said(after) == _said(before)
    assert after.tfs_container_dns == (
        before.tfs_container_dns or ("localhost" if before.type == "tensorflow" else None)
    )


def _said(project: ProjectSpec) -> ProjectSpec:
    """Leave out which keys were written."""
    image = project.image.model_copy(update={"keys": ()})
    return project.model_copy(update={"image": image, "tfs_container_dns": None})
