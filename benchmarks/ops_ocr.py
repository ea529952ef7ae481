"""Pages per second of the sample ``ops_ocr``, against the same models and the same code in bare loops."""

from __future__ import annotations

import base64
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.processes import service
from benchmarks.rates import pages_a_second
from benchmarks.report import Row

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run"]

ROUNDS = 5
SECONDS = 8.0
CONCURRENCY = 4
GOAL = 0.95


def _bare(folder: Path, what: str) -> float:
    command = [sys.executable, "-m", "benchmarks.ops_ocr_bare", str(folder), str(CONCURRENCY)]
    out = subprocess.run([*command, str(SECONDS), what], capture_output=True, text=True, check=True).stdout
    return float(out.splitlines()[-1])


def _body() -> bytes:
    from ovmstrio.samples.ops_ocr.client import PAGE  # noqa: PLC0415 - only this sample needs these packages

    image = base64.b64encode(PAGE.read_bytes()).decode()
    return json.dumps({"key": ["image"], "value": [image]}).encode()


def _served(port: int) -> float:
    body = _body()

    def make() -> Callable[[], object]:
        connection = http.client.HTTPConnection("127.0.0.1", port)

        def read() -> None:
            connection.request("POST", "/ocr/prediction", body)
            answer = json.load(connection.getresponse())
            if answer["err_no"]:
                sys.exit(f"a page was not read: {answer['err_msg']}")

        return read

    return pages_a_second(make, CONCURRENCY, SECONDS)


def run() -> list[Row]:
    """Measure in turn: the models alone, all of the code, and the service."""
    with tempfile.TemporaryDirectory() as name:
        prepare = [sys.executable, "-m", "ovmstrio.cli", "prepare", "--sample", "ops_ocr", "--repository", name]
        subprocess.run(prepare, check=True, capture_output=True)
        folder = Path(name, "ops_ocr")
        with service(folder) as port:
            rates = [(_served(port), _bare(folder, "all"), _bare(folder, "models")) for _ in range(ROUNDS)]
    served, everything, models = (statistics.median(each) for each in zip(*rates, strict=True))
    ratio = statistics.median(ours / bare for ours, bare, _ in rates)
    of_models = statistics.median(ours / bare for ours, _, bare in rates)
    detail = (
        f"{served:.2f} pages/s over HTTP at concurrency {CONCURRENCY}, {everything:.2f} in {CONCURRENCY} threads; "
        f"{models:.2f} without decoding, cutting and spelling (ratio {of_models:.3f})"
    )
    return [Row("OCR as Ops, pages a second against bare loops", ratio, f">= {GOAL:g}", ratio >= GOAL, detail)]
