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
import numpy as np
import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ovmstrio.auth.key_file import write_key_file
from ovmstrio.core.metric_families import OWN_FAMILIES
from ovmstrio.util.deprecation import OLD_METRICS
from tests.support.all_kinds import write_all_kinds
from tests.support.callers import bearer, entry_of
from tests.support.ports import free_ports
from tests.support.processes import serving
from tests.support.tiny_llm import write_tiny_folder
from tests.support.waits import WAIT_SECONDS, until

_SECONDS_BETWEEN: Final = 60
_PATIENCE_SECONDS: Final = 60


def is_there() -> bool:
    return bool(shutil.which("prometheus") and shutil.which("promtool"))


class Prometheus:
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


pytestmark = pytest.mark.slow

FOLDER: Final = Path(__file__).parents[3] / "deploy" / "grafana"
DASHBOARDS: Final = ("server", "text")
_VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")
_COMPARED: Final = re.compile(r"\s*[<>]=?\s*[\d.]+\s*$")
_FAMILY: Final = re.compile(r"(?:^# HELP .*\n)(?:(?!# HELP ).*\n)*", re.MULTILINE)
_SELECTOR: Final = re.compile(r"\b((?:ovms|process)\w+)(?:{(.*?)})?")

needs_prometheus = pytest.mark.skipif(not is_there(), reason="needs Debian's package prometheus")


