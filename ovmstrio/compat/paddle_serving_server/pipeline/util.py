"""Generators of names and free ports."""

from __future__ import annotations

import itertools

from ovmstrio.ops.config_file import is_port_free

__all__ = ["AvailablePortGenerator", "GetAvailablePortGenerator", "NameGenerator"]


class NameGenerator:
    """Generator of ``<prefix>0``, ``<prefix>1`` and so on."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers = itertools.count()

    def next(self) -> str:
        """Return the next name."""
        return f"{self._prefix}{next(self._numbers)}"


class AvailablePortGenerator:
    """Generator of distinct free ports."""

    def __init__(self, start_port: int = 12000) -> None:
        self._ports = itertools.count(start_port)

    @staticmethod
    def port_is_available(port: int) -> bool:
        """Return whether a port is free."""
        return is_port_free(port)

    def next(self) -> int:
        """Return the next free port."""
        return next(port for port in self._ports if is_port_free(port))


_ports = AvailablePortGenerator()


def GetAvailablePortGenerator() -> AvailablePortGenerator:  # noqa: N802 - the name that scripts import
    """Return the shared generator."""
    return _ports
