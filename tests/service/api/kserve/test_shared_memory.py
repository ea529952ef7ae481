"""Triton's shared memory of the system, as its own clients use it, and what hostile ones try."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from ovmstrio.api.kserve.repository_index import extensions_of
from ovmstrio.config.specs import ModelSpec
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.dataplane.shared_memory.client_regions import ClientRegions
from ovmstrio.server.settings import ServerSettings
from tests.support import ir
from tests.support.both_doors import DOORS, BothDoors, serving_both
from tests.support.servables import EXACT
from tests.support.waits import WAIT_SECONDS

SHAPE = (2, 5)
SIZE = 40
X = np.arange(10, dtype=np.float32).reshape(SHAPE)
Y = np.full(SHAPE, 0.5, np.float32)

Region = Callable[..., Any]


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[BothDoors]:
    """Serve a sum and difference of two, and strings that are given back, with shared memory allowed."""
    models = {"sums": ir.sum_of_two((-1, 5)), "strings": ir.string_passthrough()}
    specs = [
        ModelSpec(name=name, base_path=ir.save(model, tmp_path, name), plugin_config=EXACT)
        for name, model in models.items()
    ]
    async with serving_both(specs, regions=ClientRegions(is_allowed=True)) as both:
        yield both


@pytest.fixture
def region() -> Iterator[Region]:
    """Make shared memory objects as tritonclient does; they are removed when the test has ended."""
    made = []

    def make(size: int, *arrays: Any) -> tuple[Any, str]:
        key = f"/ovmstrio-test-{uuid.uuid4().hex}"
        handle = shm.create_shared_memory_region(key, key, size)
        made.append(handle)
        if arrays:
            shm.set_shared_memory_region(handle, arrays)
        return handle, key

    yield make
    for handle in made:
        try:
            shm.destroy_shared_memory_region(handle)
        except (shm.SharedMemoryException, FileNotFoundError):
            continue


def path_of(key: str) -> Path:
    """Give the file behind a shared memory object."""
    return Path("/dev/shm") / key.removeprefix("/")


def inputs_in(module: Any, name: str, datatype: str = "FP32") -> list[Any]:
    """Describe two inputs that lie one behind the other in a region."""
    tensors = []
    for number, tensor in enumerate(("x", "y")):
        given = module.InferInput(tensor, list(SHAPE), datatype)
        given.set_shared_memory(name, SIZE, offset=number * SIZE)
        tensors.append(given)
    return tensors


def output_in(module: Any, output: str, name: str, size: int = SIZE, offset: int = 0) -> Any:
    """Ask for an output in a region."""
    wanted = module.InferRequestedOutput(output)
    wanted.set_shared_memory(name, size, offset=offset)
    return wanted


def refusal(work: Callable[[], Any]) -> str:
    """Give the text of the error that a call ends with."""
    with pytest.raises(InferenceServerException) as refused:
        work()
    return str(refused.value)


@pytest.mark.parametrize("door", DOORS)
async def test_inputs_and_outputs_may_lie_in_shared_memory(serving: BothDoors, region: Region, door: str) -> None:
    """Outputs are in their region, at their offsets; the answer says where, and has no bytes of them."""
    _, in_key = region(2 * SIZE, X, Y)
    outs, out_key = region(3 * SIZE)

    def work(client: Any, module: Any) -> Any:
        client.register_system_shared_memory("in", in_key, 2 * SIZE)
        client.register_system_shared_memory("out", out_key, 2 * SIZE, offset=SIZE)
        wanted = [output_in(module, "sum", "out"), output_in(module, "difference", "out", offset=SIZE)]
        result = client.infer("sums", inputs_in(module, "in"), outputs=wanted, request_id="7")
        answer = result.get_response(as_json=True) if door == "grpc" else result.get_response()
        return answer, client.get_system_shared_memory_status(**({"as_json": True} if door == "grpc" else {}))

    answer, status = await serving.with_triton(door, work)

    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, SHAPE, SIZE), X + Y)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, SHAPE, 2 * SIZE), X - Y)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, SHAPE), 0)
    assert [each["name"] for each in answer["outputs"]] == ["sum", "difference"]
    assert all("data" not in each and "contents" not in each for each in answer["outputs"])
    told = status["regions"].values() if door == "grpc" else status
    assert {(each["name"], each["key"], int(each["byte_size"])) for each in told} == {
        ("in", in_key, 2 * SIZE),
        ("out", out_key, 2 * SIZE),
    }


@pytest.mark.parametrize("door", DOORS)
async def test_a_request_may_hold_one_tensor_and_have_the_other_in_shared_memory(
    serving: BothDoors, region: Region, door: str
) -> None:
    """Bytes of the request belong to the inputs that are not in a region; outputs may go either way as well."""
    _, key = region(SIZE, Y)
    outs, out_key = region(SIZE)

    def work(client: Any, module: Any) -> Any:
        client.register_system_shared_memory("in", key, SIZE)
        client.register_system_shared_memory("out", out_key, SIZE)
        second = module.InferInput("y", list(SHAPE), "FP32")
        second.set_shared_memory("in", SIZE)
        first = module.InferInput("x", list(SHAPE), "FP32")
        first.set_data_from_numpy(X)
        wanted = [output_in(module, "sum", "out"), module.InferRequestedOutput("difference")]
        return client.infer("sums", [second, first], outputs=wanted).as_numpy("difference")

    np.testing.assert_array_equal(await serving.with_triton(door, work), X - Y)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, SHAPE), X + Y)


@pytest.mark.parametrize("door", DOORS)
async def test_strings_in_shared_memory_stand_behind_their_lengths(
    serving: BothDoors, region: Region, door: str
) -> None:
    """What tritonclient writes of texts is read, and what is written it reads."""
    texts = np.array([b"one", b"", "größe".encode()], object)
    framed = sum(4 + len(text) for text in texts)
    _, key = region(framed, serialize_byte_tensor(texts))
    outs, out_key = region(100)

    def work(client: Any, module: Any) -> None:
        client.register_system_shared_memory("in", key, framed)
        client.register_system_shared_memory("out", out_key, 100)
        given = module.InferInput("strings", [3], "BYTES")
        given.set_shared_memory("in", framed)
        client.infer("strings", [given], outputs=[output_in(module, "strings", "out", 100)])

    await serving.with_triton(door, work)

    assert shm.get_contents_as_numpy(outs, np.object_, [3]).tolist() == texts.tolist()


async def test_an_input_is_a_view_of_its_region(serving: BothDoors, region: Region) -> None:
    """What the client writes after the region was registered is what the server has in its hands."""
    handle, key = region(SIZE, X)
    serving.plane.regions.register("in", key, 0, SIZE)
    view = serving.plane.regions.find("in").view(4, 8)
    assert "system_shared_memory" in extensions_of(serving.plane)

    shm.set_shared_memory_region(handle, [Y])

    assert np.frombuffer(view, np.float32).tolist() == [0.5, 0.5]
    assert view.readonly


@pytest.mark.parametrize("door", DOORS)
async def test_regions_are_forgotten_one_by_one_or_all_at_once(serving: BothDoors, region: Region, door: str) -> None:
    """A name that is not known any more is refused in requests, and may be registered again."""
    _, key = region(2 * SIZE, X, Y)

    def work(client: Any, module: Any) -> tuple[str, str, str]:
        client.unregister_system_shared_memory("never")
        client.register_system_shared_memory("in", key, 2 * SIZE)
        taken = refusal(lambda: client.register_system_shared_memory("in", key, 2 * SIZE))
        client.unregister_system_shared_memory("in")
        client.register_system_shared_memory("in", key, 2 * SIZE)
        client.unregister_system_shared_memory()
        unknown = refusal(lambda: client.infer("sums", inputs_in(module, "in")))
        return taken, unknown, refusal(lambda: client.get_system_shared_memory_status("in"))

    taken, unknown, no_status = await serving.with_triton(door, work)

    assert 'region "in" is registered already; unregister it first' in taken
    assert 'region "in" is not registered' in unknown
    assert "those of CUDA cannot" in unknown
    assert 'region "in" is not registered' in no_status


@pytest.mark.parametrize("door", DOORS)
async def test_cuda_memory_is_refused_by_name(serving: BothDoors, door: str) -> None:
    """Registering says that there is none; the list is empty, and forgetting it all is no error."""

    def work(client: Any, _: Any) -> tuple[str, Any]:
        client.unregister_cuda_shared_memory()
        handle = b"aGFuZGxl"
        status = client.get_cuda_shared_memory_status(**({"as_json": True} if door == "grpc" else {}))
        return refusal(lambda: client.register_cuda_shared_memory("gpu", handle, 0, 64)), status

    text, status = await serving.with_triton(door, work)

    assert "CUDA shared memory is not supported" in text
    assert status in ([], {})


KEYS = {
    "../passwd": "expected a key",
    "/../../etc/passwd": "expected a key",
    "/a/b": "expected a key",
    "": "expected a key",
    "/": "expected a key",
    "..": "expected a key",
    "x" * 300: "expected a key",
    "/ovmstrio-is-not-there": "cannot be opened: No such file",
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("key", KEYS)
async def test_a_key_names_an_object_and_no_other_file(serving: BothDoors, door: str, key: str) -> None:
    """Whatever would lead out of the folder of shared memory is refused, and nothing is opened."""
    text = await serving.with_triton(
        door, lambda client, _: refusal(lambda: client.register_system_shared_memory("in", key, 8))
    )

    assert KEYS[key] in text


@pytest.mark.parametrize("kind", ["a link", "a folder", "a pipe"])
async def test_only_files_in_memory_are_regions(tmp_path: Path, kind: str) -> None:
    """A link that leads elsewhere, a folder and a pipe are refused, and nobody waits for the pipe's other end."""
    (tmp_path / "secret").write_bytes(b"0123456789")
    folder = tmp_path / "memory"
    folder.mkdir()
    makers: dict[str, Callable[[Path], object]] = {
        "a link": lambda path: path.symlink_to(tmp_path / "secret"),
        "a folder": lambda path: path.mkdir(),
        "a pipe": os.mkfifo,
    }
    makers[kind](folder / "thing")
    regions = ClientRegions(is_allowed=True, folder=folder)

    with pytest.raises(ValueError, match=r"cannot be opened|is no shared memory object"):
        regions.register("in", "/thing", 0, 4)
    assert regions.listed() == []


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 0), (0, SIZE + 1), (SIZE, 1), (1, SIZE), (2**64 - 1, 1), (8, 2**64 - 1), (2**63, 2**63)]
)
@pytest.mark.parametrize("door", DOORS)
async def test_a_region_lies_within_its_object(
    serving: BothDoors, region: Region, door: str, offset: int, size: int
) -> None:
    """Sums that overflow 64 bits are as wrong as any other that is too large."""
    _, key = region(SIZE)

    text = await serving.with_triton(
        door, lambda client, _: refusal(lambda: client.register_system_shared_memory("in", key, size, offset=offset))
    )

    assert f"within the {SIZE} bytes of '{key}'" in text


