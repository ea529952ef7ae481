from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]


def test_generated_files_match_their_sources(tmp_path: Path) -> None:
    pytest.importorskip("betterproto2_compiler")
    script = PROJECT / "protos" / "generate.py"
    subprocess.run([sys.executable, script, "--output", tmp_path / "fresh"], check=True, capture_output=True)
    assert _contents(tmp_path / "fresh") == _contents(PROJECT / "ovmstrio" / "encoding" / "generated")


def _contents(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_descriptors_stay_out_of_the_default_pool() -> None:
    code = (
        "import ovmstrio.encoding.messages, sys\n"
        "from google.protobuf import descriptor_pool\n"
        "for name in ('inference.ModelInferRequest', 'tensorflow.TensorProto'):\n"
        "    try:\n        descriptor_pool.Default().FindMessageTypeByName(name)\n"
        "    except KeyError:\n        pass\n"
        "    else:\n        sys.exit('found ' + name)\n"
        "import tritonclient.grpc.service_pb2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
