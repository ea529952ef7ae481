from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import trio
from tritonclient.utils import InferenceServerException

from ovmstrio.config.specs import BatchingSpec, ModelSpec, ShapeSpec
from ovmstrio.core.tensor import Dim
from ovmstrio.models.loading import load_model
from ovmstrio.telemetry.log_levels import LogLevel
from ovmstrio.telemetry.logs import configure_logs
from tests.support import ir
from tests.support.api_clients import INTERFACES, BothInterfaces, serving_both
from tests.support.servables import EXACT

X = np.array([[0.5, 3.0, -1.0, 2.0], [9.0, 1.0, np.nan, 7.25]], np.float32)


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[BothInterfaces]:
    """Serve a model with labels for three of its four classes, one without any, and one of integers."""
    bases = {
        "labelled": ir.save(ir.passthrough("FP32", (2, 4)), tmp_path, "labelled"),
        "plain": ir.save(ir.passthrough("FP32", (2, 4)), tmp_path, "plain"),
        "integers": ir.save(ir.passthrough("INT32", (4,)), tmp_path, "integers"),
        "strings": ir.save(ir.string_passthrough(), tmp_path, "strings"),
    }
    (bases["labelled"] / "labels.txt").write_text("cat\ndog\ncow\n")
    specs = [ModelSpec(name=name, base_path=base, plugin_config=EXACT) for name, base in bases.items()]
    async with serving_both(specs) as both:
        yield both


async def classify(serving: BothInterfaces, interface: str, model: str, array: Any, count: int) -> Any:
    def work(client: Any, module: Any) -> Any:
        known = client.get_model_metadata(model, **({"as_json": True} if interface == "grpc" else {}))
        (given,), (wanted,) = known["inputs"], known["outputs"]
        tensor = module.InferInput(given["name"], list(array.shape), given["datatype"])
        tensor.set_data_from_numpy(array)
        outputs = [module.InferRequestedOutput(wanted["name"], class_count=count)]
        return client.infer(model, [tensor], outputs=outputs).as_numpy(wanted["name"])

    return await serving.with_triton(interface, work)


@pytest.mark.parametrize("interface", INTERFACES)
async def test_the_largest_elements_of_each_row_have_index_and_label(serving: BothInterfaces, interface: str) -> None:
    found = await classify(serving, interface, "labelled", X, 2)
    assert found.tolist() == [[b"3.000000:1:dog", b"2.000000:3"], [b"9.000000:0:cat", b"7.250000:3"]]


@pytest.mark.parametrize("interface", INTERFACES)
async def test_classes_without_labels_have_indices(serving: BothInterfaces, interface: str) -> None:
    plain = await classify(serving, interface, "plain", X, 1)
    integers = await classify(serving, interface, "integers", np.array([3, -7, 12, 0], np.int32), 9)
    assert plain.tolist() == [[b"3.000000:1"], [b"9.000000:0"]]
    assert integers.tolist() == [b"12:2", b"3:0", b"0:3", b"-7:1"]


@pytest.mark.parametrize("interface", INTERFACES)
async def test_equal_elements_are_ranked_by_index(serving: BothInterfaces, interface: str) -> None:
    rows = np.array([[0, 0, 0, 0], [1, np.nan, -np.inf, 1]], np.float32)
    found = await classify(serving, interface, "plain", rows, 3)
    integers = await classify(serving, interface, "integers", np.array([7, 9, 9, 7], np.int32), 4)
    expected = [[b"0.000000:0", b"0.000000:1", b"0.000000:2"], [b"1.000000:0", b"1.000000:3", b"nan:1"]]
    assert found.tolist() == expected
    assert integers.tolist() == [b"9:1", b"9:2", b"7:0", b"7:3"]


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize(
    ("model", "array", "count", "text"),
    [
        ("strings", np.array([b"a"], object), 1, "classification needs numbers, and this is BYTES"),
        ("plain", X, -1, "expected a number of classes"),
    ],
)
async def test_invalid_classifications_are_refused(
    serving: BothInterfaces, interface: str, model: str, array: Any, count: int, text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text):
        await classify(serving, interface, model, array, count)


@pytest.mark.parametrize("interface", INTERFACES)
async def test_traces_can_be_turned_off_but_not_on(serving: BothInterfaces, interface: str) -> None:
    options = {"as_json": True} if interface == "grpc" else {}

    def work(client: Any, _: Any) -> Any:
        found = [
            client.get_trace_settings(**options),
            client.update_trace_settings(model_name="plain", settings={"trace_level": ["OFF"]}, **options),
        ]
        refusal = r"Triton traces are not supported.*/v2/models/stats, /metrics"
        for settings in ({"trace_level": ["TIMESTAMPS"]}, {"trace_rate": "1"}):
            with pytest.raises(InferenceServerException, match=refusal):
                client.update_trace_settings(settings=settings)
        return [each["settings"] if interface == "grpc" else each for each in found]

    for settings in await serving.with_triton(interface, work):
        level = settings["trace_level"]
        assert (level["value"] if interface == "grpc" else level) == ["OFF"]


