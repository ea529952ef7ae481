"""Who may call one server: what the settings name, read before it listens and again whenever a file changes."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
import structlog
import trio

from ovmstrio.auth.authentication import Authentication, Directory
from ovmstrio.auth.gate import Gate
from ovmstrio.auth.key_file import CallerEntry, read_key_file
from ovmstrio.core.callers import EVERYTHING, Caller
from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.serving.fingerprints import paths_mark
from ovmstrio.util.extras import Extra, way_to_install
from ovmstrio.util.regular_files import read_regular_bytes, read_regular_text

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.auth.authentication import TokenVerifier
    from ovmstrio.core.worker_peers import Ledger
    from ovmstrio.server.settings import ServerSettings

__all__ = ["Access", "open_access"]

log = structlog.get_logger(__name__)

_API_KEY: Final = "API_KEY"
"""The variable of the environment, and what the caller is called that it makes."""


class Access:
    """The callers of a server.

    Args:
        settings: name the files.
        ledger: where several processes count what callers do.
    """

    def __init__(self, settings: ServerSettings, ledger: Ledger | None = None) -> None:
        self._settings = settings
        self._directory = Directory(ledger=ledger)
        self._file_keys: Any = None
        self._authentication = Authentication(self._directory, self._verifier())
        guards_everything = any((settings.keys_file, settings.jwks_file, settings.oidc_issuer))
        self.gate = Gate(self._authentication, guards_everything=guards_everything)
        self._files = [
            path for path in (settings.keys_file, settings.api_key_file, settings.jwks_file) if path is not None
        ]
        self._mark = paths_mark(self._files)
        self._take_over(*self._read())

    def _verifier(self) -> TokenVerifier | None:
        settings = self._settings
        if settings.jwks_file is None and settings.oidc_issuer is None:
            return None
        try:
            from ovmstrio.auth.tokens import (  # noqa: PLC0415 - likewise
                FileKeys,
                IssuerKeys,
                TokenRules,
                Tokens,
            )
        except ImportError:
            problem = Problem("tokens need joserfc", "--jwks_file and --oidc_issuer")
            raise ConfigError([Problem(problem.message, suggestion=way_to_install(Extra.TOKENS))]) from None
        issuer, audience = settings.oidc_issuer or "", settings.jwt_audience or ""
        rules = TokenRules(issuer, audience, settings.jwt_leeway_seconds)
        if settings.jwks_file is None:
            return Tokens(IssuerKeys(issuer), rules)
        self._file_keys = FileKeys(_read_jwks(settings.jwks_file))
        return Tokens(self._file_keys, rules)

    def _read(self) -> tuple[list[CallerEntry], dict[str, Caller], Any]:
        settings = self._settings
        entries = [] if settings.keys_file is None else read_key_file(settings.keys_file)
        secret = _api_key(settings.api_key_file)
        keys = {secret: Caller(_API_KEY, "key", EVERYTHING)} if secret else {}
        return entries, keys, None if settings.jwks_file is None else _read_jwks(settings.jwks_file)

    def _take_over(self, entries: list[CallerEntry], keys: dict[str, Caller], signing: Any) -> None:
        self._directory.replace(entries, keys)
        if signing is not None:
            self._file_keys.keys = signing
        self._authentication.forget_seen()

    async def look(self) -> bool:
        """Read the files again if they have changed, and end the streams of those who are not known any more.

        What cannot be used leaves all as it was.

        Cancellation: while they are read.
        """
        await self._read_again()
        await self.gate.end_unknown()
        return True

    async def _read_again(self) -> None:
        mark = await trio.to_thread.run_sync(paths_mark, self._files)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._take_over(*await trio.to_thread.run_sync(self._read))
        except ServerError as error:
            log.error("callers cannot be read again; those known stay", reason=error.message)  # noqa: TRY400 - told
            return
        log.info("callers read again", count=len(self._directory))


async def open_access(settings: ServerSettings, ledger: Ledger | None = None) -> Access | None:
    """Read who may call; None where everybody may.

    Raises:
        ConfigError: a file cannot be used.

    Cancellation: while files are read.
    """
    named = settings.keys_file, settings.api_key_file, settings.jwks_file, settings.oidc_issuer
    if not any(named) and not os.environ.get(_API_KEY):
        return None
    return await trio.to_thread.run_sync(partial(Access, settings, ledger))


def _api_key(path: Path | None) -> str:
    """Read the one key of OVMS's option, or of its variable of the environment; blocking.

    Raises:
        ConfigError: the file cannot be read, or has none.
    """
    if path is None:
        return os.environ.get(_API_KEY, "").strip()
    try:
        key = read_regular_text(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError([Problem(f"the file of the API key cannot be read: {reason}", str(path))]) from None
    if not key or len(key.splitlines()) > 1:
        raise ConfigError([Problem("no API key", str(path), expected="one line, which is the key")])
    return key


def _read_jwks(path: Path) -> Any:
    from ovmstrio.auth.tokens import read_key_set  # noqa: PLC0415 - for who takes tokens

    try:
        document = orjson.loads(read_regular_bytes(path))
    except (OSError, ValueError) as error:
        problem = Problem(f"the key set cannot be read: {getattr(error, 'strerror', None) or error}", str(path))
        raise ConfigError([problem]) from None
    return read_key_set(document, str(path))
