"""S3 server for tests (moto) in a separate process."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.support.processes import killed_if_late
from tests.support.waits import WAIT_SECONDS

_SERVER: Final = """
import sys
from threading import Thread
from werkzeug.serving import make_server
from moto.server import DomainDispatcherApplication, create_backend_app
server = make_server("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=True)
print("port", server.server_port, flush=True)
Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""
_START_SECONDS: Final = 120
_CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class Bucket:
    name: str
    environment: Mapping[str, str]
    client: Any

    def put(self, key: str, text: str = "") -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=text.encode())

    def remove(self, prefix: str) -> None:
        for key in self.keys(prefix):
            self.client.delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str = "") -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return [each["Key"] for each in found.get("Contents", ())]

    @contextmanager
    def configured(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
        """Set the environment of clients, and empty the bucket after the block."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        yield self
        self.remove("")
        # The client of S3 leaves connections open if its attempt is cancelled.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@contextmanager
def s3_server(bucket: str, port: int = 0) -> Iterator[Bucket]:
    """Run a server with one empty public bucket until the block ends; port 0 selects any free port."""
    import boto3

    environment = {**os.environ, **_CREDENTIALS}
    command = [sys.executable, "-c", _SERVER, str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with killed_if_late(process, _START_SECONDS):
                found = re.match(r"port (\d+)", process.stdout.readline())
            assert found is not None
            endpoint = f"http://127.0.0.1:{found[1]}"
            client = boto3.client(
                "s3", endpoint_url=endpoint, aws_access_key_id="someone", aws_secret_access_key="secret"
            )
            client.create_bucket(Bucket=bucket, ACL="public-read")
            yield Bucket(bucket, {**_CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}, client)
            client.close()
        finally:
            process.stdin.close()
            try:
                process.wait(WAIT_SECONDS)
            finally:
                # The block waits for its end without a bound.
                process.kill()