@pytest.mark.parametrize(("offset", "size"), [(SIZE, SIZE + 1), (2**63 - 1, SIZE), (-1, SIZE), (0, -SIZE)])
@pytest.mark.parametrize("door", DOORS)
async def test_a_tensor_lies_within_its_region(
    serving: BothDoors, region: Region, door: str, offset: int, size: int
) -> None:
    """Inputs and outputs beyond the end, or before the begin, of their region are refused."""
    _, key = region(2 * SIZE, X, Y)

    def work(client: Any, module: Any) -> list[str]:
        client.register_system_shared_memory("both", key, 2 * SIZE)
        wrong = inputs_in(module, "both")
        wrong[1].set_shared_memory("both", size, offset=offset)
        wanted = [output_in(module, "sum", "both", size, offset)]
        return [
            refusal(lambda: client.infer("sums", wrong)),
            refusal(lambda: client.infer("sums", inputs_in(module, "both"), outputs=wanted)),
        ]

    for whose, text in zip(("input y", "output sum"), await serving.with_triton(door, work), strict=True):
        assert f'{whose}: shared memory region "both": expected' in text
        assert f"within its {2 * SIZE} bytes" in text


@pytest.mark.parametrize("door", DOORS)
async def test_all_inputs_beyond_their_region_are_told_at_once(serving: BothDoors, region: Region, door: str) -> None:
    """Each by its name."""
    _, key = region(2 * SIZE, X, Y)

    def work(client: Any, module: Any) -> str:
        client.register_system_shared_memory("both", key, 2 * SIZE)
        wrong = inputs_in(module, "both")
        for given in wrong:
            given.set_shared_memory("both", SIZE, offset=2 * SIZE)
        return refusal(lambda: client.infer("sums", wrong))

    first, second = (await serving.with_triton(door, work)).split(". Also: ")
    assert "input x: shared memory region" in first
    assert second.startswith("input y: shared memory region")


