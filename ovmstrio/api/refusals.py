"""What OVMS says to requests that nothing answers, in the form of every error of the server's own paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import InvalidRequest, MethodNotAllowed
from ovmstrio.wire.http.answers import error_answer

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpAnswer

__all__ = ["INVALID_URL", "UNSUPPORTED_METHOD", "OvmsRefusals"]

INVALID_URL: Final = "Invalid request URL"
UNSUPPORTED_METHOD: Final = "Unsupported method"


class OvmsRefusals:
    """The refusals of a server that speaks as OVMS."""

    def no_path(self, method: str, path: str) -> HttpAnswer:
        """Answer for a path that there is not."""
        return error_answer(InvalidRequest(f"{INVALID_URL} - {method} {path}"))

    def no_method(self, method: str, path: str) -> HttpAnswer:
        """Answer for a method that there is not, or not for this path."""
        return error_answer(MethodNotAllowed(f"{UNSUPPORTED_METHOD} - {method} {path}"))
