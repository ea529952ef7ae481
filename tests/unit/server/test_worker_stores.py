"""Where several processes keep their sequences, and how ids are shared out among servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.models.sequences.owners import owner_of
from ovmstrio.server.workers.stores import check_store, part_of_store


def test_what_another_number_of_processes_has_kept_is_not_left_behind(tmp_path: Path) -> None:
    """The number is told; an empty folder, and one's own, are good."""
    check_store(tmp_path / "none", 2)
    for row in range(2):
        part = part_of_store(tmp_path, row, 2)
        part.mkdir()
        (part / "sequences.bin").touch()
    check_store(tmp_path, 2)
    for rows in (1, 3):
        with pytest.raises(ConfigError, match="--workers 2"):
            check_store(tmp_path, rows)


def test_what_one_process_has_kept_is_for_one(tmp_path: Path) -> None:
    """Its file lies in the folder itself."""
    (tmp_path / "sequences.bin").touch()
    check_store(tmp_path, 1)
    with pytest.raises(ConfigError, match="--workers 1"):
        check_store(tmp_path, 2)


@given(st.integers(1, 2**64 - 1) | st.text(min_size=1, max_size=256), st.integers(1, 64))
def test_each_id_has_one_owner(identity: int | str, processes: int) -> None:
    """Of those that there are, and always the same."""
    found = owner_of(identity, processes)
    assert 0 <= found < processes
    assert owner_of(identity, processes) == found


def test_ids_that_follow_each_other_are_spread() -> None:
    """No process has none of them, nor most."""
    owners = [owner_of(identity, 4) for identity in range(1, 1001)]
    assert all(200 < owners.count(row) < 300 for row in range(4))
