"""Outputs that a call asks for by name, through the data plane."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from ovmstrio.api.doors import KSERVE_GRPC
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import SEQUENCE_ID, InferRequest, InferResponse, RequestedOutput, ServableMetadata
from ovmstrio.core.tensor import Tensor, TensorSpec
from ovmstrio.dataplane.plane import DataPlane
from tests.support.stub_registry import registry_of


class Several:
    """Answers with what it was made for, and counts its calls."""

    def __init__(self, name: str, declared: tuple[str, ...], answered: tuple[str, ...]) -> None:
        specs = tuple(TensorSpec(each, BY_NAME["FP32"], ()) for each in declared)
        self.metadata = ServableMetadata(name, "OpenVINO", (), specs)
        self._answered = answered
        self.calls = 0

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer every output with its own position."""
        self.calls += 1
        await trio.lowlevel.checkpoint()
        outputs = [Tensor(name, BY_NAME["FP32"], np.array(at, np.float32)) for at, name in enumerate(self._answered)]
        return InferResponse(request.model_name, "1", [*outputs], request.id)

    async def aclose(self) -> None:
        """Do nothing."""
        await trio.lowlevel.checkpoint()


async def _asked(nursery: trio.Nursery, tmp_path: Path, servable: Several, *wanted: str) -> list[tuple[str, float]]:
    async def load(spec: ModelSpec, version: int, directory: Path) -> Several:
        return servable

    registry = registry_of(load, poll_seconds=0)
    await nursery.start(registry.run)
    (tmp_path / "m" / "1").mkdir(parents=True)
    await registry.apply([ModelSpec(name="m", base_path=tmp_path / "m")])
    request = InferRequest("m", outputs=[RequestedOutput(name) for name in wanted])
    response = await DataPlane(registry).infer(request, KSERVE_GRPC)
    return [(each.name, float(each.array)) for each in response.outputs if isinstance(each, Tensor)]


NAMES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("wanted", "answered"),
    [((), ["a", "b", "c"]), (("c", "a"), ["c", "a"]), (("b", "b"), ["b"])],
    ids=["none", "some in another order", "one twice"],
)
async def test_what_is_named_is_answered_in_that_order(
    nursery: trio.Nursery, tmp_path: Path, wanted: tuple[str, ...], answered: list[str]
) -> None:
    """Without a name there are all outputs; values stay with their names."""
    found = await _asked(nursery, tmp_path, Several("m", NAMES, NAMES), *wanted)
    assert found == [(name, float(NAMES.index(name))) for name in answered]


async def test_an_unknown_name_is_refused_before_the_call(nursery: trio.Nursery, tmp_path: Path) -> None:
    """The call may change the state of a sequence; the refusal lists what there is."""
    servable = Several("m", NAMES, NAMES)
    with pytest.raises(InvalidRequest) as caught:
        await _asked(nursery, tmp_path, servable, "a", "nope")
    assert caught.value.message == "requested outputs: expected some of a, b, c, got nope"
    assert servable.calls == 0


async def test_a_name_that_an_open_answer_lacks_is_refused(nursery: trio.Nursery, tmp_path: Path) -> None:
    """Where nobody can say before what will be answered, the answer tells."""
    with pytest.raises(InvalidRequest, match=r"^requested outputs: expected some of a, got b$"):
        await _asked(nursery, tmp_path, Several("m", (), ("a",)), "b")


async def test_the_id_of_a_sequence_is_no_output_where_there_are_none(nursery: trio.Nursery, tmp_path: Path) -> None:
    """A model without sequences refuses it as any other name that it has not."""
    with pytest.raises(InvalidRequest, match=r"^requested outputs: expected some of y, got sequence_id$"):
        await _asked(nursery, tmp_path, Several("m", ("y",), ("y",)), SEQUENCE_ID)


async def test_the_id_of_a_sequence_is_always_answered(nursery: trio.Nursery, tmp_path: Path) -> None:
    """Its client needs it to go on, asked for or not."""
    servable = Several("m", ("y", "z"), ("y", "z", SEQUENCE_ID))
    assert await _asked(nursery, tmp_path, servable, "z") == [("z", 1.0), (SEQUENCE_ID, 2.0)]