@pytest.mark.parametrize("interface", INTERFACES)
async def test_the_server_name_is_configurable(interface: str) -> None:
    async with serving_both([], server_name="triton") as both:
        metadata = await both.with_triton(interface, lambda client, _: client.get_server_metadata())
    assert (metadata["name"] if interface == "http" else metadata.name) == "triton"


@pytest.fixture
async def empty() -> AsyncIterator[BothInterfaces]:
    async with serving_both([]) as both:
        yield both


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    configure_logs(level="INFO", fmt="json", path=path)
    return path


async def _settings_of(serving: BothInterfaces, interface: str, method: str, *arguments: Any) -> dict[str, Any]:
    options = {"as_json": True} if interface == "grpc" else {}
    found = await serving.with_triton(interface, lambda client, _: getattr(client, method)(*arguments, **options))
    settings = found.get("settings", found)
    return {name: next(iter(one.values())) if isinstance(one, dict) else one for name, one in settings.items()}


async def _change(serving: BothInterfaces, interface: str, settings: dict[str, Any]) -> dict[str, Any]:
    return await _settings_of(serving, interface, "update_log_settings", settings)


async def _present(serving: BothInterfaces, interface: str) -> dict[str, Any]:
    return await _settings_of(serving, interface, "get_log_settings")


def _events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def _defaults(path: Path) -> dict[str, Any]:
    levels = {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0}
    return {"log_file": str(path), "log_format": "ISO8601", "log_levels": "", **levels}


async def test_log_levels_of_parts_are_set_by_logger_name(empty: BothInterfaces, log: Path) -> None:
    interface = "http"  # The gRPC client of Triton can send no text.
    ours, others = (logging.getLogger(f"ovmstrio.{name}.tested") for name in ("graphs", "ops"))
    try:
        changed = await _change(empty, interface, {"log_levels": "ovmstrio.graphs=debug"})
        assert changed["log_levels"] == "ovmstrio.graphs=debug"
        ours.debug("of graphs")
        others.debug("of ops")
        with pytest.raises(InferenceServerException, match="expected one of TRACE"):
            await _change(empty, interface, {"log_levels": "ovmstrio.graphs=loud"})
    finally:
        await _change(empty, interface, {"log_levels": ""})
    ours.debug("of graphs again")
    assert [event for event in _events(log) if event.startswith("of ")] == ["of graphs"]


@pytest.mark.parametrize("interface", INTERFACES)
async def test_log_levels_are_reported_and_change_for_existing_loggers(
    empty: BothInterfaces, interface: str, log: Path
) -> None:
    ours, theirs = structlog.get_logger("ours"), logging.getLogger("theirs")

    def write(word: str) -> None:
        ours.debug(f"{word} ours")
        theirs.debug(f"{word} theirs")
        ours.error(f"{word} error")

    assert await _present(empty, interface) == _defaults(log)
    write("first")
    changed = await _change(empty, interface, {"log_verbose_level": 2})
    assert (changed["log_verbose_level"], changed["log_info"]) == (1, True)
    write("second")
    changed = await _change(empty, interface, {"log_info": False})
    assert [changed[f"log_{level}"] for level in ("verbose_level", "info", "warning", "error")] == [
        0,
        False,
        True,
        True,
    ]
    write("third")
    changed = await _change(empty, interface, {"log_error": False, "log_warning": False})
    assert changed["log_error"] is False
    write("fourth")

    wanted = {
        f"{word} {kind}" for word in ("first", "second", "third", "fourth") for kind in ("ours", "theirs", "error")
    }
    assert [event for event in _events(log) if event in wanted] == [
        "first error",
        "second ours",
        "second theirs",
        "second error",
        "third error",
    ]


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"log_file": "/tmp/elsewhere.log"}, "fixed at start by --log-path"),
        ({"log_format": "default"}, "fixed at start by --log-format"),
        ({"log_warning": False, "log_info": True}, "log_warning cannot be off while log_info is on"),
        ({"log_infos": True}, "log_infos not known, expected some of log_file, log_info"),
        ({"log_info": None}, "log_info: expected true or false, got None"),
        ({"log_verbose_level": None}, "log_verbose_level: expected an integer, 0 for none, got None"),
    ],
)
async def test_invalid_log_settings_are_refused_by_name_and_change_nothing(
    empty: BothInterfaces, interface: str, log: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text):
        await _change(empty, interface, {"log_error": True, **settings})
    assert await _present(empty, interface) == _defaults(log)


