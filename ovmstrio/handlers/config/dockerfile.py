"""Dockerfile of a handler project and the server.

::

    system or CUDA ─> tools ─> Python ─> server ─> shell script ─> conda packages ─> pip packages ─> project

Only existing dependency files are copied. Project files come last, so that a change of code does not repeat the
installation, unless an installation step may need project files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from ovmstrio.handlers.config.project_file import (
    DEFAULT_PYTHON,
    supported_python,
    supported_tensorflow,
    ubuntu_for_cuda,
)
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.util.regular_files import read_regular_text

LOCAL_SERVER: Final = "ovmstrio"
"""Name of the build context with the server's sources, for ``use_local_cortex_libs``."""

_SYSTEM: Final = "22.04"
_OLDEST_SYSTEM: Final = "18.04"
_PROJECT: Final = "/src/project"
_SOURCES: Final = "/src/ovmstrio"
_READINESS: Final = "/run/workspace"
"""Folder of Nucleus's readiness file; the server writes the file if the folder exists."""
_TOOLS: Final = ("build-essential", "ca-certificates", "curl", "git")
_GPU_DRIVER: Final = "intel-opencl-icd"
_CONDA: Final = "https://github.com/conda-forge/miniforge/releases/latest/download/Miniforge3-Linux-$(uname -m).sh"
_S3: Final = ("s3://", "s3a://")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OTHER_FILES: Final = re.compile(r"^\s*(\.|/|file:|-e\b|-r\b|-c\b|--editable|--requirement|--constraint)", re.MULTILINE)
"""Matches requirements that refer to other files of the project."""


def make_dockerfile(project: ProjectSpec, context: Path, version: str, wheel: str = "") -> str:
    """Return the Dockerfile.

    ``context`` is the build context folder that contains the project. The server of ``version`` is installed from
    ``wheel`` in ``context``, or from the package index if empty.
    """
    install = _install_server(project, version, wheel)
    return "\n".join([*_base(project), *_server(project, wheel, install), *_project(project, context, install), ""])


def _base(project: ProjectSpec) -> list[str]:
    tools = [*_TOOLS, _GPU_DRIVER] if project.image.gpu and project.type == "tensorflow" else _TOOLS
    python = supported_python(project.image.py_version) or DEFAULT_PYTHON
    return [
        f"FROM {_base_image(project)}",
        'SHELL ["/bin/bash", "-c"]',
        "ENV LANG=C.UTF-8 LC_ALL=C.UTF-8 PYTHONUNBUFFERED=1",
        "RUN apt-get update \\",
        f"    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends {' '.join(tools)} \\",
        f"    && rm -rf /var/lib/apt/lists/* && mkdir -p {_READINESS}",
        f'RUN curl -fsSL "{_CONDA}" -o /tmp/conda.sh \\',
        "    && bash /tmp/conda.sh -b -p /opt/conda \\",
        "    && rm /tmp/conda.sh \\",
        f"    && /opt/conda/bin/conda create -y -n env python={python} pip \\",
        "    && /opt/conda/bin/conda clean -afy",
        "ENV PATH=/opt/conda/envs/env/bin:/opt/conda/bin:$PATH",
    ]


def _base_image(project: ProjectSpec) -> str:
    gpu = project.image.gpu_version
    if gpu is None:
        return f"ubuntu:{_SYSTEM}"
    flavour = "devel" if gpu.development_image else "runtime"
    return f"nvidia/cuda:{gpu.cuda}-cudnn{gpu.cudnn}-{flavour}-ubuntu{ubuntu_for_cuda(gpu.cuda) or _OLDEST_SYSTEM}"


def _server(project: ProjectSpec, wheel: str, install: str) -> list[str]:
    copied = []
    if wheel:
        copied = [_copy(wheel, f"{_SOURCES}/{wheel}")]
    elif project.image.use_local_cortex_libs:
        copied = [f"COPY --from={LOCAL_SERVER} . {_SOURCES}"]
    return [*copied, f"RUN {install}"]


