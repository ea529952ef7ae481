"""``ovms serve PROJECT`` with a gRPC service of the project, in one process, in several, and isolated."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

import ovmstrio_samples
from ovmstrio_samples.handler_primes import client as primes
from tests.support.processes import serving_project
from tests.support.projects import write_project
from tests.support.waits import WAIT_SECONDS, until

PROTO = """
syntax = "proto3";
package talk;
message Text { string value = 1; }
service Talk {
  rpc Say (Text) returns (Text);
  rpc Spell (Text) returns (stream Text);
}
"""
HANDLER = """
import os

class Handler:
    def __init__(self, module_proto_pb2):
        self.pb = module_proto_pb2

    def Say(self, payload):
        return self.pb.Text(value=f"{payload.value} {os.getpid()}")

    def Spell(self, payload):
        for letter in payload.value:
            yield self.pb.Text(value=letter)
"""


def _project(folder: Path, **keys: Any) -> Path:
    file = write_project(folder, HANDLER, protobuf_path="talk.proto", **keys)
    (folder / "talk.proto").write_text(PROTO)
    return file


def _method(channel: Any, kind: str, name: str) -> Any:
    make = getattr(channel, kind)
    coding = {"request_serializer": StringValue.SerializeToString, "response_deserializer": StringValue.FromString}
    return make(f"/talk.Talk/{name}", **coding)


def _say(address: str) -> str:
    # Otherwise all channels of a process share one connection.
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        reply = _method(channel, "unary_unary", "Say")(StringValue(value="I am"), timeout=WAIT_SECONDS)
        return str(reply.value)


@pytest.mark.parametrize(
    ("processes", "isolation", "count"), [(1, "none", 1), (2, "none", 2), (1, "process", 1)], ids=["1", "2", "isolated"]
)
def test_each_connection_belongs_to_one_process(tmp_path: Path, processes: int, isolation: str, count: int) -> None:
    """All processes serve all kinds of calls, and the server drains. Each configuration has a server of its own."""
    file = _project(tmp_path / "project", processes=processes, threads_per_process=2)
    options = ("--grpc_bind_address", "127.0.0.1", "--python_isolation", isolation)
    with serving_project(file, options=options) as server:
        pids: set[int] = set()

        def all_answer() -> bool:
            pids.add(int(_say(server.address).split()[-1]))
            return len(pids) == count

        until(all_answer)
        assert (server.process.pid in pids) == ((processes, isolation) == (1, "none"))
        with grpc.insecure_channel(server.address) as channel:
            spelled = _method(channel, "unary_stream", "Spell")(StringValue(value="abc"), timeout=WAIT_SECONDS)
            assert [each.value for each in spelled] == ["a", "b", "c"]
        assert server.stop() == 0


def test_primes_are_streamed(tmp_path: Path) -> None:
    """A stream lasts as long as its client; a number that is too small has the status that the handler chose.

    The sample has a server of its own: messages of client and server cannot be in one process.
    """
    project = shutil.copytree(
        Path(ovmstrio_samples.__file__).parent / "handler_primes", tmp_path / "samples" / "primes"
    )
    with serving_project(project, options=("--grpc_bind_address", "127.0.0.1")) as server:
        assert list(primes.primes(server.address, count=5)) == [2, 3, 5, 7, 11]
        endless = primes.primes(server.address, 1000)
        assert list(islice(endless, 3)) == [1009, 1013, 1019]
        endless.close()  # type: ignore[attr-defined]
        assert [primes.check(server.address, number) for number in (91, 97)] == [7, 97]
        with pytest.raises(grpc.RpcError) as refused:
            primes.check(server.address, 1)
        assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
        # A stream without an end does not keep the server.
        assert server.stop() == 0
