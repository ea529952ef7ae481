"""Where something is configured, so that what is wrong with it can be told with file and line."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ovmstrio.config.located import Located
from ovmstrio.core.errors import Problem

__all__ = ["Place"]


class Place(NamedTuple):
    """The file, and the settings in it."""

    file: str
    settings: Located

    def of(self, problem: Problem) -> Problem:
        """Point a problem, whose path is that of an option, at where the option is written."""
        at = self.settings.find(*problem.path.split("."))
        return replace(problem, file=self.file, line=at.line, path=at.path)
