"""OVMS's commands without a server: list models of a repository, add models to a configuration or remove them.

::

    ovms --list-models --model-repository-path REPO
    ovms --add-to-config --config-path FILE --model-name NAME (--model-repository-path REPO | --model-path FOLDER) ...
    ovms --remove-from-config --config-path FILE --model-name NAME

The file may also be the value of ``--add-to-config`` and ``--remove-from-config``.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ovmstrio.cli.console import EX_USAGE, fail, stdout
from ovmstrio.server.command_line import CONFIG_COMMANDS
from ovmstrio.server.settings import option_name
from ovmstrio.stores.address import find_address
from ovmstrio.util.file_updates import lock_folder, replace_text
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_REPOSITORY: Final = "OVMS_MODEL_REPOSITORY_PATH"
_CONFIG: Final = "config.json"
_MODELS: Final = "model_config_list"
_TEXTS: Final = "text_model_config_list"
_DEEPEST: Final = 3
"""Organizations may have folders between the repository and its models."""
_OF_TENSORS: Final = frozenset({
    "batch_size", "shape", "layout", "mean", "scale", "color_format", "precision", "model_version_policy", "nireq",
    "target_device", "plugin_config",
})  # fmt: skip
_NUMBERS: Final = frozenset({"batch_size", "nireq"})
_OF_LIBRARIES: Final = frozenset({"custom_node_library_config_list", "custom_loader_config_list"})
"""Lists whose entries are not models."""


def manage_config(arguments: Sequence[str]) -> None:
    """Run the one of ``CONFIG_COMMANDS`` in the arguments; exit on errors."""
    given = _read(arguments)
    repository = given.model_repository_path or os.environ.get(_REPOSITORY)
    if given.list_models:
        _list(Path(repository or fail("--list-models: name the folder with --model-repository-path", EX_USAGE)))
        return
    is_added = given.add_to_config is not None
    named = given.config_path or (given.add_to_config if is_added else given.remove_from_config)
    path = named or (Path(repository) / _CONFIG if repository else None)
    command = "--add-to-config" if is_added else "--remove-from-config"
    if path is None or not given.model_name:
        fail(f"{command}: expected --config-path and --model-name", EX_USAGE)
    file = Path(path) / _CONFIG if Path(path).is_dir() else Path(path)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(file))
        except OSError as error:
            fail(f"--config-path: {file} cannot be written: {error.strerror}", EX_USAGE)
        if is_added:
            _add(file, given, repository)
        else:
            _remove(file, given.model_name)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error as all commands do."""
        fail(message, EX_USAGE)


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    from ovmstrio.config.text_entries import TEXT_OPTIONS

    parser = _Parser(prog="ovms", add_help=False, allow_abbrev=False)
    command = parser.add_mutually_exclusive_group(required=True)
    command.add_argument(option_name("list_models"), action="store_true")
    for name in sorted(CONFIG_COMMANDS - {"list_models"}):
        # Some releases of OVMS name the file here, others with --config-path.
        command.add_argument(option_name(name), nargs="?", const="", metavar="FILE")
    options = _OF_TENSORS | TEXT_OPTIONS | {"model_name", "model_path", "model_repository_path", "config_path"}
    for name in sorted(options):
        parser.add_argument(option_name(name))
    spelt = [_spelt(each) for each in arguments]
    return parser.parse_args(spelt)


def _spelt(argument: str) -> str:
    option, is_attached, value = argument.partition("=")
    return option.replace("_", "-") + is_attached + value if argument[:2] == "--" else argument


# Listing


def _list(repository: Path) -> None:
    if not (repository.is_dir() and os.access(repository, os.R_OK | os.X_OK)):
        fail(f"--model-repository-path: {repository} is not a readable folder", EX_USAGE)
    for folder in _servable(repository, 1):
        stdout().print(str(folder.relative_to(repository)), markup=False, highlight=False, soft_wrap=True)


