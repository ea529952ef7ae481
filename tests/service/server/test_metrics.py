from __future__ import annotations

import json
import re
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trio
import trustme

from tests.support.all_kinds import write_all_kinds
from tests.support.api_clients import triton_module
from tests.support.served_in_thread import ServedPlan
from tests.support.traced_servers import serving
from tests.support.waits import WAIT_SECONDS


async def _get(address: str, path: str, method: str = "GET", *, verify: Any = True, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=WAIT_SECONDS, trust_env=False, verify=verify) as client:
        return await client.request(method, address + path, **options)


async def _samples(server: ServedPlan, name: str) -> dict[str, float]:
    text = (await _get(f"http://{server.rest[0]}", f"/metrics?match[]={name}")).text
    return {labels: float(value) for labels, value in re.findall(rf"(?m)^{name}(?:_total)?({{.*}})? (\S+)$", text)}


async def test_rejected_requests_are_counted_by_reason_and_configured_name(tmp_path: Path) -> None:
    config = write_all_kinds(tmp_path)
    document = json.loads(config.read_text())
    document["model_config_list"].append({"config": {"name": "mistyped", "base_path": str(tmp_path / "nowhere")}})
    config.write_text(json.dumps(document))
    async with serving(config, max_message_size=100_000) as server:
        rest = f"http://{server.rest[0]}"
        for name in ("nothing", "also-nothing", "mistyped"):
            await _get(rest, f"/v2/models/{name}/infer", "POST", json={"inputs": []})
        await _get(rest, "/v3/chat/completions", "POST", json={"model": "nothing", "messages": []})
        await _get(rest, "/v2/models/model/infer", "POST", content=bytes(200_000))
        await trio.to_thread.run_sync(_send_large, server.grpc[0])
        found = await _samples(server, "ovmstrio_rejected_requests")
        states = await _samples(server, "ovmstrio_service_state")
    assert {labels: count for labels, count in found.items() if count} == {
        '{name="",reason="unknown_name"}': 3,
        '{name="mistyped",reason="not_loaded"}': 1,
        '{name="model",reason="too_large"}': 1,
        '{name="",reason="too_large"}': 1,
    }
    assert states['{name="mistyped",state="failed",version=""}'] == 1
    assert states['{name="graph",state="available",version="1"}'] == 1
    assert len(states) == len({re.sub("state=.*?,", "", labels) for labels in states})


def _send_large(address: str) -> None:
    triton = triton_module("grpc")
    given = triton.InferInput("a", [200_000], "UINT8")
    given.set_data_from_numpy(np.zeros(200_000, np.uint8))
    with triton.InferenceServerClient(address) as client, pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
        client.infer("model", [given])


async def test_reloads_are_counted_by_result_with_the_time_of_the_last_success(tmp_path: Path) -> None:
    config = write_all_kinds(tmp_path)
    async with serving(config, file_system_poll_wait_seconds=0) as server:
        rest, first = f"http://{server.rest[0]}", await _samples(server, "ovmstrio_config_reloads")
        (before,) = (await _samples(server, "ovmstrio_config_last_reload_success_timestamp_seconds")).values()
        good = config.read_text()
        config.write_text("{")
        assert (await _get(rest, "/v1/config/reload", "POST")).is_error
        failed = await _samples(server, "ovmstrio_config_reloads")
        (between,) = (await _samples(server, "ovmstrio_config_last_reload_success_timestamp_seconds")).values()
        config.write_text(good)
        assert (await _get(rest, "/v1/config/reload", "POST")).is_success
        last = await _samples(server, "ovmstrio_config_reloads")
        (after,) = (await _samples(server, "ovmstrio_config_last_reload_success_timestamp_seconds")).values()
    success, failure = '{result="success"}', '{result="failure"}'
    assert [(each[success], each[failure]) for each in (first, failed, last)] == [(1, 0), (1, 1), (2, 1)]
    assert before == between < after


async def test_the_process_has_the_standard_metrics_and_the_versions_of_its_parts(tmp_path: Path) -> None:
    async with serving(write_all_kinds(tmp_path)) as server:
        (start,) = (await _samples(server, "process_start_time_seconds")).values()
        (opened,) = (await _samples(server, "process_open_fds")).values()
        (most,) = (await _samples(server, "process_max_fds")).values()
        (build,) = await _samples(server, "ovmstrio_build_info")
        deaths = await _samples(server, "ovmstrio_worker_deaths")
    assert start == pytest.approx(time.time(), abs=7200)
    assert 3 < opened < most
    assert re.fullmatch(r'{openvino="20\d\d\..*",python="3\..*",version="\d.*"}', build)
    assert list(deaths.values()) == [0]


async def test_the_expiry_of_certificates_is_a_metric(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    (tmp_path / "kinds").mkdir()
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    context = ssl.create_default_context()
    authority.configure_trust(context)
    name = "ovmstrio_certificate_expiry_timestamp_seconds"
    async with serving(write_all_kinds(tmp_path / "kinds"), **files) as server:
        answer = await _get(f"https://{server.rest[0]}", f"/metrics?match[]={name}", verify=context)
        host, _, port = server.rest[0].rpartition(":")
        stream = await trio.open_ssl_over_tcp_stream(host, int(port), ssl_context=context)
        await stream.do_handshake()
        expires = stream.getpeercert()["notAfter"]
        await trio.aclose_forcefully(stream)
    (value,) = re.findall(rf'(?m)^{name}{{option="tls_cert"}} (\S+)$', answer.text)
    assert float(value) == ssl.cert_time_to_seconds(expires)
