"""Graphs as the server knows them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, cast

import trio

from ovmstrio.config.graph_sections import GRAPHS, read_graphs
from ovmstrio.config.specs import GraphSpec, ServableSpec
from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.core.inspection import NOTHING_INSIDE
from ovmstrio.repository.fingerprints import paths_mark
from ovmstrio.repository.graph_files import graph_mark
from ovmstrio.repository.versions import ONLY_VERSION, Listing
from ovmstrio.runtimes.kind import Dependency, Kind, Takes
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.inspection import Inside
    from ovmstrio.core.servable import Service
    from ovmstrio.runtimes.graphs.text_graphs import TextGraph
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["GraphKind", "text_graph_of"]

_TEXT_MODEL: Final = re.compile(rb"\b(?:HttpLLM|Embeddings|Rerank|S2t|T2s|ImageGen)Calculator")
_READ_BY_ENGINES: Final = frozenset({".xml", ".bin", ".json", ".jinja", ".gguf"})
_MISSING: Final = Problem("the graph's file does not exist", path="graph_path")


class GraphKind(Kind[GraphSpec]):
    """Packet graphs, whose sessions look for what they call when it is called."""

    name = GraphSpec.kind
    spec = GraphSpec
    takes = frozenset({Takes.TENSORS, Takes.STREAMS, Takes.GENERATION, Takes.PAYLOADS})
    section = GRAPHS
    occupied = "Given mediapipe graph name is already occupied"

    def read(self, file: ConfigFile) -> list[ServableSpec]:
        """Read the graphs of the file; those that are one model of text become that."""
        return [_as_it_is_served(spec, file) for spec in read_graphs(file)]

    def depends_on(self, spec: GraphSpec) -> Sequence[Dependency]:
        """Give what the sessions of the graph's file call."""
        try:
            content = read_regular_bytes(spec.graph_path)
        except OSError:
            return ()
        return [call for call in _sessions(content, str(spec.graph_path)) if call.name != spec.name]

    def list_versions(self, spec: GraphSpec) -> Listing:
        """Give the one version there is."""
        return Listing({ONLY_VERSION: spec.graph_path.parent}, mark=self.files_mark(spec, spec.graph_path.parent))

    def files_mark(self, spec: GraphSpec, directory: Path) -> str:
        """Look at the graph's file, the code of its nodes, and the models of those that make text."""
        del directory
        return graph_mark(spec) + paths_mark(file for path in _models(spec) for file in _files_of_model(path))

    def examine(self, spec: GraphSpec) -> Sequence[Problem]:
        """Tell everything about the graph's file; it is told again when it keeps the graph from being loaded."""
        from ovmstrio.runtimes.graphs.examining import examine_graph  # noqa: PLC0415 - as in `load`

        return examine_graph(spec.graph_path, spec.base_path).problems if spec.graph_path.is_file() else ()

    def place(self, spec: GraphSpec, problem: Problem, directory: Path | None) -> Problem:
        """Point at the graph's file, except for what the configuration says of it."""
        del directory
        if problem.file or problem.path == _MISSING.path:
            return spec.placed(problem)
        return replace(problem, file=str(spec.graph_path))

    async def load(self, spec: GraphSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Check the graph's file, and make what its nodes share."""
        # What only graphs need is left alone by those who have none.
        from ovmstrio.runtimes.graphs.load_graph import load_graph  # noqa: PLC0415 - for who loads only
        from ovmstrio.work.isolation.isolated_code import Isolation  # noqa: PLC0415 - as above

        del version, directory
        if not await trio.Path(spec.graph_path).is_file():
            raise ConfigError([replace(_MISSING, found=str(spec.graph_path))])
        return await load_graph(
            spec,
            lease=context.lease,
            tasks=context.tasks,
            hooks=context.meters.graph(spec.name),
            hide_errors=context.hide_errors,
            isolation=Isolation.of(
                spec.python, is_default=context.isolates_python, memory_limit=context.python_memory_limit
            ),
            load_text=partial(_load_text, context),
            text_api=context.text_api,
        )

    def obstacle(self, service: Service) -> str:
        """Tell of a node's engine that has ended, and is not there again yet."""
        told: str = getattr(service, "obstacle", "")
        return told

    def look_inside(self, spec: GraphSpec, service: Service) -> Inside:
        """Tell of the graph's nodes and streams."""
        from ovmstrio.runtimes.graphs.graph_servable import GraphServable  # noqa: PLC0415 - as in `load`

        del spec
        return service.inside if isinstance(service, GraphServable) else NOTHING_INSIDE


async def _load_text(context: LoadContext, spec: TextModelSpec) -> TextGenerator:
    """Load the model of a node that makes text.

    Raises:
        ConfigError, ServerError: as ``load_task``.
    """
    from ovmstrio.runtimes.generation.loading import load_task  # noqa: PLC0415 - as in `load`

    return cast("TextGenerator", await load_task(spec, context))


def _models(spec: GraphSpec) -> tuple[Path, ...]:
    """Give the files and folders of the models that the graph's nodes name, as far as they can be read; blocking."""
    try:
        content = read_regular_bytes(spec.graph_path)
    except OSError:
        return ()
    return _model_paths(content, spec.base_path) if _TEXT_MODEL.search(content) else ()


def _files_of_model(path: Path) -> Iterator[Path]:
    """Give the file of a model, or what engines read of its folder, where code of users may keep files of its own.

    A folder that cannot be read is a state like any other.
    """
    try:
        entries = list(path.iterdir())
    except (OSError, ValueError):
        yield path
        return
    yield from (file for file in entries if file.suffix in _READ_BY_ENGINES)


def text_graph_of(spec: GraphSpec, cache_dir: Path | None) -> TextGraph | None:
    """Give what a graph is served as that is one model of text; None for any other; blocking."""
    try:
        content = read_regular_bytes(spec.graph_path)
    except (OSError, ValueError):
        return None
    if not _TEXT_MODEL.search(content):
        return None
    from ovmstrio.runtimes.graphs.text_graphs import read_text_graph  # noqa: PLC0415 - as in `load`

    return read_text_graph(spec, cache_dir)


def _as_it_is_served(spec: GraphSpec, file: ConfigFile) -> ServableSpec:
    found = text_graph_of(spec, file.cache_dir)
    if found is None:
        return spec.model_copy(update={"cache_dir": file.cache_dir})
    file.findings.problems += found.warnings
    # The configuration is read again when the graph's file changes.
    file.subconfigs.contents[spec.graph_path] = found.content
    return found.spec


@lru_cache(maxsize=64)
def _sessions(content: bytes, file: str) -> tuple[Dependency, ...]:
    """Find what is called in a graph's file; one that cannot be read calls nothing."""
    if b"servable_name" not in content:
        return ()
    from ovmstrio.runtimes.graphs.calculators.session import find_calls  # noqa: PLC0415 - as in `load`

    try:
        return tuple(find_calls(content.decode(), file))
    except (UnicodeDecodeError, ServerError):
        return ()


@lru_cache(maxsize=64)
def _model_paths(content: bytes, directory: Path) -> tuple[Path, ...]:
    """Find what nodes of a graph's file name that make text, drafts included; a file without sense names nothing."""
    from ovmstrio.runtimes.graphs.text_graphs import paths_of_models  # noqa: PLC0415 - as in `load`

    return paths_of_models(content.decode(errors="replace"), directory)
