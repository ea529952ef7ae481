"""Pages read by the sample ``ocr_pipeline``, against rapidocr's own pipeline on the same models and settings."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks import ocr_package
from benchmarks.processes import ovms
from benchmarks.report import Row

__all__ = ["run"]

ROUNDS = 3
GOAL = 1.0
_RAPIDOCR = "rapidocr==3.10.0"


def _python_with_rapidocr(folder: Path) -> Path:
    """Create an environment for rapidocr, whose dependencies the server does not need."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    packages = [_RAPIDOCR, *(f"{name}=={version(name)}" for name in ("openvino", "numpy", "opencv-python-headless"))]
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return python


def _package_run(python: Path) -> tuple[float, list[str]]:
    from ovmstrio.samples.ocr_pipeline.client import PAGE  # noqa: PLC0415 - only this sample needs these packages

    command = [str(python), "-I", ocr_package.__file__, str(PAGE)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seconds, *lines = out.splitlines()
    return float(seconds), lines


def _served_run(config: Path) -> tuple[float, list[str]]:
    from tritonclient.grpc import InferenceServerClient  # noqa: PLC0415 - only this sample needs these packages

    from ovmstrio.samples.ocr_pipeline.client import PAGE, read_text  # noqa: PLC0415 - only this sample needs these packages

    with ovms(config) as server, InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        return ocr_package.median_seconds(lambda: read_text(client, PAGE)), read_text(client, PAGE)


def run() -> list[Row]:
    """Measure both in turn, each time in a separate process."""
    with tempfile.TemporaryDirectory() as name:
        python = _python_with_rapidocr(Path(name, "environment"))
        prepare = [sys.executable, "-m", "ovmstrio.cli", "prepare", "--sample", "ocr_pipeline", "--repository", name]
        subprocess.run(prepare, check=True, capture_output=True)
        pairs = [(_served_run(Path(name, "ocr_pipeline.json")), _package_run(python)) for _ in range(ROUNDS)]
    if any(ours[1] != theirs[1] for ours, theirs in pairs):
        sys.exit(f"the two did not read the same: {pairs[0]}")
    ratio = statistics.median(theirs[0] / ours[0] for ours, theirs in pairs)
    served, package = (1000 * statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
    lines = len(pairs[0][0][1])
    detail = f"a photographed page of {lines} lines, {served:.0f} ms over gRPC, {package:.0f} ms in rapidocr's process"
    what = "OCR pipeline, pages a second against rapidocr's own on OpenVINO"
    return [Row(what, ratio, f">= {GOAL:.0f}", ratio >= GOAL, detail)]
