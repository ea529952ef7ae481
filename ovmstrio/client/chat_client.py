"""Streaming client of OpenAI chat completions, for ``ovms chat``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from ovmstrio.client.addresses import parse_address, read_headers
from ovmstrio.client.calls import RestCalls
from ovmstrio.client.sync_client import Client
from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from ovmstrio.client.chat import ChatDelta, ChatMessage
    from ovmstrio.client.tls import ClientTls

_DEFAULT_ADDRESS: Final = "127.0.0.1:8000"
_DEFAULT_PATH: Final = "/v3"


class ChatClient(Client):
    """Client of one OpenAI API, also of servers that serve nothing else.

    Args:
        url: ``host:port``, optionally with scheme and API path (default: ``http`` and ``/v3``).
        api_key: sent as bearer token, unless empty.
        timeout: maximum seconds without data.
        tls: TLS settings.
    """

    def __init__(
        self, url: str = "", *, api_key: str = "", timeout: float = 600.0, tls: ClientTls | None = None
    ) -> None:
        self.url = _api_url(url, secure=tls is not None)
        address = parse_address(self.url, tls)
        super().__init__(timeout=timeout, retries=0, api_key=api_key, address=address)
        self._silence_seconds = timeout
        self._chats = self._calls = RestCalls(self._address, read_headers(api_key, None))
        self._chats.api_path = ""
        self._endpoint, self._invalid_response = f"at {self.url}", "is no OpenAI API"

    def chat_models(self) -> list[str]:
        """Return the names of the served models, text generation models first."""
        return self._run(self._chats.chat_models())

    def deltas(self, model: str, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> Generator[ChatDelta]:
        """Send a chat request and yield the answer's deltas; closing the iterator cancels the request at once.

        ``options`` are further request fields, such as ``temperature``.

        Raises:
            Unreachable: no server answers, or the connection broke.
            DeadlineExceeded: no data for ``timeout`` seconds.
            ServerError: the server refuses, or failed during the answer.
        """
        call, read = self._chats.chat_stream(model, messages, options), self._chats.delta_reader()
        try:
            for delta in self._stream(call, read, None, None, self._silence_seconds):
                if delta is None:
                    break
                yield delta
        except DeadlineExceeded:
            raise DeadlineExceeded(f"{self.url} sent nothing for {self._silence_seconds:g} seconds") from None


def _api_url(url: str, *, secure: bool) -> str:
    full_url = url if "://" in url else f"{'https' if secure else 'http'}://{url or _DEFAULT_ADDRESS}"
    try:
        parts = urlsplit(full_url)
        parts.port  # noqa: B018 - parsed on access
    except ValueError as error:
        raise InvalidRequest(f"invalid URL {url}: {error}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidRequest(f"expected HOST:PORT or a URL such as http://{_DEFAULT_ADDRESS}{_DEFAULT_PATH}, got {url}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or _DEFAULT_PATH}"
