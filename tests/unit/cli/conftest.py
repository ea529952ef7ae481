"""Fixtures of tests of commands that need no server."""

from __future__ import annotations

from tests.support.commands import command_folder

__all__ = ["command_folder"]
