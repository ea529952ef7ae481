from __future__ import annotations

import base64
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from PIL import Image
from platformdirs import user_cache_path

from ovmstrio.client.pipeline import PipelineClient
from ovmstrio.samples.catalog import BY_NAME
from ovmstrio.samples.ops_ocr import client as ocr
from ovmstrio.samples.preparing import prepare_sample
from tests.support.fetched_samples import unpack_original
from tests.support.processes import OvmsProcess, running_service
from tests.support.waits import WAIT_SECONDS

pytestmark = pytest.mark.slow

CACHE = user_cache_path("ovmstrio") / "wheels"
UCI = "0.0137, -0.1136, 0.2553, -0.0692, 0.0582, -0.0727, -0.1583, -0.0584, 0.6283, 0.4919, 0.1856, 0.0795, -0.0332"
"""A sample of the original's documentation, for which it gives 18.901152."""


@pytest.fixture(scope="module")
def ocr_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    pytest.importorskip("cv2")
    sample = BY_NAME["ops_ocr"]
    if sample.wheel is None or not (CACHE / sample.wheel.filename).is_file():
        pytest.skip("not in the cache: ovms prepare --sample ops_ocr")
    (folder,) = prepare_sample(sample, tmp_path_factory.mktemp("ocr"), 1, CACHE)
    with running_service(folder) as server:
        yield server


def test_a_photographed_page_is_read(ocr_server: OvmsProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        pages = list(pool.map(lambda _: ocr.read_text(ocr_server.rest, ocr.PAGE), range(8)))
    assert pages == pages[:1] * 8
    text = "\n".join(pages[0])
    places = [text.find(words) for words in ocr.WORDS]
    assert -1 not in places
    assert places == sorted(places)


def test_a_picture_without_text_has_no_lines(ocr_server: OvmsProcess, tmp_path: Path) -> None:
    Image.new("RGB", (320, 200), "white").save(tmp_path / "empty.png")
    assert ocr.read_text(ocr_server.rest, tmp_path / "empty.png") == []


@pytest.mark.parametrize("image", ["", "no base64", base64.b64encode(b"no picture").decode()])
def test_a_wrong_picture_has_the_error_code_of_the_service(ocr_server: OvmsProcess, image: str) -> None:
    answer = httpx.post(
        f"{ocr_server.rest}/ocr/prediction", json={"key": ["image"], "value": [image]}, timeout=WAIT_SECONDS
    ).json()
    assert (answer["err_no"], "no picture" in answer["err_msg"], answer["key"]) == (101, True, [])


def test_the_example_of_the_original_package_returns_its_documented_answer(tmp_path: Path) -> None:
    example = unpack_original(tmp_path) / "paddle_serving_server" / "env_check" / "simple_web_service"
    script = (example / "web_service.py").read_bytes()
    with running_service(example, "config_cpu.yml", config="config_cpu.yml") as server:
        client = PipelineClient()
        client.connect([server.grpc])
        for x, price in ((UCI, "[[18.901152]]"), (f"{UCI};{UCI}", "[[18.901152]\n [18.901152]]")):
            body = {"key": ["x"], "value": [x]}
            answer = httpx.post(f"{server.rest}/uci/prediction", json=body, timeout=WAIT_SECONDS).json()
            assert answer == {"err_no": 0, "err_msg": "", "key": ["price"], "value": [price], "tensors": []}
            assert client.predict({"x": x}).value == [price]
        client.release()
        assert server.stop(signal.SIGTERM)[0] == 0
    assert (example / "web_service.py").read_bytes() == script
