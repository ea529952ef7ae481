from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import trio

from ovmstrio.samples.add_one.prepare import write as write_add_one
from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "python.md"
PATIENCE_SECONDS = 60


def test_importing_the_package_imports_nothing_else() -> None:
    program = """
import sys
before = set(sys.modules)
import ovmstrio
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
print(*sorted(name for name in sys.modules if name.startswith("ovmstrio")))
ovmstrio.Tensor
print("openvino" in sys.modules, "Tensor" in vars(ovmstrio))
try:
    ovmstrio.Sensor
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "ovmstrio",
        "ovmstrio",
        "False True",
        "module 'ovmstrio' has no attribute 'Sensor'",
    ]


def _example(name: str, folder: Path) -> Path:
    (text,) = re.findall(rf'```python\n("""{name}: .*?)```', GUIDE.read_text(), re.DOTALL)
    path = folder / name
    path.write_text(text)
    return path


async def test_the_server_of_the_guide_answers_its_client(tmp_path: Path) -> None:
    server, client = (_example(name, tmp_path) for name in ("own_server.py", "own_client.py"))
    grpc, rest = free_ports(2)
    for program in (server, client):
        program.write_text(program.read_text().replace("9000", str(grpc)).replace("8000", str(rest)))
    version = tmp_path / "models" / "add_one" / "1"
    version.mkdir(parents=True)
    write_add_one(tmp_path, version)
    entry = '{"model_config_list": [{"config": {"name": "add_one", "base_path": "add_one"}}]}'
    (tmp_path / "models" / "config.json").write_text(entry)
    run = partial(trio.run_process, cwd=tmp_path)
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            serving = await nursery.start(partial(run, [sys.executable, server], stdout=subprocess.PIPE))
            output = b""
            while b"loading has finished" not in output:
                piece = await serving.stdout.receive_some()
                assert piece, output
                output += piece
            done = await run([sys.executable, client], capture_stdout=True)
            serving.terminate()
    assert output.startswith(f"gRPC at 127.0.0.1:{grpc} and HTTP at 127.0.0.1:{rest}\n".encode())
    assert b"TensorInfo(name='x', datatype='FP32', shape=(-1, 10))" in done.stdout
    assert done.stdout.endswith(b"[[ 1.  2.  3.  4.  5.  6.  7.  8.  9. 10.]]\n")


async def test_the_own_kind_of_the_guide_is_served(tmp_path: Path) -> None:
    program = _example("own_kind.py", tmp_path)
    with trio.fail_after(PATIENCE_SECONDS):
        done = await trio.run_process([sys.executable, program], cwd=tmp_path, capture_stdout=True)
    assert b"[2. 4. 6.]\n" in done.stdout