@pytest.mark.parametrize("interface", INTERFACES)
async def test_the_log_of_an_embedding_program_is_not_changed(
    empty: BothInterfaces, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ovmstrio.protocols.kserve.extensions.LOG_LEVEL", LogLevel())
    with pytest.raises(InferenceServerException, match="belong to the embedding program"):
        await _change(empty, interface, {"log_info": False})


@pytest.fixture
async def interfaces(tmp_path: Path) -> AsyncIterator[BothInterfaces]:
    """Serve one model for each kind of batch."""

    def spec(name: str, model: Any, **more: Any) -> ModelSpec:
        return ModelSpec(name=name, base_path=ir.save(model, tmp_path, name), plugin_config=EXACT, **more)

    specs = [
        spec("fixed", ir.dummy()),
        spec("open", ir.dynamic()),
        spec("bounded", ir.dummy(), shapes={"b": ShapeSpec(dims=(Dim(1, 8), Dim.fixed(10)))}),
        spec("joined", ir.dynamic(), batching=BatchingSpec(max_batch_size=16, batch_timeout_ms=1)),
        spec("sums", ir.accumulator(), stateful=True),
    ]
    async with trio.open_nursery() as tasks:
        async with serving_both(specs, load=partial(load_model, tasks=tasks)) as both:
            yield both
        tasks.cancel_scope.cancel()


async def _config(interfaces: BothInterfaces, name: str) -> dict[str, Any]:
    """Return the configuration over REST, which must equal that over gRPC."""
    document: dict[str, Any] = (await interfaces.request("GET", f"/v2/models/{name}/config")).json()
    found = (await interfaces.with_triton("grpc", lambda client, _: client.get_model_config(name))).config
    assert (found.name, found.platform, found.backend) == (name, document["platform"], document["backend"])
    assert found.max_batch_size == document["max_batch_size"]
    for grpc, rest in ((found.input, document["input"]), (found.output, document["output"])):
        assert [(each.name, list(each.dims)) for each in grpc] == [(each["name"], each["dims"]) for each in rest]
    assert found.WhichOneof("scheduling_choice") == next((key for key in document if key.endswith("batching")), None)
    return document


@pytest.mark.parametrize(
    ("name", "rows", "dims"),
    [("fixed", 0, [1, 10]), ("open", 65_536, [-1]), ("bounded", 8, [10]), ("joined", 16, [-1])],
)
async def test_an_open_batch_is_not_part_of_the_dims(
    interfaces: BothInterfaces, name: str, rows: int, dims: list[int]
) -> None:
    config = await _config(interfaces, name)
    assert config["max_batch_size"] == rows
    assert [each["dims"] for each in config["input"] + config["output"]] == [dims, dims]


async def test_batching_and_sequences_are_part_of_the_configuration(interfaces: BothInterfaces) -> None:
    assert (await _config(interfaces, "joined"))["dynamic_batching"] == {"preferred_batch_size": [16]}
    assert "sequence_batching" in await _config(interfaces, "sums")
    assert not {"dynamic_batching", "sequence_batching", "model_transaction_policy"} & set(
        await _config(interfaces, "fixed")
    )


async def test_statistics_count_successes_failures_and_times(interfaces: BothInterfaces) -> None:
    def calls(client: Any, module: Any) -> Any:
        for width in (10, 10, 3):
            given = module.InferInput("b", [1, width], "FP32")
            given.set_data_from_numpy(np.ones((1, width), np.float32))
            try:
                client.infer("fixed", [given])
            except InferenceServerException:
                assert width == 3
        return client.get_inference_statistics("fixed").model_stats

    (model,) = await interfaces.with_triton("grpc", calls)
    counted = model.inference_stats
    assert (model.name, model.version, model.inference_count, model.execution_count) == ("fixed", "1", 2, 2)
    assert (counted.success.count, counted.fail.count, counted.compute_infer.count) == (2, 1, 2)
    parts = counted.queue.ns + counted.compute_input.ns + counted.compute_infer.ns + counted.compute_output.ns
    assert 0 < counted.compute_infer.ns <= parts <= counted.success.ns + 4
    assert model.last_inference > 1_700_000_000_000
    documents = (await interfaces.request("GET", "/v2/models/stats")).json()["model_stats"]
    assert {each["name"]: each["inference_count"] for each in documents} == {
        "fixed": 2, "open": 0, "bounded": 0, "joined": 0, "sums": 0,
    }  # fmt: skip
    for path in ("/v2/models/fixed/stats", "/v2/models/fixed/versions/1/stats"):
        (document,) = (await interfaces.request("GET", path)).json()["model_stats"]
        assert document["inference_stats"]["success"] == {"count": 2, "ns": counted.success.ns}


async def test_statistics_of_a_version_that_is_not_a_number_are_refused(interfaces: BothInterfaces) -> None:
    def call(client: Any, _: Any) -> list[str]:
        statuses = []
        for name in ("fixed", ""):
            with pytest.raises(InferenceServerException) as caught:
                client.get_inference_statistics(name, "last")
            statuses.append(str(caught.value.status()))
        return statuses

    assert await interfaces.with_triton("grpc", call) == ["StatusCode.INVALID_ARGUMENT"] * 2
