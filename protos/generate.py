"""Generate ``ovmstrio/encoding/generated`` from the sources beside this file.

Writes typed message classes and service bases (betterproto2) and ``descriptors.binpb``, a serialised
``FileDescriptorSet`` of all sources, which reflection hands out and from which the parser of the hot path is made.
Four folders are for Google's parser alone: graph files (``mediapipe/``), for betterproto2 knows no extensions, the
messages of pipelines (``paddle_serving/``) and of SavedModels, and ``config.pbtxt`` files (``triton/``), which become
values of their own at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCES = Path(__file__).resolve().parent
GENERATED = SOURCES.parent / "ovmstrio" / "encoding" / "generated"

_UNTYPED = ("mediapipe/", "paddle_serving/", "saved_model/", "triton/")
_BESIDE_OURS = ("google/protobuf/struct.proto",)  # options of calculators that the server does not know


def generate(output: Path) -> None:
    """Fill an existing, empty directory.

    Raises:
        subprocess.CalledProcessError: a source cannot be compiled; the compiler has printed why.
    """
    protos = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.proto"))
    described = [*protos, *_BESIDE_OURS]
    _compile("--include_imports", f"--descriptor_set_out={output / 'descriptors.binpb'}", *described)
    options = "--python_betterproto2_opt=client_generation=none,server_generation=async"
    typed = [proto for proto in protos if not proto.startswith(_UNTYPED)]
    _compile(f"--python_betterproto2_out={output}", options, *typed)


def _compile(*arguments: str) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={SOURCES}", *arguments]
    # The compiler looks for its plugin, and that for its formatter, on the path.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    subprocess.run(command, check=True, cwd=SOURCES, env={**os.environ, "PATH": path})  # noqa: S603 - our own words


def main() -> None:
    """Generate into a new directory and put it in the place of the old one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=GENERATED, help="replaced as a whole")
    output: Path = parser.parse_args().output
    with TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "generated"
        fresh.mkdir()
        generate(fresh)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(fresh, output)


if __name__ == "__main__":
    main()
