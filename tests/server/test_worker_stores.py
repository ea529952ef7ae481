"""Where several processes keep their sequences, and which of them has which."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.models.sequences import Control, SequenceManager
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


async def test_ids_that_are_given_are_the_process_s_own() -> None:
    """They ascend, and no other process gives the same."""
    given_ids = []
    for row in range(3):
        manager = SequenceManager("m", 1, ())
        manager.is_own = lambda number, row=row: owner_of(number, 3) == row  # type: ignore[misc]  # the loop's own
        ids = [int(manager.admit(Control(0, start=True), by_default=True).id) for _ in range(20)]
        assert ids == sorted(ids)
        assert {owner_of(each, 3) for each in ids} == {row}
        given_ids += ids
    assert len(set(given_ids)) == 60
