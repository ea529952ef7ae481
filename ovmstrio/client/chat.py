"""Streaming client of OpenAI chat completions, blocking, on httpx."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import httpx
import orjson

from ovmstrio.client.rest_client import split_events
from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, ServerError
from ovmstrio.encoding.status_errors import Unreachable, error_of_http

if TYPE_CHECKING:
    from ovmstrio.client.tls import ClientTls

ChatMessage = Mapping[str, str]
"""``role`` and ``content``."""

_DEFAULT_ADDRESS: Final = "127.0.0.1:8000"
_DEFAULT_PATH: Final = "/v3"
_CONNECT_SECONDS: Final = 10.0
_END: Final = b"[DONE]"


@dataclass(frozen=True, slots=True)
class ChatUsage:
    """Token counts; ``cached_tokens`` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """Delta of an answer; ``finish`` and ``usage`` come near the end."""

    text: str = ""
    reasoning: str = ""
    calls: str = ""
    finish: str = ""
    usage: ChatUsage | None = None


class ChatClient:
    """Client of one server, with one connection per call, so that an interrupted call leaves no state.

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
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
        self._verify = tls is None or tls.context()

    def models(self) -> list[str]:
        """Return the names of the served models, text generation models first."""
        try:
            with self._open() as http:
                answer = http.get(f"{self.url}/models")
        except httpx.RequestError as error:
            raise self._unreachable(error) from None
        if not answer.is_success:
            raise error_of_http(answer.status_code, _reason(answer))
        try:
            return [str(each["id"]) for each in answer.json()["data"]]
        except (ValueError, LookupError, TypeError):
            raise self._not_openai() from None

    def stream(self, model: str, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> Generator[ChatDelta]:
        """Send a chat request and yield the answer's deltas; closing the iterator cancels the request at once.

        ``options`` are further request fields, such as ``temperature``.

        Raises:
            Unreachable: no server answers, or the connection broke.
            DeadlineExceeded: no data for ``timeout`` seconds.
            ServerError: the server refuses, or failed during the answer.
        """
        fields = {"model": model, "messages": list(messages), "stream": True, **options}
        body = orjson.dumps({**fields, "stream_options": {"include_usage": True}})
        headers = {"Content-Type": "application/json"}
        try:
            with self._open() as http, http.stream(
                "POST", f"{self.url}/chat/completions", content=body, headers=headers
            ) as answer:  # fmt: skip
                if not answer.is_success:
                    answer.read()
                    raise error_of_http(answer.status_code, _reason(answer))
                for _, data in split_events(answer.iter_bytes()):
                    if data == _END:
                        break
                    yield self._piece(data)
        except httpx.ReadTimeout:
            raise DeadlineExceeded(f"{self.url} sent nothing for {self._timeout.read:g} seconds") from None
        except httpx.RequestError as error:
            raise self._unreachable(error) from None

    def _open(self) -> httpx.Client:
        return httpx.Client(headers=self._headers, timeout=self._timeout, verify=self._verify)

    def _piece(self, data: bytes) -> ChatDelta:
        try:
            document = orjson.loads(data)
            if "error" in document:
                raise ServerError(_text_of(document["error"]))
            usage = document.get("usage")
            chat_usage = None if usage is None else _usage(usage)
            if not document.get("choices"):
                return ChatDelta(usage=chat_usage)
            choice = document["choices"][0]
            delta = choice.get("delta") or {}
            return ChatDelta(
                text=delta.get("content") or "",
                reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
                calls="".join(_call(each) for each in delta.get("tool_calls") or ()),
                finish=choice.get("finish_reason") or "",
                usage=chat_usage,
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._not_openai() from None

    def _not_openai(self) -> ServerError:
        return ServerError(f"{self.url} is no OpenAI API")

    def _unreachable(self, error: httpx.RequestError) -> Unreachable:
        return Unreachable(f"no server answers at {self.url}: {str(error) or type(error).__name__}")


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


def _usage(document: Mapping[str, Any]) -> ChatUsage:
    details = document.get("prompt_tokens_details") or {}
    return ChatUsage(
        int(document["prompt_tokens"]),
        int(document.get("completion_tokens", 0)),
        int(details.get("cached_tokens") or 0),
    )


def _call(document: Mapping[str, Any]) -> str:
    function = document.get("function") or {}
    name = function.get("name")
    return (f"\n{name} " if name else "") + (function.get("arguments") or "")


def _reason(answer: httpx.Response) -> str:
    try:
        return _text_of(answer.json()["error"])
    except (ValueError, LookupError, TypeError):
        return answer.text or answer.reason_phrase


def _text_of(error: Any) -> str:
    """Return the text of an error, which is an object in OpenAI's format and a string in OVMS's."""
    return str(error["message"] if isinstance(error, dict) else error)