@pytest.mark.parametrize("door", DOORS)
async def test_an_output_without_enough_room_is_refused(serving: BothDoors, region: Region, door: str) -> None:
    """The text says how much is needed; nothing is written, not even of another output that has room."""
    _, key = region(2 * SIZE, X, Y)
    outs, out_key = region(2 * SIZE)

    def work(client: Any, module: Any) -> str:
        client.register_system_shared_memory("in", key, 2 * SIZE)
        client.register_system_shared_memory("out", out_key, 2 * SIZE)
        wanted = [output_in(module, "sum", "out"), output_in(module, "difference", "out", SIZE - 4, SIZE)]
        return refusal(lambda: client.infer("sums", inputs_in(module, "in"), outputs=wanted))

    text = await serving.with_triton(door, work)

    assert f"output difference: expected room for {SIZE} bytes" in text
    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, (4, 5)), 0)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("harm", ["cut short", "emptied", "removed"])
async def test_a_region_that_is_taken_away_is_an_error(
    serving: BothDoors, region: Region, door: str, harm: str
) -> None:
    """Its next call is refused, in either direction, and the server serves everybody else."""
    _, key = region(2 * SIZE, X, Y)
    _, good_key = region(2 * SIZE, X, Y)

    def spoil() -> None:
        if harm == "removed":
            path_of(key).unlink()
        else:
            os.truncate(path_of(key), SIZE if harm == "cut short" else 0)

    def work(client: Any, module: Any) -> Any:
        client.register_system_shared_memory("bad", key, 2 * SIZE)
        client.register_system_shared_memory("good", good_key, 2 * SIZE)
        client.infer("sums", inputs_in(module, "bad"))
        spoil()
        texts = [
            refusal(lambda: client.infer("sums", inputs_in(module, "bad"))),
            refusal(lambda: client.infer("sums", inputs_in(module, "good"), outputs=[output_in(module, "sum", "bad")])),
        ]
        return texts, client.infer("sums", inputs_in(module, "good")).as_numpy("sum")

    texts, found = await serving.with_triton(door, work)

    expected = "has been removed; unregister it" if harm == "removed" else "it has become smaller"
    assert [expected in text for text in texts] == [True, True]
    np.testing.assert_array_equal(found, X + Y)


