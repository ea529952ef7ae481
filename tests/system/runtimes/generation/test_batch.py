"""Texts that join a batch that runs, with the library's cache of prefixes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def found(tiny_folder: Path) -> dict[str, Any]:
    """Run all cases in one process of its own, which the library keeps busy."""
    command = [sys.executable, "-m", "tests.support.batch_cases", str(tiny_folder)]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize(
    "case",
    [
        "that_begin_alike",
        "behind_a_long_prompt",
        "of_a_prompt_given_up",
        "that_go_on_from_beams",
        "that_begin_like_beams",
    ],
)
def test_texts_are_what_they_are_alone(found: dict[str, Any], case: str) -> None:
    """Whatever their prompts have in common, whoever joins or leaves."""
    assert found[case] == 0


def test_only_texts_that_would_disturb_each_other_wait_for_each_other(found: dict[str, Any]) -> None:
    """Four strangers start in one step, one of four that compute the same beginning, and all four once it is cached."""
    assert found["that_start_together"] == [4, 1, 4]


def test_one_that_is_given_up_reads_its_prompt_to_the_end_and_writes_nothing(found: dict[str, Any]) -> None:
    """The other one, which writes already, is out of the batch at once."""
    assert found["given_up"] == [1, 0, 0]
