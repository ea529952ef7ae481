"""Removal of credential headers before user code sees them.

Credentials of the service itself, which did not authenticate the caller, are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.auth.authentication import request_credential
from ovmstrio.core.callers import current_caller

if TYPE_CHECKING:
    from ovmstrio.core.http_messages import Headers

_CERTIFICATE: Final = "certificate"
_CREDENTIAL_HEADERS: Final = frozenset({"authorization", "x-api-key"})


def strip_credentials(headers: Headers) -> Headers:
    """Return the headers without the credentials that authenticated the running task's caller."""
    caller = current_caller.get()
    if caller is None or caller.proof == _CERTIFICATE:
        return headers
    shown = request_credential(headers)
    return tuple(line for line in headers if line[0] not in _CREDENTIAL_HEADERS or request_credential((line,)) != shown)
