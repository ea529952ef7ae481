"""What the command line says of a project's server; the rest is the project's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["ProjectSettings"]

_EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - a server is to be reached


class ProjectSettings(BaseModel):
    """The settings of one project's server; times are seconds.

    Attributes:
        port: to listen at in place of the project's own; 0 lets the system choose.
        bind_address: of the machine's addresses, comma separated; ``unix:/path`` for a socket file.
        readiness_file: which file says that the project can be called; None for the usual one where its folder exists.
        debug: whether clients are told what the handler's code raised.
        drain_delay: between turning not ready and closing the listeners.
        drain_seconds: what requests in flight get when the server stops.
        tls_cert: certificate chain.
        tls_key: its private key.
        client_ca: whose certificates clients must show.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    bind_address: str = _EVERYWHERE
    readiness_file: Path | None = None
    debug: bool = False
    drain_delay: Annotated[float, Field(ge=0)] = 0
    drain_seconds: Annotated[float, Field(ge=0)] = 30
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls_cert and --tls_key: each needs the other")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("--client_ca: needs --tls_cert and --tls_key")
        return self