def test_a_region_may_be_unregistered_while_it_is_used(region: Region) -> None:
    """The call that has it goes on over the same memory, which is given back with the last view."""
    handle, key = region(SIZE, X)
    regions = ClientRegions(is_allowed=True)
    regions.register("in", key, 0, SIZE)
    view = regions.find("in").view(0, SIZE)

    regions.unregister("in")
    shm.set_shared_memory_region(handle, [Y])

    assert np.frombuffer(view, np.float32).tolist() == [0.5] * 10
    del view
    # The client's own mapping stays.
    maps = Path("/proc/self/maps").read_text().count(key.removeprefix("/"))
    assert maps == 1


@pytest.mark.parametrize("door", DOORS)
async def test_shared_memory_is_off_unless_it_is_allowed(tmp_path: Path, region: Region, door: str) -> None:
    """Registering and requests say which option turns it on; the list is empty."""
    _, key = region(2 * SIZE, X, Y)
    base = ir.save(ir.sum_of_two((-1, 5)), tmp_path, "sums")

    def work(client: Any, module: Any) -> list[str]:
        client.unregister_system_shared_memory()
        return [
            refusal(lambda: client.register_system_shared_memory("in", key, SIZE)),
            refusal(lambda: client.infer("sums", inputs_in(module, "in"))),
        ]

    async with serving_both([ModelSpec(name="sums", base_path=base)]) as both:
        texts = await both.with_triton(door, work)

    assert not ServerSettings().allow_shared_memory
    assert "system_shared_memory" not in extensions_of(both.plane)
    assert all("--allow_shared_memory turns it on" in text for text in texts)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"shared_memory_region": 5, "shared_memory_byte_size": 8}, "expected the name of a region, got 5"),
        ({"shared_memory_region": "in"}, "needs shared_memory_byte_size"),
        ({"shared_memory_region": "in", "shared_memory_byte_size": "8"}, "expected a whole number of bytes, got '8'"),
        ({"shared_memory_region": "in", "shared_memory_byte_size": True}, "expected a whole number of bytes"),
    ],
)
async def test_what_a_request_says_of_a_region_has_a_form(
    serving: BothDoors, region: Region, parameters: dict[str, Any], expected: str
) -> None:
    """Wrong parameters of an input are told by name."""
    _, key = region(SIZE)
    serving.plane.regions.register("in", key, 0, SIZE)
    tensor = {"name": "x", "shape": SHAPE, "datatype": "FP32", "parameters": parameters}

    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://{serving.http}/v2/models/sums/infer", json={"inputs": [tensor, tensor]})

    assert answer.status_code == 400
    assert expected in answer.json()["error"]


