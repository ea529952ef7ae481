"""What browsers let pages of other origins do with this server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ovmstrio.core.http import Headers

__all__ = ["Cors"]


@dataclass(frozen=True, slots=True)
class Cors:
    """What browsers of other origins may do; ``origins`` are separated by commas, or ``*``."""

    origins: str
    methods: str = "*"
    headers: str = "*"
    credentials: bool = False

    def response_headers(self, origin: str) -> Headers:
        """Give the headers that go with an answer to a page of this origin, which may be empty.

        Browsers take one origin or ``*``, so of several the one that asks is named.
        """
        is_any = self.origins == "*"
        vary: Headers = () if is_any else (("vary", "Origin"),)
        if not is_any and origin not in {each.strip() for each in self.origins.split(",")}:
            return vary
        credentials: Headers = (("access-control-allow-credentials", "true"),) if self.credentials else ()
        return (
            *vary,
            ("access-control-allow-origin", "*" if is_any else origin),
            ("access-control-allow-methods", self.methods),
            ("access-control-allow-headers", self.headers),
            *credentials,
        )
