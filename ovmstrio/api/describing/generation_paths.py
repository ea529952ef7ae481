"""Paths of OpenAI's API in the document of all calls: one each for all models that answer it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from ovmstrio.core.generation import Task
from ovmstrio.runtimes.kind import Takes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["GenerationPath", "generation_paths"]

_HELLO: Final = "Say hello."
_EXAMPLES: Final[Mapping[Task, Mapping[str, Mapping[str, Any]]]] = {
    Task.TEXT_GENERATION: {
        "/chat/completions": {"messages": [{"role": "user", "content": _HELLO}], "max_tokens": 16},
        "/completions": {"prompt": _HELLO, "max_tokens": 16},
        "/responses": {"input": _HELLO, "max_output_tokens": 16},
    },
    Task.EMBEDDINGS: {"/embeddings": {"input": [_HELLO]}},
    Task.TEXT_TO_SPEECH: {"/audio/speech": {"input": _HELLO}},
    Task.RERANK: {"/rerank": {"query": _HELLO, "documents": ["hello", "goodbye"]}},
}


class GenerationPath(NamedTuple):
    """A path, the models that answer it, and a body for the first of them."""

    path: str
    models: tuple[str, ...]
    example: Mapping[str, Any]


def generation_paths(loaded: Iterable[tuple[str, object]], plane: DataPlane) -> Iterator[GenerationPath]:
    """Give the paths of services that are loaded and do nothing else.

    Graphs may answer chats, too, but only a call shows whether what they give is text; they have paths of their own.
    """
    named: dict[Task, list[str]] = {}
    for name, service in loaded:
        takes = plane.registry.takes_of(name)
        if Takes.GENERATION in takes and Takes.TENSORS not in takes:
            for task in cast("GenerativeService", service).tasks:
                named.setdefault(task, []).append(name)
    for task, names in named.items():
        for path, example in _EXAMPLES.get(task, {}).items():
            yield GenerationPath(f"/v3{path}", tuple(names), {"model": names[0], **example})