async def test_an_input_has_either_contents_or_a_region(serving: BothDoors, region: Region) -> None:
    """Data besides a region is refused."""
    _, key = region(SIZE)
    serving.plane.regions.register("in", key, 0, SIZE)
    parameters = {"shared_memory_region": "in", "shared_memory_byte_size": SIZE}
    tensor = {"name": "x", "shape": SHAPE, "datatype": "FP32", "parameters": parameters, "data": [1.0] * 10}

    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://{serving.http}/v2/models/sums/infer", json={"inputs": [tensor, tensor]})

    assert (answer.status_code, "it has contents besides shared_memory_region" in answer.text) == (400, True)


def test_only_so_many_regions_are_kept(tmp_path: Path) -> None:
    """One more than there may be is refused; one less has room for another."""
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


async def test_other_machines_register_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may be elsewhere is refused over both doors; with remote administration it is let in as far as its key."""
    monkeypatch.setattr("ovmstrio.api.admin.locality.is_local", lambda _: False)
    texts = {}
    for allowed in (False, True):
        regions = ClientRegions(is_allowed=True, folder=tmp_path)
        async with serving_both([], allows_remote_admin=allowed, regions=regions) as both:
            for door in DOORS:

                def work(client: Any, _: Any) -> str:
                    return refusal(lambda: client.register_system_shared_memory("in", "/nothing", 8))

                texts[door, allowed] = await both.with_triton(door, work)

    assert all("--allow_remote_admin lets other machines do it" in texts[door, False] for door in DOORS)
    assert all("cannot be opened" in texts[door, True] for door in DOORS)


async def test_large_outputs_are_written_besides_the_loop(region: Region) -> None:
    """What takes long to copy is written in a thread, and is whole."""
    from ovmstrio.core.datatypes import BY_NAME
    from ovmstrio.core.request import InferRequest, InferResponse, RequestedOutput
    from ovmstrio.core.tensor import RawTensor, Tensor
    from ovmstrio.dataplane.shared_memory.placed_tensors import output_places, write_outputs

    array = np.arange(2**20, dtype=np.float32)
    outs, key = region(array.nbytes + 4)
    regions = ClientRegions(is_allowed=True)
    regions.register("out", key, 0, array.nbytes + 4)
    parameters: dict[str, Any] = {"shared_memory_region": "out", "shared_memory_byte_size": array.nbytes + 4}
    request = InferRequest("m", outputs=[RequestedOutput("y", parameters)])
    response = InferResponse("m", "1", [Tensor("y", BY_NAME["FP32"], array)])

    with trio.fail_after(WAIT_SECONDS):
        await write_outputs(response, output_places(request, regions))

    np.testing.assert_array_equal(shm.get_contents_as_numpy(outs, np.float32, array.shape), array)
    (tensor,) = response.outputs
    assert isinstance(tensor, RawTensor)
    assert (tensor.data, tensor.place) == (b"", ("out", 0, array.nbytes))


def test_the_plane_has_no_regions_of_its_own() -> None:
    """Each server has its own table, which allows nothing by default."""
    from ovmstrio.registry import Registry

    first, second = DataPlane(Registry({})), DataPlane(Registry({}))
    assert first.regions is not second.regions
