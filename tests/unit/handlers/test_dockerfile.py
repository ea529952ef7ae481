from __future__ import annotations

import re
from pathlib import Path

import pytest

from ovmstrio.runtimes.handlers.config.dockerfile import make_dockerfile
from ovmstrio.runtimes.handlers.config.project_file import read_project
from tests.support.project_files import PYTHON, TENSORFLOW, write

_TENSORFLOW = f"{TENSORFLOW}models: {{dir: s3://b/a}}\n"


def _made(folder: Path, text: str = PYTHON, **files: str) -> str:
    project, _ = read_project(write(folder / "iris", text, **files))
    return make_dockerfile(project, folder, "1.2.3")


def _install(dockerfile: str) -> list[str]:
    """Return the commands of the step that installs the requirements of the project."""
    step = re.search(r"^RUN set -e; \\\n((?:.*\\\n)*.*)", dockerfile, re.MULTILINE)
    return [] if step is None else [line.removesuffix("; \\").strip() for line in step[1].split("\n")]


def test_a_project_without_requirements_installs_the_server_alone(tmp_path: Path) -> None:
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


def test_the_shell_script_runs_before_conda_and_pip(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("files", "steps"),
    [
        (
            {"requirements__txt": "numpy\n"},
            [
                'COPY ["iris/requirements.txt", "/src/project/requirements.txt"]',
                "RUN set",
                'COPY ["iris/", "/src/project/"]',
            ],
        ),
        ({"requirements__txt": "numpy\n.\n"}, ['COPY ["iris/", "/src/project/"]', "RUN set"]),
        ({"dependencies__sh": "cp pip.conf /etc/\n"}, ['COPY ["iris/", "/src/project/"]', "RUN set"]),
    ],
    ids=["packages", "the project itself", "shell"],
)
def test_changed_code_repeats_the_install_step_only_if_it_is_needed(
    tmp_path: Path, files: dict[str, str], steps: list[str]
) -> None:
    assert re.findall(r"^(?:COPY .*|RUN set)", _made(tmp_path, **files), re.MULTILINE) == steps


def test_requirements_may_have_another_name(tmp_path: Path) -> None:
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
def test_a_gpu_selects_a_cuda_image(tmp_path: Path, keys: str, expected: str) -> None:
    assert _made(tmp_path, f"{PYTHON}gpu: true\n{keys}\n").startswith(f"{expected}\n")


def test_a_tensorflow_project_has_openvinos_gpu_and_a_tensorflow_that_exists(tmp_path: Path) -> None:
    text = _made(tmp_path, f"{_TENSORFLOW}gpu: true\ntfs_version: 2.16.1\n")
    assert text.startswith("FROM ubuntu:22.04\n")
    assert "git intel-opencl-icd" in text
    assert any(line.endswith("|| pip install --no-cache-dir tensorflow-cpu==2.16.1") for line in _install(text))
    assert _install(_made(tmp_path, f"{_TENSORFLOW}tfs_version: 2.3.0\n")) == []


@pytest.mark.parametrize(
    ("text", "extras"),
    [
        (_TENSORFLOW, "handlers,s3"),
        (
            f"{PYTHON}multi_model_reloading: {{paths: [{{name: a, path: gs://b/a}}, {{name: b, path: S3://b/a}}]}}\n",
            "handlers,s3",
        ),
        (f"{PYTHON}multi_model_reloading: {{dir: gs://b/a}}\n", "handlers"),
    ],
    ids=["models", "paths", "no S3"],
)
def test_the_client_of_s3_is_installed_for_models_in_s3(tmp_path: Path, text: str, extras: str) -> None:
    assert f"'ovmstrio[{extras}]==1.2.3'" in _made(tmp_path, text)


def test_python_port_and_sources_of_the_server(tmp_path: Path) -> None:
    text = _made(tmp_path, f"{PYTHON}py_version: 3.12.4\nserve_port: 9\nuse_local_cortex_libs: true\n")
    assert "python=3.12.4 pip" in text
    assert "EXPOSE 9\n" in text
    assert "COPY --from=ovmstrio . /src/ovmstrio\nRUN pip install --no-cache-dir '/src/ovmstrio[handlers]'\n" in text
