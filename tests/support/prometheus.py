"""A real Prometheus over what a server has told scrapers, at times of the test's own."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from tests.support.ports import free_ports
from tests.support.waits import WAIT_SECONDS, until

_SECONDS_BETWEEN: Final = 60
_PATIENCE_SECONDS: Final = 60


def is_there() -> bool:
    """Tell whether Prometheus and its tool are installed."""
    return bool(shutil.which("prometheus") and shutil.which("promtool"))


class Prometheus:
    """One that runs, with the scrapes of one server."""

    def __init__(self, address: str, at: float) -> None:
        self._address = address
        self._at = at

    def evaluate(self, query: str) -> list[dict[str, Any]]:
        given = {"query": query, "time": str(self._at)}
        answer = httpx.get(f"{self._address}/api/v1/query", params=given, timeout=_PATIENCE_SECONDS, trust_env=False)
        document = answer.json()
        assert document["status"] == "success", (query, document)
        result: list[dict[str, Any]] = document["data"]["result"]
        return result


@contextlib.contextmanager
def evaluating(folder: Path, scrapes: Sequence[str]) -> Iterator[Prometheus]:
    """Run Prometheus over scrapes in OpenMetrics's format, a minute apart, until the block ends."""
    # Blocks of a time that has passed, so that they are not compacted while they are read.
    begin = int(time.time()) // 7200 * 7200 - 7200
    text = folder / "scrapes.txt"
    text.write_text(_with_times(scrapes, begin))
    done = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(text), str(folder / "data")],
        check=False, capture_output=True, text=True, timeout=_PATIENCE_SECONDS,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"scrape_configs": []}))
    (port,) = free_ports(1)
    command = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_ready(process, address)
            yield Prometheus(address, begin + _SECONDS_BETWEEN * (len(scrapes) - 1))
        finally:
            process.kill()


def _wait_ready(process: subprocess.Popen[bytes], address: str) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, "Prometheus has ended"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{address}/-/ready", timeout=WAIT_SECONDS, trust_env=False).is_success
        return False

    until(is_ready)


def _with_times(scrapes: Sequence[str], begin: int) -> str:
    values = [dict(re.findall(r"(?m)^([^#\s]\S*?(?:{.*?})?) (\S+)(?: # .*)?$", text)) for text in scrapes]
    lines = []
    for line in scrapes[-1].splitlines():
        if line.startswith("#"):
            lines.append(line)
            continue
        series = line[: line.rindex("} ") + 1] if "} " in line.partition(" # ")[0] else line.split(" ")[0]
        times = ((begin + _SECONDS_BETWEEN * number, known.get(series)) for number, known in enumerate(values))
        lines += [f"{series} {value} {at}" for at, value in times if value is not None]
    return "\n".join(lines) + "\n"