def _queries() -> list[tuple[str, str]]:
    """Yield each query of the dashboards with its panel, and the expressions of alerts without their bounds."""
    found = []
    for name in DASHBOARDS:
        dashboard = json.loads((FOLDER / f"{name}.json").read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                query = _VARIABLE.sub(lambda each: "5m" if each[1] == "__rate_interval" else ".*", target["expr"])
                found.append((f"{name}: {panel['title']} {target['refId']}", query))
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert _COMPARED.search(rule["expr"]), rule
        found.append((rule["alert"], _COMPARED.sub("", rule["expr"])))
    return found


QUERIES: Final = dict(_queries())
QUIET: Final = {
    "OvmstrioCertificateExpires",
    "OvmstrioOverloaded",
    "OvmstrioRemoteUnreachable",
    "OvmstrioRequestsRejected",
    "OvmstrioServiceFailed",
}
"""Alerts on series that exist only once there is something to count; promtool tests these rules."""


class _Client:
    def __init__(self, address: str) -> None:
        self._address = address

    def post(self, path: str, body: Any, key: str = "boss") -> httpx.Response:
        return httpx.post(self._address + path, json=body, headers=bearer(key), timeout=120, trust_env=False)

    def infer(self, name: str, tensor: str, array: np.ndarray[Any, Any], datatype: str = "FP32") -> httpx.Response:
        data = {"name": tensor, "shape": array.shape, "datatype": datatype, "data": array.ravel().tolist()}
        return self.post(f"/v2/models/{name}/infer", {"inputs": [data]})

    def scrape(self, accept: str = "application/openmetrics-text") -> str:
        headers = bearer("boss") | {"accept": accept}
        answer = httpx.get(f"{self._address}/metrics", headers=headers, timeout=60, trust_env=False)
        assert answer.is_success, answer.text
        return answer.text

    def work(self) -> None:
        row = np.ones((1, 10), np.float32)
        answers = [
            *(self.infer(name, "b", row) for name in ("model", "batched", "dag")),
            self.infer("graph", "in", np.frombuffer(b"abc", np.uint8), "UINT8"),
            self.post("/handler", [1, 2]),
            self.post("/ops/prediction", {"key": ["x"], "value": ["1"]}),
            self.post("/v3/completions", {"model": "text", "prompt": "Hi", "max_tokens": 3, "temperature": 0}),
        ]
        assert [answer.status_code for answer in answers] == [200] * len(answers), [each.text for each in answers]
        assert self.infer("model", "c", row).status_code == 400
        assert self.post("/handler", ["no number"]).status_code == 500
        assert self.post("/handler", [], key="unknown").status_code == 401


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return three scrapes in OpenMetrics's format, and one in Prometheus's."""
    folder = tmp_path_factory.mktemp("served")
    config = write_all_kinds(folder)
    document = json.loads(config.read_text())
    (model,) = document["model_config_list"]
    model["config"]["max_concurrency"] = 4
    batched = model["config"] | {"name": "batched", "batching": {"max_batch_size": 4, "batch_timeout_ms": 1}}
    document["model_config_list"].append({"config": batched})
    write_tiny_folder(folder / "text")
    text = {"name": "text", "base_path": str(folder / "text"), "cache_size": 0.1}
    document["text_model_config_list"] = [{"config": text}]
    config.write_text(json.dumps(document))
    keys = folder / "keys.json"
    write_key_file(keys, [entry_of("boss", "infer:*", "read", "metrics", "admin")])
    options = ["--keys_file", str(keys), "--python_isolation", "process"]
    texts = []
    with serving("--config_path", str(config), *options, log=folder / "log.txt") as server:
        client = _Client(server.rest)
        for _ in range(3):
            client.work()
            texts.append(client.scrape())
        texts.append(client.scrape("text/plain"))
    return texts


@pytest.fixture(scope="module")
def scrapes(scraped: list[str]) -> list[str]:
    return scraped[:-1]


@pytest.fixture(scope="module")
def prometheus(scrapes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with evaluating(tmp_path_factory.mktemp("prometheus"), scrapes) as running:
        yield running


def test_queried_metrics_and_labels_exist(scrapes: list[str]) -> None:
    families = text_string_to_metric_families(scrapes[-1])  # type: ignore[no-untyped-call]
    labels: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            labels.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
    for row in OWN_FAMILIES.values():
        sample = f"{row.name}_total" if row.kind == "counter" else row.name
        labels.setdefault(sample, {"instance", "job"}).update(row.labels)
    for place, query in QUERIES.items():
        grouped = {each.strip() for names in re.findall(r"by \((.*?)\)", query) for each in names.split(",")}
        for name, selected in _SELECTOR.findall(query):
            assert name in labels, place
            wanted = set(re.findall(r"(\w+)\s*(?:=~?|!~|!=)", selected)) | grouped
            assert wanted <= labels[name], (place, name)


@needs_prometheus
def test_every_query_has_a_result(prometheus: Prometheus) -> None:
    for place, query in QUERIES.items():
        values = [float(each["value"][1]) for each in prometheus.evaluate(query)]
        assert values or place in QUIET, place
        # Quantiles of services without recent calls are NaN.
        assert "histogram_quantile" not in query or any(value >= 0 for value in values), place


@needs_prometheus
def test_only_the_failed_handler_exceeds_an_alert(prometheus: Prometheus) -> None:
    beyond = {}
    for rule in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]:
        if found := prometheus.evaluate(rule["expr"]):
            beyond[rule["alert"]] = [(each["metric"], float(each["value"][1])) for each in found]
    assert beyond == {"OvmstrioFailures": [({"name": "handler"}, 0.5)]}


@needs_prometheus
def test_names_and_units_of_own_metrics_pass_promtool(scraped: list[str]) -> None:
    old = {name.name for name in OLD_METRICS.values()}
    families = _FAMILY.findall(scraped[-1])
    names = (each.split(" ", 3)[2].removesuffix("_total").removesuffix("_created") for each in families)
    own = [
        text
        for name, text in zip(names, families, strict=True)
        if name.startswith(("ovmstrio_", "process_")) and name not in old
    ]
    assert len(own) > 40
    command, given = ["promtool", "check", "metrics"], "".join(own)
    done = subprocess.run(command, input=given, check=False, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_prometheus
def test_alert_rules_pass_promtool(tmp_path: Path) -> None:
    for file in (FOLDER / "alerts.yml", Path(__file__).parent / "alert_cases.yml"):
        shutil.copy(file, tmp_path)
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alert_cases.yml"]):
        done = subprocess.run(
            ["promtool", *command], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert not done.returncode, done.stdout + done.stderr
