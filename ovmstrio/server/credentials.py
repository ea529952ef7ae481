"""Callers of one server: credentials from the settings, reloaded when their files change."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
import structlog
import trio

from ovmstrio.auth.authentication import Authentication, CallerDirectory
from ovmstrio.auth.gate import Gate
from ovmstrio.auth.key_file import CallerEntry, read_key_file
from ovmstrio.core.callers import ALL_SCOPES, Caller
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.server.watched_files import WatchedFiles
from ovmstrio.util.extras import Extra, install_command
from ovmstrio.util.regular_files import read_regular_bytes, read_regular_text

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.auth.authentication import VerifyToken
    from ovmstrio.core.tracing import StartRootSpan
    from ovmstrio.core.worker_peers import Counters
    from ovmstrio.server.settings import ServerSettings

log = structlog.get_logger(__name__)

_API_KEY: Final = "API_KEY"
"""Environment variable, and name of its caller."""


class CredentialStore:
    """Authentication of a server."""

    def __init__(
        self,
        settings: ServerSettings,
        counters: Counters | None = None,
        start_root_span: StartRootSpan | None = None,
    ) -> None:
        self._settings = settings
        self._directory = CallerDirectory(counters=counters)
        self._file_keys: Any = None
        self._authentication = Authentication(self._directory, self._token_verifier(start_root_span))
        guards_everything = any((settings.keys_file, settings.jwks_file, settings.oidc_issuer))
        self.gate = Gate(self._authentication, guards_everything=guards_everything)
        files = [path for path in (settings.keys_file, settings.api_key_file, settings.jwks_file) if path is not None]
        self._watched = WatchedFiles(files)
        self._replace(*self._read())

    def _token_verifier(self, start_root_span: StartRootSpan | None) -> VerifyToken | None:
        settings = self._settings
        if settings.jwks_file is None and settings.oidc_issuer is None:
            return None
        try:
            from ovmstrio.auth.tokens import (  # noqa: PLC0415 - optional dependency
                FileKeys,
                IssuerKeys,
                JwtVerifier,
                TokenRules,
            )
        except ImportError:
            problem = Problem("token authentication requires joserfc", "--jwks-file and --oidc-issuer")
            raise ConfigError([Problem(problem.message, suggestion=install_command(Extra.TOKENS))]) from None
        issuer, audience = settings.oidc_issuer or "", settings.jwt_audience or ""
        rules = TokenRules(issuer, audience, settings.jwt_leeway_seconds)
        if settings.jwks_file is None:
            return JwtVerifier(IssuerKeys(issuer, start_root_span=start_root_span), rules).verify
        self._file_keys = FileKeys(_read_jwks(settings.jwks_file))
        return JwtVerifier(self._file_keys, rules).verify

    def _read(self) -> tuple[list[CallerEntry], dict[str, Caller], Any]:
        settings = self._settings
        entries = [] if settings.keys_file is None else read_key_file(settings.keys_file)
        secret = _api_key(settings.api_key_file)
        keys = {secret: Caller(_API_KEY, "key", ALL_SCOPES)} if secret else {}
        return entries, keys, None if settings.jwks_file is None else _read_jwks(settings.jwks_file)

    def _replace(self, entries: list[CallerEntry], keys: dict[str, Caller], signing: Any) -> None:
        self._directory.replace(entries, keys)
        if signing is not None:
            self._file_keys.keys = signing
        self._authentication.clear_cache()

    async def look(self) -> bool:
        """Reload changed files and end the streams of revoked callers; invalid files change nothing."""
        if await self._watched.read_changes(self._reload, "credentials not reloaded"):
            log.info("credentials reloaded", count=len(self._directory))
        await self.gate.end_revoked()
        return True

    async def _reload(self) -> None:
        self._replace(*await trio.to_thread.run_sync(self._read))


async def open_credentials(
    settings: ServerSettings, counters: Counters | None = None, start_root_span: StartRootSpan | None = None
) -> CredentialStore | None:
    """Read the credentials; None without authentication.

    Raises:
        ConfigError: a file is invalid.
    """
    named = settings.keys_file, settings.api_key_file, settings.jwks_file, settings.oidc_issuer
    if not any(named) and not os.environ.get(_API_KEY):
        return None
    return await trio.to_thread.run_sync(partial(CredentialStore, settings, counters, start_root_span))


def _api_key(path: Path | None) -> str:
    """Return the API key of OVMS's option or environment variable; blocking."""
    if path is None:
        return os.environ.get(_API_KEY, "").strip()
    try:
        key = read_regular_text(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError([Problem(f"API key file not readable: {reason}", str(path))]) from None
    if not key or len(key.splitlines()) > 1:
        raise ConfigError([Problem("no API key", str(path), expected="one line with the key")])
    return key


def _read_jwks(path: Path) -> Any:
    from ovmstrio.auth.tokens import parse_key_set  # noqa: PLC0415 - for who takes tokens

    try:
        document = orjson.loads(read_regular_bytes(path))
    except (OSError, ValueError) as error:
        problem = Problem(f"key set not readable: {getattr(error, 'strerror', None) or error}", str(path))
        raise ConfigError([problem]) from None
    return parse_key_set(document, str(path))
