"""How a process came to its end, in words."""

from __future__ import annotations

import signal

import pytest

from ovmstrio.work.processes.program import describe_exit, signal_name


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended the process with exit code 3"),
        (-signal.SIGSEGV, "crashed with SIGSEGV"),
        (-40, "crashed with signal 40"),
    ],
    ids=["code", "signal", "real-time"],
)
def test_an_exit_code_is_put_into_words(code: int, words: str) -> None:
    """One below 0 is a signal, which need not have a name."""
    assert describe_exit(code) == words


def test_a_signal_has_its_name() -> None:
    """As a system's manual has it."""
    assert signal_name(9) == "SIGKILL"
