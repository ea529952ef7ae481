from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from ovmstrio.core.request import InferRequest, InferResponse, RequestedOutput
from ovmstrio.core.tensor import BY_NAME, RawTensor, Tensor
from ovmstrio.serving.shared_memory import ClientRegions, output_destinations, write_outputs
from tests.support import ir
from tests.support.api_clients import INTERFACES, serving_both, triton_module
from tests.support.servables import EXACT
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.waits import WAIT_SECONDS

SHAPE = (2, 5)
SIZE = 40
X = np.arange(10, dtype=np.float32).reshape(SHAPE)
Y = np.full(SHAPE, 0.5, np.float32)

Region = Callable[..., tuple[Any, str]]


def _config(folder: Path) -> Path:
    models = {"sums": ir.sum_of_two((-1, 5)), "strings": ir.string_passthrough(), "totals": ir.accumulator()}
    entries: list[dict[str, Any]] = [
        {"name": name, "base_path": str(ir.save(model, folder, name)), "plugin_config": EXACT}
        for name, model in models.items()
    ]
    entries[-1]["stateful"] = True
    path = folder / "config.json"
    path.write_text(json.dumps({"model_config_list": [{"config": each} for each in entries]}))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve sum and difference of two inputs, and strings that are returned, with shared memory allowed."""
    config = _config(tmp_path_factory.mktemp("models"))
    with serving_in_thread(config_path=config, allow_shared_memory=True) as running:
        yield running


@dataclass
class Triton:
    client: Any
    module: Any
    interface: str

    @property
    def as_json(self) -> dict[str, Any]:
        return {"as_json": True} if self.interface == "grpc" else {}

    def inputs(self, name: str) -> list[Any]:
        tensors = [self.module.InferInput(tensor, list(SHAPE), "FP32") for tensor in ("x", "y")]
        for number, tensor in enumerate(tensors):
            tensor.set_shared_memory(name, SIZE, offset=number * SIZE)
        return tensors

    def output(self, output: str, name: str, size: int = SIZE, offset: int = 0) -> Any:
        wanted = self.module.InferRequestedOutput(output)
        wanted.set_shared_memory(name, size, offset=offset)
        return wanted

    def register(self, **regions: str) -> None:
        for name, key in regions.items():
            self.client.register_system_shared_memory(name, key, 2 * SIZE)

    def refusal(self, *arguments: Any, **options: Any) -> str:
        return refusal(lambda: self.client.infer(*arguments, **options))


def refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(InferenceServerException) as refused:
        work()
    return str(refused.value)


def _connected(server: ServedInThread, interface: str) -> Iterator[Triton]:
    module = triton_module(interface)
    with module.InferenceServerClient(server.grpc if interface == "grpc" else server.http) as client:
        yield Triton(client, module, interface)
        client.unregister_system_shared_memory()


@pytest.fixture(params=INTERFACES)
def triton(server: ServedInThread, request: pytest.FixtureRequest) -> Iterator[Triton]:
    yield from _connected(server, request.param)


@pytest.fixture
def region() -> Iterator[Region]:
    """Create shared memory objects with tritonclient; they are removed after the test."""
    created = []

    def create(size: int, *arrays: Any) -> tuple[Any, str]:
        key = f"/ovmstrio-test-{uuid.uuid4().hex}"
        handle = shm.create_shared_memory_region(key, key, size)
        created.append(handle)
        if arrays:
            shm.set_shared_memory_region(handle, arrays)
        return handle, key

    yield create
    for handle in created:
        try:
            shm.destroy_shared_memory_region(handle)
        except (shm.SharedMemoryException, FileNotFoundError):
            continue


def test_inputs_and_outputs_may_be_in_shared_memory(triton: Triton, region: Region) -> None:
    _, in_key = region(2 * SIZE, X, Y)
    outs, out_key = region(3 * SIZE)
    triton.register(**{"in": in_key})
    triton.client.register_system_shared_memory("out", out_key, 2 * SIZE, offset=SIZE)
    wanted = [triton.output("sum", "out"), triton.output("difference", "out", offset=SIZE)]
    answer = triton.client.infer("sums", triton.inputs("in"), outputs=wanted).get_response(**triton.as_json)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, SHAPE, SIZE), X + Y)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, SHAPE, 2 * SIZE), X - Y)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, SHAPE), 0)
    assert [each["name"] for each in answer["outputs"]] == ["sum", "difference"]
    assert all("data" not in each and "contents" not in each for each in answer["outputs"])
    status = triton.client.get_system_shared_memory_status(**triton.as_json)
    regions = status["regions"].values() if triton.interface == "grpc" else status
    assert {(each["name"], each["key"], int(each["byte_size"])) for each in regions} == {
        ("in", in_key, 2 * SIZE),
        ("out", out_key, 2 * SIZE),
    }


def test_a_request_may_have_one_tensor_in_shared_memory_only(triton: Triton, region: Region) -> None:
    _, key = region(2 * SIZE, Y)
    outs, out_key = region(2 * SIZE)
    triton.register(**{"in": key, "out": out_key})
    first, second = (triton.module.InferInput(name, list(SHAPE), "FP32") for name in ("x", "y"))
    first.set_data_from_numpy(X)
    second.set_shared_memory("in", SIZE)
    wanted = [triton.output("sum", "out"), triton.module.InferRequestedOutput("difference")]
    result = triton.client.infer("sums", [second, first], outputs=wanted)
    np.testing.assert_array_equal(result.as_numpy("difference"), X - Y)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, SHAPE), X + Y)


def test_strings_may_be_in_shared_memory(triton: Triton, region: Region) -> None:
    texts = np.array([b"one", b"", "größe".encode()], object)
    framed = sum(4 + len(text) for text in texts)
    _, key = region(2 * SIZE, serialize_byte_tensor(texts))
    outs, out_key = region(2 * SIZE)
    triton.register(**{"in": key, "out": out_key})
    given = triton.module.InferInput("strings", [3], "BYTES")
    given.set_shared_memory("in", framed)
    triton.client.infer("strings", [given], outputs=[triton.output("strings", "out", 2 * SIZE)])
    assert shm.get_contents_as_numpy(outs, np.object_, [3]).tolist() == texts.tolist()


def test_regions_are_unregistered_by_name_or_all_at_once(triton: Triton, region: Region) -> None:
    _, key = region(2 * SIZE, X, Y)
    triton.client.unregister_system_shared_memory("never")
    triton.register(**{"in": key})
    assert 'region "in" is registered already; unregister it first' in refusal(lambda: triton.register(**{"in": key}))
    triton.client.unregister_system_shared_memory("in")
    triton.register(**{"in": key})
    triton.client.unregister_system_shared_memory()
    unknown = triton.refusal("sums", triton.inputs("in"))
    assert 'region "in" is not registered' in unknown
    assert "those of CUDA cannot" in unknown
    status = refusal(lambda: triton.client.get_system_shared_memory_status("in"))
    assert 'region "in" is not registered' in status


def test_cuda_memory_is_refused_by_name(triton: Triton) -> None:
    triton.client.unregister_cuda_shared_memory()
    assert triton.client.get_cuda_shared_memory_status(**triton.as_json) in ([], {})
    text = refusal(lambda: triton.client.register_cuda_shared_memory("gpu", b"aGFuZGxl", 0, 64))
    assert "CUDA shared memory is not supported" in text


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        *((key, "expected a key") for key in ("../passwd", "/../../etc/passwd", "/a/b", "", "/", "..", "x" * 300)),
        ("/ovmstrio-is-not-there", "cannot be opened: No such file"),
    ],
)
def test_keys_that_are_paths_or_unknown_are_refused(triton: Triton, key: str, expected: str) -> None:
    assert expected in refusal(lambda: triton.client.register_system_shared_memory("in", key, 8))


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_only_files_in_memory_are_regions(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789")
    folder = tmp_path / "memory"
    folder.mkdir()
    makers: dict[str, Callable[[Path], object]] = {
        "link": lambda path: path.symlink_to(tmp_path / "secret"),
        "folder": lambda path: path.mkdir(),
        "pipe": os.mkfifo,
    }
    makers[kind](folder / "thing")
    regions = ClientRegions(is_allowed=True, folder=folder)
    with pytest.raises(ValueError, match=r"cannot be opened|is no shared memory object"):
        regions.register("in", "/thing", 0, 4)
    assert regions.listed() == []


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 0), (0, SIZE + 1), (SIZE, 1), (1, SIZE), (2**64 - 1, 1), (8, 2**64 - 1), (2**63, 2**63)]
)
def test_a_region_is_within_its_object(triton: Triton, region: Region, offset: int, size: int) -> None:
    _, key = region(SIZE)
    text = refusal(lambda: triton.client.register_system_shared_memory("in", key, size, offset=offset))
    assert f"within the {SIZE} bytes of '{key}'" in text


@pytest.mark.parametrize(("offset", "size"), [(SIZE, SIZE + 1), (2**63 - 1, SIZE), (-1, SIZE), (0, -SIZE)])
def test_a_tensor_is_within_its_region(triton: Triton, region: Region, offset: int, size: int) -> None:
    triton.register(both=region(2 * SIZE, X, Y)[1])
    wrong = triton.inputs("both")
    wrong[1].set_shared_memory("both", size, offset=offset)
    wanted = [triton.output("sum", "both", size, offset)]
    for tensor, text in (
        ("input y", triton.refusal("sums", wrong)),
        ("output sum", triton.refusal("sums", triton.inputs("both"), outputs=wanted)),
    ):
        assert f'{tensor}: shared memory region "both": expected' in text
        assert f"within its {2 * SIZE} bytes" in text


def test_all_inputs_beyond_their_region_are_reported(triton: Triton, region: Region) -> None:
    triton.register(both=region(2 * SIZE, X, Y)[1])
    wrong = triton.inputs("both")
    for given in wrong:
        given.set_shared_memory("both", SIZE, offset=2 * SIZE)
    first, second = triton.refusal("sums", wrong).split(". Also: ")
    assert "input x: shared memory region" in first
    assert second.startswith("input y: shared memory region")


def test_no_output_is_written_if_one_has_no_room(triton: Triton, region: Region) -> None:
    outs, out_key = region(2 * SIZE)
    triton.register(**{"in": region(2 * SIZE, X, Y)[1], "out": out_key})
    wanted = [triton.output("sum", "out"), triton.output("difference", "out", SIZE - 4, SIZE)]
    text = triton.refusal("sums", triton.inputs("in"), outputs=wanted)
    assert f"output difference: expected room for {SIZE} bytes" in text
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, (4, 5)), 0)


def test_a_step_whose_output_has_no_room_does_not_change_its_sequence(triton: Triton, region: Region) -> None:
    outs, out_key = region(2 * SIZE)
    triton.register(out=out_key)
    given = triton.module.InferInput("x", [1, 2], "FP32")
    given.set_data_from_numpy(np.ones((1, 2), np.float32))

    def step(size: int, **flags: bool) -> None:
        wanted = [triton.output("y", "out", size)]
        triton.client.infer("totals", [given], outputs=wanted, sequence_id=7, **flags)

    expected = "output y: expected room for 8 bytes"
    assert expected in refusal(lambda: step(7, sequence_start=True))
    step(8, sequence_start=True)
    assert expected in refusal(lambda: step(4))
    step(8, sequence_end=True)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, (1, 2)), 2)


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        pytest.param(lambda path: os.truncate(path, SIZE), "it has become smaller", id="truncated"),
        pytest.param(lambda path: os.truncate(path, 0), "it has become smaller", id="emptied"),
        pytest.param(os.unlink, "has been removed; unregister it", id="removed"),
    ],
)
def test_calls_with_a_region_that_was_changed_are_refused_and_others_served(
    triton: Triton, region: Region, harm: Callable[[Path], None], expected: str
) -> None:
    key = region(2 * SIZE, X, Y)[1]
    triton.register(bad=key, good=region(2 * SIZE, X, Y)[1])
    triton.client.infer("sums", triton.inputs("bad"))
    harm(Path("/dev/shm") / key.removeprefix("/"))
    assert expected in triton.refusal("sums", triton.inputs("bad"))
    assert expected in triton.refusal("sums", triton.inputs("good"), outputs=[triton.output("sum", "bad")])
    np.testing.assert_array_equal(triton.client.infer("sums", triton.inputs("good")).as_numpy("sum"), X + Y)


def test_a_view_of_an_unregistered_region_stays_valid_until_it_is_released(region: Region) -> None:
    handle, key = region(SIZE, X)
    regions = ClientRegions(is_allowed=True)
    regions.register("in", key, 0, SIZE)
    view = regions.find("in").view(0, SIZE)
    assert view.readonly
    regions.unregister("in")
    shm.set_shared_memory_region(handle, [Y])
    assert np.frombuffer(view, np.float32).tolist() == [0.5] * 10
    del view
    # The mapping of the client stays.
    assert Path("/proc/self/maps").read_text().count(key.removeprefix("/")) == 1


@pytest.mark.parametrize("interface", INTERFACES)
def test_shared_memory_is_off_unless_it_is_allowed(tmp_path: Path, region: Region, interface: str) -> None:
    key = region(2 * SIZE, X, Y)[1]
    with serving_in_thread(config_path=_config(tmp_path)) as server:
        for triton in _connected(server, interface):
            texts = [refusal(lambda: triton.register(**{"in": key})), triton.refusal("sums", triton.inputs("in"))]  # noqa: B023 - called at once
        assert all("--allow-shared-memory turns it on" in text for text in texts)
        assert "system_shared_memory" not in server.ask("GET", "/v2").json()["extensions"]


@pytest.mark.parametrize(
    ("parameters", "more", "expected"),
    [
        ({"shared_memory_region": 5, "shared_memory_byte_size": 8}, {}, "expected the name of a region, got 5"),
        ({"shared_memory_region": "in"}, {}, "needs shared_memory_byte_size"),
        ({"shared_memory_region": "in", "shared_memory_byte_size": "8"}, {}, "expected a whole number of bytes"),
        ({"shared_memory_region": "in", "shared_memory_byte_size": True}, {}, "expected a whole number of bytes"),
        (
            {"shared_memory_region": "in", "shared_memory_byte_size": SIZE},
            {"data": [1.0] * 10},
            "it has contents besides shared_memory_region",
        ),
    ],
)
def test_malformed_parameters_of_a_region_are_refused(
    server: ServedInThread, region: Region, parameters: dict[str, Any], more: dict[str, Any], expected: str
) -> None:
    assert "system_shared_memory" in server.ask("GET", "/v2").json()["extensions"]
    path = "/v2/systemsharedmemory/region/in"
    server.ask("POST", f"{path}/register", json={"key": region(SIZE)[1], "offset": 0, "byte_size": SIZE})
    tensor = {"name": "x", "shape": SHAPE, "datatype": "FP32", "parameters": parameters, **more}
    answer = server.ask("POST", "/v2/models/sums/infer", json={"inputs": [tensor, tensor]})
    assert server.ask("POST", f"{path}/unregister").status_code == 200
    assert answer.status_code == 400
    assert expected in answer.json()["error"]


def test_at_most_1024_regions_are_registered(tmp_path: Path) -> None:
    (tmp_path / "memory").write_bytes(b"\0" * 8)
    regions = ClientRegions(is_allowed=True, folder=tmp_path)
    for number in range(1024):
        regions.register(f"r{number}", "/memory", 0, 8)
    with pytest.raises(Exception, match="at most 1024 shared memory regions"):
        regions.register("one more", "/memory", 0, 8)
    regions.unregister("r0")
    regions.register("one more", "/memory", 0, 8)
    assert len(regions.listed()) == 1024
    regions.unregister()


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [(False, "--allow-remote-admin lets other machines do it"), (True, "cannot be opened")],
)
async def test_other_machines_register_only_with_remote_administration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, allowed: bool, expected: str
) -> None:
    monkeypatch.setattr("ovmstrio.protocols.admin.changes.is_local", lambda _: False)

    def work(client: Any, _: Any) -> str:
        return refusal(lambda: client.register_system_shared_memory("in", "/nothing", 8))

    regions = ClientRegions(is_allowed=True, folder=tmp_path)
    async with serving_both([], allows_remote_admin=allowed, regions=regions) as both:
        for interface in INTERFACES:
            assert expected in await both.with_triton(interface, work)


async def test_large_outputs_are_written_completely_in_a_thread(region: Region) -> None:
    array = np.arange(2**20, dtype=np.float32)
    outs, key = region(array.nbytes + 4)
    regions = ClientRegions(is_allowed=True)
    regions.register("out", key, 0, array.nbytes + 4)
    parameters: dict[str, Any] = {"shared_memory_region": "out", "shared_memory_byte_size": array.nbytes + 4}
    request = InferRequest("m", outputs=[RequestedOutput("y", parameters)])
    response = InferResponse("m", "1", [Tensor("y", BY_NAME["FP32"], array)])
    with trio.fail_after(WAIT_SECONDS):
        await write_outputs(response, output_destinations(request, regions))
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, array.shape), array)
    (tensor,) = response.outputs
    assert isinstance(tensor, RawTensor)
    assert (tensor.data, tensor.place) == (b"", ("out", 0, array.nbytes))
