"""Remote models: entries of ``model_config_list`` with the key ``remote``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from ovmstrio.config.documents import to_short_json
from ovmstrio.config.schema import OPTIONAL, parse_value
from ovmstrio.config.service_options import ServiceEntry, check_name
from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.config.config_file import ConfigFile, Entry

_SCHEMES: Final = ("grpc", "grpcs", "http", "https")
_FORM: Final = "grpc://HOST:PORT, or grpcs, http or https, or a list of such"
_MAX_ADDRESSES: Final = 64

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class RemoteAddress(NamedTuple):
    """Server address; ``scheme`` is ``grpc``, ``grpcs``, ``http`` or ``https``."""

    scheme: str
    host: str
    port: int

    @property
    def has_tls(self) -> bool:
        """True if connections use TLS."""
        return self.scheme in {"grpcs", "https"}

    @property
    def speaks_grpc(self) -> bool:
        """True if the server is called by gRPC instead of REST."""
        return self.scheme in {"grpc", "grpcs"}

    @property
    def authority(self) -> str:
        """Host and port of the URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


class RemoteTls(_Settings):
    """PEM files: trusted CA (default: the system's), client certificate and key.

    ``server_name`` is the name in the server's certificate, if it differs from the host.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""


class BreakerSpec(_Settings):
    """Circuit breaker: consecutive failures until it opens (0 for never), and the open time."""

    failures: Annotated[int, Field(ge=0, le=1_000_000)] = 5
    open_seconds: Seconds = 10.0


class RemoteCalls(BaseModel):
    """Settings of the calls to a remote model; see :class:`RemoteSpec`."""

    timeout_seconds: Seconds = 60.0
    connect_seconds: Seconds = 5.0
    health_seconds: Seconds = 5.0
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    retry_pause_ms: Annotated[float, Field(ge=0, le=60_000)] = 50.0
    hedge_after_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 0.0


class RemoteSpec(ServableSpec, RemoteCalls):
    """Configuration of one remote model, with the only local version 1.

    Attributes:
        addresses: equivalent servers.
        remote_version: remote version; empty for the default.
        timeout_seconds: call timeout, in addition to the caller's deadline.
        health_seconds: interval of readiness checks per address.
        max_attempts: maximum attempts of a call, as long as no data was sent.
        retry_pause_ms: backoff after all addresses have failed; increases.
        hedge_after_ms: delay of a hedged second call to another address; 0 for none.
    """

    kind: ClassVar[str] = "remote model"

    addresses: tuple[RemoteAddress, ...] = ()
    remote_name: str = ""
    remote_version: str = ""
    breaker: BreakerSpec = BreakerSpec()
    tls: RemoteTls = RemoteTls()
    max_concurrency: Annotated[int, Field(ge=0)] = 256


class RemoteEntry(ServiceEntry, RemoteCalls):
    """Keys of ``config`` in an entry of ``model_config_list`` with the key ``remote``."""

    hints: ClassVar[Mapping[str, str]] = {"base_path": "remote models have no local files; remove it"}

    name: str
    remote: str | list[str]
    remote_name: str = OPTIONAL
    remote_version: str | int = OPTIONAL
    breaker: dict[str, Any] = OPTIONAL
    tls: dict[str, Any] = OPTIONAL


def read_remotes(file: ConfigFile) -> list[RemoteSpec]:
    """Parse the remote entries; the first of a name is used."""
    entries = file.entries(RemoteSpec.kind, file.models.remotes, RemoteEntry)
    return [_read_remote(entry, file.directory) for entry in entries]


def _read_remote(entry: Entry, directory: Path) -> RemoteSpec:
    given = entry.values
    addresses, problems = _addresses(given["remote"])
    problems += check_name(given["name"])
    fields = {key: given[key] for key in RemoteCalls.model_fields if key in given}
    for key, settings in (("breaker", BreakerSpec), ("tls", RemoteTls)):
        try:
            fields[key] = parse_value(key, given.get(key, {}), settings)
        except ConfigError as error:
            problems += error.problems
    if "tls" in fields:
        fields["tls"] = _with_absolute_paths(directory, fields["tls"])
    return entry.build(
        RemoteSpec,
        problems,
        base_path=directory,
        addresses=addresses,
        remote_name=given.get("remote_name") or given["name"],
        remote_version=str(given.get("remote_version", "")),
        **fields,
    )


def _addresses(value: str | list[str]) -> tuple[tuple[RemoteAddress, ...], list[Problem]]:
    texts = [value] if isinstance(value, str) else value
    problems = []
    if not 0 < len(texts) <= _MAX_ADDRESSES:
        expected = f"one to {_MAX_ADDRESSES} addresses"
        problems.append(
            Problem("the addresses cannot be used", path="remote", expected=expected, found=to_short_json(value))
        )
    if repeated := [text for index, text in enumerate(texts) if text in texts[:index]]:
        problems.append(Problem(f"duplicate address {repeated[0]}", path="remote", suggestion="remove one"))
    addresses = [_address(text) for text in texts]
    for text, address in zip(texts, addresses, strict=True):
        if address is None:
            found = to_short_json(text)
            problems.append(Problem("the address cannot be used", path="remote", expected=_FORM, found=found))
    return tuple(address for address in addresses if address is not None), problems


def _address(text: str) -> RemoteAddress | None:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return None
    further = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in _SCHEMES or not parts.hostname or not port or further:
        return None
    return RemoteAddress(parts.scheme, parts.hostname, port)


def _with_absolute_paths(directory: Path, tls: RemoteTls) -> RemoteTls:
    files = {key: directory / path for key in ("ca", "cert", "key") if (path := getattr(tls, key)) is not None}
    return tls.model_copy(update=files)