def _install_server(project: ProjectSpec, version: str, wheel: str) -> str:
    extras = "handlers,s3" if _is_on_s3(project) else "handlers"
    what = f"ovmstrio[{extras}]=={version}"
    if wheel:
        what = f"{_SOURCES}/{wheel}[{extras}]"
    elif project.image.use_local_cortex_libs:
        what = f"{_SOURCES}[{extras}]"
    return f"pip install --no-cache-dir '{what}'"


def _is_on_s3(project: ProjectSpec) -> bool:
    models = project.models
    paths = [] if models is None else [models.dir, *(entry.path for entry in models.entries)]
    return any(path.lower().startswith(_S3) for path in paths)


def _project(project: ProjectSpec, context: Path, install: str) -> list[str]:
    source = project.directory.relative_to(context)
    files = _dependency_files(project)
    everything = _copy(f"{source}/", f"{_PROJECT}/")
    if _requires_project_files(project, files):
        copied, last = [everything], []
    else:
        copied = [_copy(str(source / name), f"{_PROJECT}/{name}") for name in files]
        last = [everything]
    return [
        f"WORKDIR {_PROJECT}",
        *copied,
        *_install(project, files, install),
        *last,
        f"EXPOSE {project.serve_port}",
        f"CMD {json.dumps(['ovms', 'serve', f'{_PROJECT}/{project.file.name}'])}",
    ]


def _dependency_files(project: ProjectSpec) -> list[str]:
    dependencies = project.image.dependencies
    names = (".env", dependencies.shell, dependencies.conda, dependencies.pip)
    return [name for name in names if (project.directory / name).is_file()]


def _requires_project_files(project: ProjectSpec, files: list[str]) -> bool:
    dependencies = project.image.dependencies
    if dependencies.shell in files or dependencies.pip not in files:
        return dependencies.shell in files
    return bool(_OTHER_FILES.search(read_regular_text(project.directory / dependencies.pip)))


def _install(project: ProjectSpec, files: list[str], server: str) -> list[str]:
    dependencies = project.image.dependencies
    commands = {
        dependencies.shell: f"bash -e {_quoted(dependencies.shell)}",
        dependencies.conda: f"conda install -y -n env --file {_quoted(dependencies.conda)}",
        dependencies.pip: f"pip install --no-cache-dir -r {_quoted(dependencies.pip)}",
    }
    steps = [command for name, command in commands.items() if name in files] + _tensorflow(project)
    if not steps:
        return []
    exports = [f"export {name}={_quoted(value)}" for name, value in project.env.items() if _NAME.fullmatch(name)]
    sourced = ["set -a", "source ./.env", "set +a"] if ".env" in files else []
    # Again: the project's packages may have replaced dependencies of the server.
    lines = ["set -e", *exports, *sourced, *steps, server]
    return ["RUN " + "; \\\n    ".join(lines)]


def _tensorflow(project: ProjectSpec) -> list[str]:
    """Install TensorFlow if the project specifies a version and the requirements did not install it."""
    version = supported_tensorflow(project.image.tfs_version) if "tfs_version" in project.image.keys else None
    if version is None:
        return []
    is_there = "python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec(\"tensorflow\"))'"
    return [f"{is_there} || pip install --no-cache-dir tensorflow-cpu=={version}"]


def _copy(source: str, target: str) -> str:
    return f"COPY {json.dumps([source, target])}"


def _quoted(text: str) -> str:
    """Quote a text for bash in a Dockerfile: on one line, without a here-document marker."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text, re.ASCII):
        return text
    safe = (c if c.isprintable() and c not in "\\'<" else _escape(c) for c in text)
    return f"$'{''.join(safe)}'"


def _escape(character: str) -> str:
    return f"\\U{ord(character):08x}"
