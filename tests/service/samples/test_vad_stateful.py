"""The stateful voice activity detector: what its client makes of probabilities, and real speech through a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from platformdirs import user_cache_path

from ovmstrio.client import open_client
from ovmstrio_samples.catalog import BY_NAME
from ovmstrio_samples.preparing import prepare_sample
from ovmstrio_samples.vad_stateful.client import EXPECTED, RECORDING, passages, read_recording, speech
from tests.support.served_in_thread import serving_in_thread

_CHUNK = 512
_CACHE = user_cache_path("ovmstrio") / "wheels"


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([], []),
        ([0.4] * 40, []),
        ([0.9] * 7, []),  # 224 ms are too short
        ([0.9] * 8, [(0, 8 * _CHUNK)]),
        ([0.1] * 4 + [0.9] * 10 + [0.1] * 9, [(4 * _CHUNK - 480, 14 * _CHUNK + 480)]),
        ([0.9] * 10 + [0.1] * 4 + [0.9] * 10, [(0, 24 * _CHUNK)]),  # the fifth quiet chunk makes a silence
        ([0.9] * 10 + [0.4] * 30 + [0.1] * 9, [(0, 40 * _CHUNK + 480)]),  # doubt goes on with what was
        ([0.9] * 10 + [0.1] * 5 + [0.9] * 10, [(0, 10 * _CHUNK + 480), (15 * _CHUNK - 480, 25 * _CHUNK)]),
    ],
)
def test_passages_follow_the_probabilities(probabilities: list[float], expected: list[tuple[int, int]]) -> None:
    """Silences and passages have a least length, and passages a margin."""
    assert passages(probabilities, len(probabilities) * _CHUNK) == expected


@given(st.lists(st.floats(0, 1), max_size=80))
def test_passages_lie_apart_and_within_the_recording(probabilities: list[float]) -> None:
    """Whatever the probabilities are."""
    length = len(probabilities) * _CHUNK
    edges = [edge for passage in passages(probabilities, length) for edge in passage]
    assert edges == sorted(edges)
    assert not edges or (edges[0] >= 0 and edges[-1] <= length)


def test_the_configuration_serves_it_with_sequences() -> None:
    """What `config.json` says of the sample."""
    entry = {"name": "vad_stateful", "base_path": "vad_stateful", "stateful": True}
    assert BY_NAME["vad_stateful"].config() == {"model_config_list": [{"config": entry}]}


@pytest.mark.slow
@pytest.mark.parametrize("rest", [False, True], ids=["grpc", "rest"])
def test_real_speech_is_found_where_the_package_finds_it(tmp_path: Path, rest: bool) -> None:
    """Chunk by chunk through a sequence, the passages are those of the package's own function."""
    sample = BY_NAME["vad_stateful"]
    for wheel in (sample.wheel, RECORDING):
        if wheel is None or not (_CACHE / wheel.filename).is_file():
            pytest.skip("not in the cache: ovms prepare --sample vad_stateful, and the sample's client")
    prepare_sample(sample, tmp_path, 1, _CACHE)
    sound = read_recording(_CACHE)
    options = {"model_name": "vad_stateful", "model_path": tmp_path / "vad_stateful", "stateful": True}
    with serving_in_thread(**options) as server, open_client(server.rest if rest else server.grpc, rest=rest) as client:
        assert passages(speech(client.infer, sound), len(sound)) == EXPECTED
        left = speech(client.infer, sound)
        next(left)
        listed = server.ask("GET", "/v2/models/vad_stateful/sequences").json()["sequences"]
        assert [each["requests"] for each in listed] == [1]
        left.close()
        assert server.ask("GET", "/v2/models/vad_stateful/sequences").json() == {"sequences": []}
