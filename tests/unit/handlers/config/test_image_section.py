from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ovmstrio.runtimes.handlers.config.image_section import log_image_only_keys, python_for, system_for, tensorflow_for
from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio.runtimes.handlers.config.project_spec import Dependencies, GpuVersion
from tests.support.projects import PYTHON, TENSORFLOW, good, told, write

_TENSORFLOW = f"{TENSORFLOW}models: {{dir: s3://b/a}}\n"


def test_the_section_of_an_image_is_read(tmp_path: Path) -> None:
    """Versions are texts, however they are written."""
    text = """py_version: 3.13
gpu: true
gpu_version: {cuda: 11.1, cudnn: 8, development_image: yes}
dependencies: {pip: deps/pip.txt, shell: setup.sh}
use_local_cortex_libs: true
"""
    image = good(tmp_path, PYTHON + text).image
    assert image.py_version == "3.13"
    assert image.gpu
    assert image.gpu_version == GpuVersion(cuda="11.1", cudnn="8", development_image=True)
    assert image.dependencies == Dependencies(pip="deps/pip.txt", conda="conda-packages.txt", shell="setup.sh")
    assert image.use_local_cortex_libs
    assert image.keys == ("py_version", "gpu", "gpu_version", "dependencies", "use_local_cortex_libs")


def test_a_number_keeps_its_digits(tmp_path: Path) -> None:
    """3.10 is not 3.1, and both are accepted with a warning, as is what there is no image for."""
    spec, warnings = read_project(write(tmp_path, f"{PYTHON}py_version: 3.10\n"))
    assert spec.image.py_version == "3.10"
    assert [(each.line, each.path, each.message) for each in warnings] == [
        (3, "py_version", "the server does not run with 3.10")
    ]
    assert read_project(write(tmp_path, f"{PYTHON}py_version: 3.9\n"))[0].image.py_version == "3.9"


def test_old_versions_are_warnings(tmp_path: Path) -> None:
    """They say what the image gets instead."""
    _, warnings = read_project(write(tmp_path, f"{_TENSORFLOW}tfs_version: 2.3.0\npy_version: 3.6.9\n"))
    assert [(each.path, each.suggestion) for each in warnings] == [
        ("tfs_version", "the image gets no TensorFlow unless the requirements name one; 2.12 or newer can be had"),
        ("py_version", "the image gets Python 3.11; 3.11 to 3.13 can be had"),
    ]
    gpu = "gpu: true\ngpu_version: {cuda: 10.2, cudnn: 7}\n"
    _, warnings = read_project(write(tmp_path, PYTHON + gpu))
    assert [each.path for each in warnings] == ["gpu_version.cuda"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{PYTHON}gpu: true\n", [("gpu", "a GPU needs the key 'gpu_version'")]),
        (
            f"{PYTHON}gpu_version: {{cuda: 11.1, cudnn: 8}}\n",
            [("gpu_version", "the key needs 'gpu: true' beside it")],
        ),
        (
            f"{PYTHON}gpu: true\ngpu_version: {{}}\n",
            [("gpu_version", "the key 'cuda' is missing"), ("gpu_version", "the key 'cudnn' is missing")],
        ),
        (
            f"{_TENSORFLOW}gpu_version: {{cuda: 11.1, cudnn: 8}}\n",
            [("gpu_version", "the key is for the type python")],
        ),
        (
            f"{PYTHON}dependencies: {{pip: ../r.txt}}\n",
            [("dependencies.pip", "only the project's folder is in the image")],
        ),
        (
            f"{PYTHON}dependencies: {{shell: /r.sh}}\n",
            [("dependencies.shell", "only the project's folder is in the image")],
        ),
        (f"{PYTHON}py_version: [3]\n", [("py_version", "the value cannot be used")]),
    ],
    ids=range(7),
)
def test_contradictions_are_refused(tmp_path: Path, text: str, expected: list[tuple[str, str]]) -> None:
    """At the key that must change."""
    assert [(path, message) for _, path, message in told(tmp_path, text)] == expected


def test_a_gpu_without_cuda_is_for_tensorflow(tmp_path: Path) -> None:
    """Models run on OpenVINO's devices there."""
    assert good(tmp_path, f"{_TENSORFLOW}gpu: true\n").image.gpu


def test_serving_explains_the_keys_that_it_does_not_follow(tmp_path: Path) -> None:
    """A line for each that is written, none for the others."""
    spec, _ = read_project(write(tmp_path, f"{_TENSORFLOW}py_version: 3.12\ntfs_container_dns: tfs\n"))
    with capture_logs() as logs:
        log_image_only_keys(spec)
    assert [(line["event"], line["key"]) for line in logs] == [
        ("key is for images only", "py_version"),
        ("key has no effect", "tfs_container_dns"),
    ]
    assert logs[0]["reason"] == "the server's own Python runs the handler"


def test_versions_that_fit_together() -> None:
    """The server's Python, the system of a CUDA image, the oldest TensorFlow."""
    pythons = ("3.6.9", "3.10", "3.11", "3.12.4", "3.13", "3.14", "4.0", "x")
    assert [python_for(each) for each in pythons] == [None, None, "3.11", "3.12.4", "3.13", None, None, None]
    cudas = ("10.2", "11.0", "11.6.2", "11.7", "12.4.1", "x")
    assert [system_for(each) for each in cudas] == [None, "20.04", "20.04", "22.04", "22.04", None]
    assert [tensorflow_for(each) for each in ("2.3.0", "2.12.0", "2.16.1", "3")] == [None, "2.12.0", "2.16.1", None]
