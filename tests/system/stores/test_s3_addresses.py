from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ovmstrio.core.errors import StorageFailure
from ovmstrio.stores.address import find_address
from ovmstrio.stores.mirror import Mirror
from tests.support.ir import dummy, save
from tests.support.s3 import Bucket, s3_server
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.waits import until

pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    with s3_server("models") as bucket:
        yield bucket


@pytest.fixture
def bucket(server: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("OVMSTRIO_DOWNLOADS", str(tmp_path / "downloads"))
    with server.configured(monkeypatch):
        yield server


def _upload(bucket: Bucket, folder: Path, key: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            bucket.client.upload_file(str(path), bucket.name, f"{key}/{path.relative_to(folder).as_posix()}")


def _upload_model(bucket: Bucket, folder: Path, version: int, addend: int) -> None:
    base = save(dummy((1, 2), addend=addend), folder / str(addend), "m", version)
    _upload(bucket, base, "up/m")


def _output(server: ServedInThread) -> list[float]:
    metadata = server.ask("GET", "/v2/models/m").json()
    tensor = {"name": metadata["inputs"][0]["name"], "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
    (output,) = server.ask("POST", "/v2/models/m/infer", json={"inputs": [tensor]}).json()["outputs"]
    return list(output["data"])


def _is_ready(server: ServedInThread) -> bool:
    return server.ask("GET", "/v2/models/m/ready").status_code == 200


def test_new_versions_of_a_bucket_are_served(bucket: Bucket, tmp_path: Path) -> None:
    _upload_model(bucket, tmp_path, 1, 3)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "m", "base_path": "s3://models/up/m"}}]}))
    with serving_in_thread(config_path=config, store_poll_seconds=0.1, file_system_poll_wait_seconds=0.1) as server:
        until(partial(_is_ready, server))
        assert _output(server) == [4.0, 5.0]
        _upload_model(bucket, tmp_path, 2, 6)
        until(lambda: _output(server) == [7.0, 8.0])
        bucket.remove("up/m/2/")
        until(lambda: server.ask("GET", "/v2/models/m").json().get("versions") == ["1"])
        assert _output(server) == [4.0, 5.0]


def test_a_model_of_the_command_line_is_downloaded_first(bucket: Bucket, tmp_path: Path) -> None:
    _upload_model(bucket, tmp_path, 1, 3)
    with serving_in_thread(model_name="m", model_path="s3://models/up/m") as server:
        assert _output(server) == [4.0, 5.0]
    with serving_in_thread(model_name="m", model_path="s3://models/up/m/1/model.xml") as server:
        assert _output(server) == [4.0, 5.0]


def test_files_that_were_uploaded_in_parts_are_downloaded(bucket: Bucket) -> None:
    content = bytes(range(256)) * 2**16
    upload = bucket.client.create_multipart_upload(Bucket=bucket.name, Key="up/m/1/model.onnx")["UploadId"]
    parts = []
    for number, start in enumerate(range(0, len(content), 6 * 2**20), 1):
        body = content[start : start + 6 * 2**20]
        named = {"Bucket": bucket.name, "Key": "up/m/1/model.onnx", "UploadId": upload, "PartNumber": number}
        parts.append({"PartNumber": number, "ETag": bucket.client.upload_part(**named, Body=body)["ETag"]})
    bucket.client.complete_multipart_upload(
        Bucket=bucket.name, Key="up/m/1/model.onnx", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    address = find_address("s3://models/up/m")
    assert address is not None
    assert Mirror(address).update()
    assert (address.path / "1" / "model.onnx").read_bytes() == content


def test_what_is_not_there_is_named(bucket: Bucket) -> None:
    for text, message in (
        ("s3://models/none", "nothing is stored at s3://models/none"),
        ("s3://none/m", "s3://none/m cannot be listed: no such bucket"),
    ):
        address = find_address(text)
        assert address is not None
        with pytest.raises(StorageFailure, match=message):
            Mirror(address).update()
