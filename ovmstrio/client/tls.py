"""TLS settings of clients."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.util.regular_files import check_regular


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files: CA that replaces the system's CAs, and client certificate with key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Load the files; raises ``InvalidRequest`` if one cannot be read or is malformed."""
        try:
            if self.ca is not None:
                check_regular(self.ca)
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise InvalidRequest(f"{self.ca}: cannot read CA certificate: {_reason(error)}") from None
        if self.cert is not None:
            try:
                for path in (self.cert, self.key):
                    if path is not None:
                        check_regular(path)
                context.load_cert_chain(self.cert, self.key, password=_no_password)
            except (OSError, ValueError) as error:
                files = self.cert if self.key is None else f"{self.cert} and {self.key}"
                raise InvalidRequest(f"{files}: cannot read certificate and key: {_reason(error)}") from None
        return context


def _no_password() -> str:
    """Reject an encrypted key; OpenSSL would prompt for its password."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
