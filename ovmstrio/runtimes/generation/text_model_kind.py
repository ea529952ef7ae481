"""Models that make text, vectors or scores, as the server knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.config.text_entries import TEXT_MODELS, read_text_models
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.inspection import NOTHING_INSIDE, Inside
from ovmstrio.repository.fingerprints import tree_mark
from ovmstrio.repository.versions import ONLY_VERSION, Listing
from ovmstrio.runtimes.kind import Kind, Takes

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.servable import Service
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["TextModelKind"]


class TextModelKind(Kind[TextModelSpec]):
    """Folders of openvino-genai and files of GGUF, whatever their task."""

    name = TextModelSpec.kind
    spec = TextModelSpec
    takes = frozenset({Takes.GENERATION})
    runs_user_code = False
    fills_cores = True
    section = TEXT_MODELS
    occupied = "Text model has a name that is taken"

    def read(self, file: ConfigFile) -> list[TextModelSpec]:
        """Read the models of the file."""
        return read_text_models(file)

    def list_versions(self, spec: TextModelSpec) -> Listing:
        """Give the one version there is."""
        return Listing({ONLY_VERSION: spec.path}, mark=self.files_mark(spec, spec.path))

    def files_mark(self, spec: TextModelSpec, directory: Path) -> str:
        """Look at the files of the model."""
        del directory
        drafts = "" if spec.draft_path is None else tree_mark(spec.draft_path)
        return tree_mark(spec.path) + drafts

    async def load(self, spec: TextModelSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Load it by its task."""
        from ovmstrio.runtimes.generation.loading import load_task  # noqa: PLC0415 - for who loads only

        del version, directory
        return await load_task(spec, context)

    def obstacle(self, service: Service) -> str:
        """Tell of a process that has ended, and is not there again yet."""
        told: str = getattr(service, "obstacle", "")
        return told

    def look_inside(self, spec: TextModelSpec, service: Service) -> Inside:
        """Tell of the batch and the cache of what makes text."""
        from ovmstrio.runtimes.generation.text_model import TextModel  # noqa: PLC0415 - for who loads only

        del spec
        return Inside(facts=service.facts) if isinstance(service, TextModel) else NOTHING_INSIDE
