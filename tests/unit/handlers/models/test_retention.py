from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.runtimes.handlers.models.tree import ModelKey
from ovmstrio.runtimes.handlers.models.watching import keep_latest

_KEYS = st.frozensets(st.builds(ModelKey, st.sampled_from("ab"), st.integers(1, 12).map(str)), max_size=12)


def _keys(text: str) -> frozenset[ModelKey]:
    return frozenset(ModelKey("m", version) for version in text.split())


@pytest.mark.parametrize(
    ("count", "broken", "loaded", "kept"),
    [
        (1, "", "", "10"),
        (2, "", "", "10 9"),
        (9, "", "", "10 9 2 1"),
        (1, "10", "", "10 9"),
        (1, "10 9 2 1", "", "10 9 2 1"),
        (1, "", "9", "10 9"),
        (1, "", "9 10", "10"),
        (1, "", "2 1", "10 2"),
        (2, "9", "1", "10 9 2 1"),
    ],
)
def test_the_highest_versions_are_kept(count: int, broken: str, loaded: str, kept: str) -> None:
    """Broken ones take nobody's place, and the one that serves stays until a higher one can."""
    found = keep_latest(_keys("1 2 9 10"), count, broken=_keys(broken), loaded=_keys(loaded))
    assert found == _keys(kept)


@given(_KEYS, st.integers(1, 4), _KEYS, _KEYS)
def test_something_of_each_model_stays(
    keys: frozenset[ModelKey], count: int, broken: frozenset[ModelKey], loaded: frozenset[ModelKey]
) -> None:
    """The highest version always does, and of those that are good or in use enough to go on with."""
    kept = keep_latest(keys, count, broken=broken, loaded=loaded)
    assert kept <= keys
    for name in {key.name for key in keys}:
        those = {key for key in keys if key.name == name}
        assert max(those, key=lambda key: int(key.version)) in kept
        assert len(kept & those - broken) >= min(count, len(those - broken))
        assert bool(kept & those & loaded) == bool(those & loaded)
