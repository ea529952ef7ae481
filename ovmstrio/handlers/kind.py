"""Service kind of handler projects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.config.service_options import (
    PythonEntry,
    ServiceEntry,
    check_name,
    check_path,
    check_python,
    parse_python,
)
from ovmstrio.config.specs import HandlerSpec, PythonSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.serving.fingerprints import paths_fingerprint, python_files
from ovmstrio.serving.kind import CallType, Kind
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing
from ovmstrio.util.regular_files import is_shortage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile, Entry
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.service import Service
    from ovmstrio.serving.kind import LoadContext

_SETTINGS: Final = (".yaml", ".yml", ".proto", ".pickle")
_DOTENV: Final = ".env"


def handler_fingerprint(spec: HandlerSpec) -> str:
    """Return a fingerprint of a project's code and settings; it changes when a file is written, added or removed."""
    return paths_fingerprint([*python_files(spec.base_path), *_settings_files(spec.base_path)])


def _settings_files(directory: Path) -> set[Path]:
    try:
        return {path for path in directory.iterdir() if path.suffix in _SETTINGS or path.name == _DOTENV}
    except OSError as error:
        if is_shortage(error):
            raise
        return set()


class HandlerEntry(PythonEntry, ServiceEntry):
    """Keys of an entry of ``handler_config_list``."""

    name: str
    path: str


def _read_handler(entry: Entry, directory: Path) -> HandlerSpec:
    given = entry.values
    path = directory / given["path"]
    problems = [
        *check_name(given["name"], is_mounted=True),
        *check_path("path", given["path"], "the folder with a nucleus.yaml, or that file"),
        *check_python(given, directory),
    ]
    return entry.build(
        HandlerSpec,
        problems,
        base_path=path.parent if path.suffix in {".yml", ".yaml"} else path,
        path=path,
        python=PythonSpec() if problems else parse_python(given, directory),
    )


class HandlerKind(Kind[HandlerSpec]):
    """Projects with a ``nucleus.yaml``, configured in ``handler_config_list``."""

    name = HandlerSpec.kind
    spec = HandlerSpec
    call_types = frozenset({CallType.HTTP, CallType.GRPC})
    imports = True
    fills_cores = True
    section = "handler_config_list"
    occupied = "Handler has a name that is taken"

    def read(self, file: ConfigFile) -> list[HandlerSpec]:
        """Read the handlers of a configuration file; their project files are read at load time."""
        entries = file.entries(self.name, file.items(self.section), HandlerEntry)
        return [_read_handler(entry, file.directory) for entry in entries]

    def list_versions(self, spec: HandlerSpec) -> Listing:
        """Return the single version."""
        return Listing({ONLY_VERSION: spec.base_path}, fingerprint=handler_fingerprint(spec))

    def fingerprint(self, spec: HandlerSpec, directory: Path) -> str:
        """Return the fingerprint of the project's code and settings."""
        del directory
        return handler_fingerprint(spec)

    def examine(self, spec: HandlerSpec) -> Sequence[Problem]:
        """Return all problems of the project file."""
        from ovmstrio.handlers.handler_service import validate_mounted  # noqa: PLC0415 - as in `load`

        try:
            return validate_mounted(spec)[1]
        except ConfigError as error:
            return error.problems

    def unready_reason(self, service: Service) -> str:
        """Return why calls fail now: all worker processes exited."""
        from ovmstrio.handlers.handler_service import HandlerService  # noqa: PLC0415 - as in `load`

        return service.unready_reason if isinstance(service, HandlerService) else ""

    async def load(self, spec: HandlerSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Import the project's code and create its handler; for a trial, in a separate process."""
        from ovmstrio.handlers.handler_service import load_handler, read_mounted  # noqa: PLC0415 - servers without handlers do not need it

        del version, directory
        if context.is_trial:
            from ovmstrio.handlers.trial import trial_load_mounted  # noqa: PLC0415 - only for checks

            project = await trio.to_thread.run_sync(read_mounted, spec, abandon_on_cancel=True)
            return await trial_load_mounted(project, spec.name)
        return await load_handler(spec, context)
