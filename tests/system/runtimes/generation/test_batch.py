"""Texts that join a batch that runs, with the library's cache of prefixes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def _found(folder: Path, case: str) -> object:
    """Run a case in a process of its own, which the library keeps busy."""
    command = [sys.executable, "-m", "tests.support.batch_cases", str(folder), case]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    return json.loads(done.stdout)


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
def test_texts_are_what_they_are_alone(tiny_folder: Path, case: str) -> None:
    """Whatever their prompts have in common, whoever joins or leaves."""
    assert _found(tiny_folder, case) == 0


def test_only_texts_that_would_disturb_each_other_wait_for_each_other(tiny_folder: Path) -> None:
    """Four strangers start in one step, one of four that compute the same beginning, and all four once it is cached."""
    assert _found(tiny_folder, "that_start_together") == [4, 1, 4]


def test_one_that_is_given_up_reads_its_prompt_to_the_end_and_writes_nothing(tiny_folder: Path) -> None:
    """The other one, which writes already, is out of the batch at once."""
    assert _found(tiny_folder, "given_up") == [1, 0, 0]
