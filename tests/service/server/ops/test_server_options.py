"""Options of every server hold for a server of Ops."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trio
import trustme

from ovmstrio.protocol.pipeline_messages import METHOD, REQUEST, RESPONSE
from tests.support.api_clients import call
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.waits import WAIT_SECONDS


async def test_messages_have_a_size() -> None:
    """Larger ones than ``max_message_size`` are refused at every door, and do not reach the pipeline."""
    executor = EchoExecutor()
    text = "x" * 5000
    async with (
        serving_pipeline(executor, max_message_size=4096) as running,
        httpx.AsyncClient(base_url=f"http://{running.rest[0]}", trust_env=False) as client,
    ):
        answer = await client.post("/uci/prediction", json={"key": ["x"], "value": [text]})
        assert (answer.status_code, answer.json()["code"]) == (413, 8)
        request = REQUEST(key=["x"], value=[text])
        with pytest.raises(grpc.RpcError) as raised:
            await call(running.grpc[0], METHOD, request, RESPONSE.DESCRIPTOR.full_name)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert executor.requests == []


async def test_a_drain_that_is_too_short_cuts() -> None:
    """A call that outlasts ``drain_seconds`` is cut off, and the server is gone."""
    executor = EchoExecutor()
    executor.gate = trio.Event()
    async with (
        serving_pipeline(executor, drain_seconds=0) as running,
        httpx.AsyncClient(base_url=f"http://{running.rest[0]}", trust_env=False) as client,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            with pytest.raises(httpx.TransportError):
                await client.post("/uci/prediction", json={})

        nursery.start_soon(ask)
        await executor.arrived.wait()
        running.drain()
        with trio.fail_after(WAIT_SECONDS):
            await executor.left.wait()


async def test_metrics_have_the_servers_families_and_the_pipelines() -> None:
    """Calls of Ops are counted by name as those of everything else."""
    async with (
        serving_pipeline(EchoExecutor(), metrics_enable=True) as running,
        httpx.AsyncClient(base_url=f"http://{running.rest[0]}", trust_env=False) as client,
    ):
        await client.post("/uci/prediction", json={"key": ["x"], "value": ["1"]})
        lines = (await client.get("/metrics")).text.splitlines()
    counted = [line for line in lines if line.startswith("ovmstrio_requests_total{") and 'name="uci"' in line]
    assert any('code="OK"' in line and line.endswith(" 1.0") for line in counted), counted


async def test_tls_is_that_of_both_protocols(tmp_path: Path) -> None:
    """Clients that trust the certificate are answered, and those without TLS are not."""
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(context)
    certificate = authority.issue_cert("127.0.0.1")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    certificate.private_key_pem.write_to_path(key)
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    request = REQUEST(key=["x"], value=["1"])
    async with (
        serving_pipeline(EchoExecutor(), tls_cert=chain, tls_key=key) as running,
        httpx.AsyncClient(trust_env=False, verify=context) as client,
    ):
        url = f"{running.rest[0]}/uci/prediction"
        assert (await client.post(f"https://{url}", json={"key": ["x"], "value": ["1"]})).json()["value"] == ["1"]
        with pytest.raises(httpx.TransportError):
            await client.post(f"http://{url}", json={})

        def ask() -> Any:
            credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
            with grpc.secure_channel(running.grpc[0], credentials) as channel:
                method = channel.unary_unary(METHOD, REQUEST.SerializeToString, RESPONSE.FromString)
                return method(request, timeout=WAIT_SECONDS)

        assert list((await trio.to_thread.run_sync(ask)).value) == ["1"]
        with pytest.raises(grpc.RpcError) as refused:
            await call(running.grpc[0], METHOD, request, RESPONSE.DESCRIPTOR.full_name)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
