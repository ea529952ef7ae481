from __future__ import annotations

import re
from pathlib import Path

import pytest

from ovmstrio.runtimes.handlers.config.dockerfile import make_dockerfile
from ovmstrio.runtimes.handlers.config.project_file import read_project
from tests.support.projects import PYTHON, TENSORFLOW, write

_TENSORFLOW = f"{TENSORFLOW}models: {{dir: s3://b/a}}\n"


def _made(folder: Path, text: str = PYTHON, **files: str) -> str:
    project, _ = read_project(write(folder / "iris", text, **files))
    return make_dockerfile(project, folder, "1.2.3")


def _install(dockerfile: str) -> list[str]:
    """Give the commands of the step that installs what the project wants."""
    step = re.search(r"^RUN set -e; \\\n((?:.*\\\n)*.*)", dockerfile, re.MULTILINE)
    return [] if step is None else [line.removesuffix("; \\").strip() for line in step[1].split("\n")]


def test_a_bare_project_installs_the_server_alone(tmp_path: Path) -> None:
    """Nothing is copied that is not there."""
    text = _made(tmp_path)
    lines = text.splitlines()
    assert lines[0] == "FROM ubuntu:22.04"
    assert "conda create -y -n env python=3.11 pip" in text
    assert lines[-5:] == [
        "RUN pip install --no-cache-dir 'ovmstrio[handlers]==1.2.3'",
        "WORKDIR /src/project",
        'COPY ["iris/", "/src/project/"]',
        "EXPOSE 8080",
        'CMD ["ovms", "serve", "/src/project/nucleus.yaml"]',
    ]
    assert _install(text) == []


def test_the_shell_script_comes_before_conda_and_pip(tmp_path: Path) -> None:
    """With the environment of the project around them, and the server's own needs at the end."""
    files = {"requirements__txt": "numpy\n", "dependencies__sh": "true\n", "__env": "A=2\n"}
    files["conda-packages__txt"] = "conda-forge::rdkit\n"
    text = _made(tmp_path, f"{PYTHON}env: {{A: 1, not-a-name: 2}}\n", **files)
    assert _install(text) == [
        "export A=1",
        "set -a",
        "source ./.env",
        "set +a",
        "bash -e dependencies.sh",
        "conda install -y -n env --file conda-packages.txt",
        "pip install --no-cache-dir -r requirements.txt",
        "pip install --no-cache-dir 'ovmstrio[handlers]==1.2.3'",
    ]


def test_code_that_changes_installs_nothing_again(tmp_path: Path) -> None:
    """Only what installs is copied before, unless it may need more of the project."""
    apart = _made(tmp_path, requirements__txt="numpy\n")
    assert re.findall(r"^(?:COPY .*|RUN set)", apart, re.MULTILINE) == [
        'COPY ["iris/requirements.txt", "/src/project/requirements.txt"]',
        "RUN set",
        'COPY ["iris/", "/src/project/"]',
    ]
    for files in ({"requirements__txt": "numpy\n.\n"}, {"dependencies__sh": "cp pip.conf /etc/pip.conf\n"}):
        whole = _made(tmp_path, **files)
        assert re.findall(r"^(?:COPY .*|RUN set)", whole, re.MULTILINE) == [
            'COPY ["iris/", "/src/project/"]',
            "RUN set",
        ]


def test_files_may_have_names_of_their_own(tmp_path: Path) -> None:
    """Blanks in them are no matter."""
    text = _made(tmp_path, f"{PYTHON}dependencies: {{pip: my deps.txt}}\n", **{"my deps__txt": "numpy\n"})
    assert 'COPY ["iris/my deps.txt", "/src/project/my deps.txt"]' in text
    assert "pip install --no-cache-dir -r $'my deps.txt'" in _install(text)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("gpu_version: {cuda: 12.1.1, cudnn: 8}", "FROM nvidia/cuda:12.1.1-cudnn8-runtime-ubuntu22.04"),
        (
            "gpu_version: {cuda: 11.1, cudnn: 8, development_image: true}",
            "FROM nvidia/cuda:11.1-cudnn8-devel-ubuntu20.04",
        ),
        ("gpu_version: {cuda: 10.2, cudnn: 7}", "FROM nvidia/cuda:10.2-cudnn7-runtime-ubuntu18.04"),
    ],
)
def test_a_gpu_is_a_cuda_image(tmp_path: Path, keys: str, expected: str) -> None:
    """Of the newest system that there is one with."""
    assert _made(tmp_path, f"{PYTHON}gpu: true\n{keys}\n").startswith(f"{expected}\n")


def test_a_tensorflow_project_needs_no_second_image(tmp_path: Path) -> None:
    """A GPU is one of OpenVINO's; TensorFlow itself is installed where a version is asked for that can be had."""
    text = _made(tmp_path, f"{_TENSORFLOW}gpu: true\ntfs_version: 2.16.1\n")
    assert text.startswith("FROM ubuntu:22.04\n")
    assert "git intel-opencl-icd" in text
    assert any(line.endswith("|| pip install --no-cache-dir tensorflow-cpu==2.16.1") for line in _install(text))
    assert _install(_made(tmp_path, f"{_TENSORFLOW}tfs_version: 2.3.0\n")) == []


def test_what_reads_a_bucket_is_installed(tmp_path: Path) -> None:
    """Where a model lies in one."""
    assert "'ovmstrio[handlers,s3]==1.2.3'" in _made(tmp_path, _TENSORFLOW)
    paths = "multi_model_reloading: {paths: [{name: a, path: gs://b/a}, {name: b, path: S3://b/a}]}\n"
    assert "'ovmstrio[handlers,s3]==1.2.3'" in _made(tmp_path, PYTHON + paths)
    assert "s3" not in _made(tmp_path, f"{PYTHON}multi_model_reloading: {{dir: gs://b/a}}\n")


def test_python_port_and_sources_are_followed(tmp_path: Path) -> None:
    """The server's sources come from a build context of that name."""
    text = _made(tmp_path, f"{PYTHON}py_version: 3.12.4\nserve_port: 9\nuse_local_cortex_libs: true\n")
    assert "python=3.12.4 pip" in text
    assert "EXPOSE 9\n" in text
    assert "COPY --from=ovmstrio . /src/ovmstrio\nRUN pip install --no-cache-dir '/src/ovmstrio[handlers]'\n" in text
