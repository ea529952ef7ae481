"""Routes of Ollama's API, below ``/api``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import NotSupported
from ovmstrio.protocols.ollama.api import STREAM_HEADERS, OllamaErrors
from ovmstrio.protocols.ollama.chat import CHAT_ENDPOINT
from ovmstrio.protocols.ollama.embed import embed_rules
from ovmstrio.protocols.ollama.generate import GENERATE_ENDPOINT
from ovmstrio.protocols.ollama.models import model_rules
from ovmstrio.protocols.openai.api import OpenAIApi
from ovmstrio.serving.interfaces import OLLAMA_REST

if TYPE_CHECKING:
    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule

_CHANGES: Final = {"/pull": "POST", "/push": "POST", "/create": "POST", "/copy": "POST", "/delete": "DELETE"}


def ollama_rules(plane: DataPlane, max_body_bytes: int) -> list[Rule]:
    """Return the routes over one data plane; a service with the name ``api`` keeps its own paths."""
    api = OpenAIApi(plane, max_body_bytes, OllamaErrors(), OLLAMA_REST, STREAM_HEADERS)

    async def refuse_change(request: HttpRequest) -> HttpAnswer:
        raise NotSupported(f"{request.path}: models come from the server's configuration; see docs/ollama.md")

    create = partial(api.rules, view=refuse_change, prefixes=("/api",))
    changes = [rule for path, method in _CHANGES.items() for rule in create(path, method)]
    texts = [*CHAT_ENDPOINT.rules(api, "/chat"), *GENERATE_ENDPOINT.rules(api, "/generate")]
    return [rule._replace(first="") for rule in (*texts, *embed_rules(api), *model_rules(api), *changes)]
