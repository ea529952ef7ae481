"""The registry with the loader and the models that it really has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.tensor import Tensor
from ovmstrio.registry import Registry, VersionState
from ovmstrio.runtimes.models.load_model import load_model
from tests.support import ir
from tests.support.stub_registry import registry_of, running


def _spec(base: Path, nireq: int = 1) -> ModelSpec:
    return ModelSpec(name="m", base_path=base, nireq=nireq, plugin_config={"INFERENCE_PRECISION_HINT": "f32"})


def _request(name: str = "m") -> InferRequest:
    data = np.arange(10, dtype=np.float32)
    return InferRequest(name, inputs=[InferInput("b", "FP32", (1, 10))], raw_inputs=[data.tobytes()])


async def _infer(registry: Registry) -> tuple[str, list[float]]:
    with await registry.lease("m") as lease:
        response = await lease.servable.infer(_request())
    (output,) = response.outputs
    assert isinstance(output, Tensor)
    return response.model_version, output.array.ravel().tolist()


async def test_models_are_swapped_under_load_and_a_corrupt_version_is_reported(tmp_path: Path) -> None:
    base = ir.save(ir.dummy(), tmp_path, "m")
    expected = [float(value + 1) for value in range(10)]
    versions: set[str] = set()
    async with running(registry_of(load_model, poll_seconds=0)) as registry:
        assert (await registry.apply([_spec(base)])).failures == ()

        async def call_for_ever() -> None:
            while True:
                version, values = await _infer(registry)
                assert values == expected
                versions.add(version)
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as clients:
            for _ in range(3):
                clients.start_soon(call_for_ever)
            ir.save(ir.dummy(), tmp_path, "m", version=2)
            assert (await registry.rescan()).changed
            assert (await registry.apply([_spec(base, nireq=2)])).changed
            corrupt = base / "3"
            corrupt.mkdir()
            (corrupt / "model.xml").write_text("<net")
            (corrupt / "model.bin").touch()
            (failure,) = (await registry.rescan()).failures
            clients.cancel_scope.cancel()
        assert (failure.version, failure.state, failure.error_code) == (3, VersionState.LOADING, "UNKNOWN")
        assert "model.xml" in failure.reason
        assert registry.available_versions("m") == [2]
        (base / "2" / "model.xml").unlink()
        await registry.rescan()
        assert await _infer(registry) == ("2", expected)
    assert versions == {"1", "2"}


async def test_a_single_model_file_is_served_as_version_one(tmp_path: Path) -> None:
    base = ir.save(ir.dummy(), tmp_path, "m")
    async with running(registry_of(load_model, poll_seconds=0)) as registry:
        result = await registry.apply([_spec(base / "1" / "model.xml")])
        assert result.failures == ()
        assert (await _infer(registry))[0] == "1"
