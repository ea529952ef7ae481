"""Small things that scripts import: names and numbers in order, and free ports."""

from __future__ import annotations

import itertools

from ovmstrio.ops.config_file import is_free

__all__ = ["AvailablePortGenerator", "GetAvailablePortGenerator", "NameGenerator"]


class NameGenerator:
    """Gives ``<prefix>0``, ``<prefix>1`` and so on."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers = itertools.count()

    def next(self) -> str:
        """Give the next name."""
        return f"{self._prefix}{next(self._numbers)}"


class AvailablePortGenerator:
    """Gives ports on which nobody listens, none of them twice."""

    def __init__(self, start_port: int = 12000) -> None:
        self._ports = itertools.count(start_port)

    @staticmethod
    def port_is_available(port: int) -> bool:
        """Tell whether nobody listens on a port."""
        return is_free(port)

    def next(self) -> int:
        """Give the next free port."""
        return next(port for port in self._ports if is_free(port))


_ports = AvailablePortGenerator()


def GetAvailablePortGenerator() -> AvailablePortGenerator:  # noqa: N802 - the name that scripts import
    """Give the generator that all share."""
    return _ports