def _servable(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders below one that can be served, sorted by name."""
    for each in (each for each in _inside(folder) if each.is_dir() and not each.name.startswith(".")):
        if _is_servable(each):
            yield each
        elif depth < _DEEPEST:
            yield from _servable(each, depth + 1)


def _is_servable(folder: Path) -> bool:
    within = _inside(folder)
    versions = (each for each in within if each.name.isdecimal() and each.is_dir())
    return bool(within) and (
        (folder / "graph.pbtxt").is_file() or _makes_text(folder) or any(_inside(each) for each in versions)
    )


def _inside(folder: Path) -> list[Path]:
    """Return the entries of a folder by name; none of an unreadable folder such as ``lost+found``."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _makes_text(path: Path) -> bool:
    from ovmstrio.config.text_entries import detect_task

    return detect_task(path) is not None or any(path.glob("*.gguf"))


# Adding and removing


def _add(file: Path, given: argparse.Namespace, repository: str | None) -> None:
    name = given.model_name
    folder, written = _folder(file, given, repository)
    settings = _settings(given)
    content = _content(file) if file.exists() else {_MODELS: []}
    if any(_name(entry) == name for entries in _services(content) for entry in entries):
        fail(f'--model-name: {file} has a model "{name}" already; remove it with --remove-from-config first', EX_USAGE)
    is_text = _is_remote_text(written, settings) or (_makes_text(folder) and not (folder / "graph.pbtxt").is_file())
    entry = {"config": {"name": name, "base_path": written, **settings}}
    content.setdefault(_TEXTS if is_text else _MODELS, []).append(entry)
    _write(file, content, name)
    stdout().print(f"added {name} to {file}", markup=False, highlight=False, soft_wrap=True)


def _is_remote_text(written: str, settings: dict[str, Any]) -> bool:
    """Return whether a remote address names a text model: by the hub, the file or an option, as no file is here yet."""
    address = find_address(written)
    is_text = not settings.keys() <= _OF_TENSORS or written.endswith(".gguf")
    return address is not None and (is_text or address.family == "hf")


def _folder(file: Path, given: argparse.Namespace, repository: str | None) -> tuple[Path, str]:
    """Return the path of the model, and its form in the file: relative if the model is below the file's folder.

    The server downloads the model of a remote address, whose path is that of the download.
    """
    if given.model_path and (address := find_address(given.model_path)) is not None:
        return address.path, given.model_path
    if given.model_path:
        folder = file.parent / given.model_path
        written = given.model_path
    elif repository:
        folder = Path(repository).absolute() / given.model_name
        is_below = folder.is_relative_to(file.parent.absolute())
        written = str(folder.relative_to(file.parent.absolute()) if is_below else folder)
    else:
        fail("--add-to-config: expected --model-path or --model-repository-path", EX_USAGE)
    if not folder.exists():
        fail(f"{folder} does not exist; models are not downloaded, so copy the model there first", EX_USAGE)
    return folder, written


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the model, parsed as JSON if possible.

    Settings of tensors other than numbers stay texts, unless they are JSON objects.
    """
    named = {"model_name", "model_path", "model_repository_path", "config_path", *CONFIG_COMMANDS}
    settings: dict[str, Any] = {}
    for name, value in vars(given).items():
        if value is None or name in named:
            continue
        try:
            read = json.loads(value)
        except ValueError:
            read = value
        is_text = name in _OF_TENSORS - _NUMBERS and not isinstance(read, dict)
        settings[name] = value if is_text else read
    return settings


def _remove(file: Path, name: str) -> None:
    content = _content(file)
    found = next(((each, entry) for each in _services(content) for entry in each if _name(entry) == name), None)
    if found is None:
        fail(f'--model-name: {file} has no model "{name}"', EX_USAGE)
    entries, entry = found
    entries.remove(entry)
    _write(file, content, "")
    stdout().print(f"removed {name} from {file}", markup=False, highlight=False, soft_wrap=True)


def _services(content: dict[str, Any]) -> list[list[Any]]:
    return [each for name, each in content.items() if isinstance(each, list) and name not in _OF_LIBRARIES]


def _name(entry: Any) -> Any:
    settings = entry.get("config", entry) if isinstance(entry, dict) else None
    return settings.get("name") if isinstance(settings, dict) else None


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular_bytes(file))
    except (OSError, ValueError) as error:
        fail(f"--config-path: {file} cannot be read: {error}", EX_USAGE)
    if not isinstance(content, dict) or not all(isinstance(content.get(each, []), list) for each in (_MODELS, _TEXTS)):
        fail(
            f"--config-path: {file} is not a configuration: expected an object with lists {_MODELS}, {_TEXTS}", EX_USAGE
        )
    return content


def _write(file: Path, content: dict[str, Any], name: str) -> None:
    """Check a configuration and replace the file; only errors of this model count, not those of other models."""
    from ovmstrio.config.config_file import parse_config
    from ovmstrio.core.errors import ConfigError
    from ovmstrio.server.kinds import KINDS

    text = json.dumps(content, indent=4, ensure_ascii=False) + "\n"
    try:
        services = parse_config(KINDS.values(), text.encode(), file.absolute()).services
    except ConfigError as error:
        fail(str(error), EX_USAGE)
    wrong = [problem for each in services if each.name == name for problem in each.errors]
    if wrong:
        fail("\n       ".join(map(str, wrong)), EX_USAGE)
    try:
        replace_text(file, text, new_mode=0o644)
    except OSError as error:
        fail(f"--config-path: {file} cannot be written: {error.strerror}", EX_USAGE)
