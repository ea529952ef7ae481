"""A server that requires client certificates has a plain port for probes, which serves health only."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio
import trustme

from ovmstrio.server.life import serve
from ovmstrio.server.running import Running
from ovmstrio.server.settings import ServerSettings
from tests.support import ir
from tests.support.ports import free_ports
from tests.support.waits import WAIT_SECONDS


async def _until(probe: httpx.AsyncClient, status: int) -> httpx.Response:
    """Request the readiness until it has a status, and return the answer."""
    with trio.fail_after(WAIT_SECONDS):
        while (answer := await probe.get("/v2/health/ready")).status_code != status:  # noqa: ASYNC110 - of a client
            await trio.sleep(0.02)
    return answer


async def test_probes_need_no_certificate_and_get_health_only(tmp_path: Path) -> None:
    """Other paths do not exist, the REST port still requires a certificate, and readiness has its reason."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    base = ir.save(ir.dummy(), tmp_path / "models", "dummy")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "dummy", "base_path": str(base)}}]}))
    rest, probes = free_ports(2)
    settings = ServerSettings(
        config_path=config,
        port=0,
        rest_port=rest,
        rest_bind_address="127.0.0.1",
        probe_port=probes,
        tls_cert=tmp_path / "server.pem",
        tls_key=tmp_path / "server.pem",
        client_ca=tmp_path / "ca.pem",
        file_system_poll_wait_seconds=0.1,
    )
    async with trio.open_nursery() as nursery:
        running: Running = await nursery.start(partial(serve, settings, handle_signals=False))
        async with httpx.AsyncClient(base_url=f"http://{running.probes[0]}", timeout=WAIT_SECONDS) as probe:
            assert (await _until(probe, 200)).json() == {"ready": True}
            assert (await probe.get("/v2/health/live")).json() == {"live": True}
            assert (await probe.head("/v2/health/live")).status_code == 200
            for path in ("/metrics", "/v2", "/v2/models/dummy", "/v1/config", "/v2/models/dummy/ready", "/"):
                assert "Invalid request URL" in (await probe.get(path)).json()["error"], path
            refused = await probe.post("/v2/models/dummy/infer", json={})
            assert "Invalid request URL" in refused.json()["error"]
            with pytest.raises(httpx.TransportError):
                await probe.get(f"http://127.0.0.1:{rest}/v2/health/live")
            config.write_text(json.dumps({"model_config_list": [{"config": {"name": "x", "base_path": "nowhere"}}]}))
            assert "Server is not ready" in (await _until(probe, 503)).json()["error"]
        nursery.cancel_scope.cancel()
