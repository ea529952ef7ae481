"""Command line of ``ovms serve``: settings and, for a single model or graph, its specification.

All problems are reported together.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from ovmstrio.config.config_file import Subconfigs, check_families
from ovmstrio.config.documents import did_you_mean, to_short_json
from ovmstrio.config.model_entries import GRAPH_SUFFIX, GraphFiles, find_graph, is_graph
from ovmstrio.config.model_options import parse_model_options
from ovmstrio.config.schema import expected_text
from ovmstrio.config.service_options import check_base_path, check_name
from ovmstrio.config.specs import GraphSpec, LatestVersions, ModelSpec, ServerSpec, TextModelSpec, VersionPolicy
from ovmstrio.config.text_entries import TEXT_OPTIONS, detect_task, parse_task, parse_text_options, text_model_path
from ovmstrio.core.connection import TrustedProxies
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.metric_families import matching_families
from ovmstrio.graphs.kind import find_text_graph
from ovmstrio.server.settings import ALL_INTERFACES, IGNORED, MODEL, TEXT, ServerSettings, option_name
from ovmstrio.stores.address import Address, find_address
from ovmstrio.telemetry.log_levels import parse_log_levels
from ovmstrio.util.regular_files import is_file, is_folder

# Unsupported OVMS options

_NO_CONVERSION: Final = (
    "models are not converted when they are downloaded: name a repository with OpenVINO's files, such as those of "
    "https://huggingface.co/OpenVINO, or convert the model with optimum-cli and set --model-path"
)
_NO_DRAFT_OPTIONS: Final = "the draft model has the settings of the main model: remove it, results are the same"
_NO_ENGINE_OPTION: Final = 'not supported; OpenVINO properties go into --plugin-config, such as {"NUM_STREAMS": "1"}'
_NO_UNKNOWN_INPUTS: Final = (
    "requests with inputs that a model does not have are refused: remove it, and send only the inputs of the model"
)
_NO_CONFIGURE: Final = (
    "model files are not modified: --task and its options serve a folder as it is, and --add-to-config adds it to "
    "model_config_list or text_model_config_list of the file of --config-path"
)

DOWNLOAD_OPTIONS: Final = ("source_model", "model_repository_path", "gguf_filename", "draft_source_model")
DOWNLOAD_FLAGS: Final = ("pull", "overwrite_models")
"""Options that download models of a hub."""

CONFIG_COMMANDS: Final = frozenset({"list_models", "add_to_config", "remove_from_config"})
"""Options that are separate commands."""

UNSUPPORTED_HINTS: Final = {
    **dict.fromkeys(
        (
            "weight_format",
            "extra_quantization_params",
        ),
        _NO_CONVERSION,
    ),
    "source_loras": "LoRA adapters are not downloaded: set --lora-adapters to their folders",
    **dict.fromkeys(
        ("draft_cache_size", "draft_max_num_batched_tokens", "draft_max_num_seqs"),
        _NO_DRAFT_OPTIONS,
    ),
    **dict.fromkeys(
        ("cache_interval_multiplier", "max_prompt_len", "model_distribution_policy", "model_type", "num_streams"),
        _NO_ENGINE_OPTION,
    ),
    "configure": _NO_CONFIGURE,
    "disable_input_count_validation": _NO_UNKNOWN_INPUTS,
    "verbose_response": "responses of text models have no __verbose object: remove it",
    "trace_path": "request times are in /metrics, Op times in ovms paddle trace",
}
"""Hints for unsupported options; ignored options are in ``settings.IGNORED``."""


def unsupported_options(arguments: Iterable[str]) -> list[str]:
    """Return one line with options and hint per group of unsupported OVMS options."""
    names = (_name_of(argument) for argument in arguments)
    options_by_hint: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if name in UNSUPPORTED_HINTS:
            options_by_hint.setdefault(UNSUPPORTED_HINTS[name], []).append(option_name(name))
    return [f"{', '.join(options)}: {hint}" for hint, options in options_by_hint.items()]


@dataclass(frozen=True, slots=True)
class Download:
    """A model that OVMS's options download.

    Attributes:
        address: of the model or of its repository.
        folder: folder to place it in; None for the download cache.
    """

    address: Address
    folder: Path | None


@dataclass(frozen=True, slots=True)
class SourceModels:
    """OVMS's options of models of a hub, in terms of this server.

    Attributes:
        arguments: the command line with ``--model-name`` and ``--model-path`` instead.
        downloads: models that are not there yet.
        is_pull: whether the command ends after the downloads.
    """

    arguments: list[str]
    downloads: tuple[Download, ...] = ()
    is_pull: bool = False


def read_source_models(arguments: Sequence[str]) -> SourceModels:
    """Translate ``--source-model``, ``--draft-source-model`` and ``--pull``.

    The model is in ``--model-repository-path``/``--source-model``, with ``--gguf-filename`` in that folder.  Without a
    repository, it is served from the download cache.  As in OVMS, ``--model-name`` is the default of
    ``--source-model``, and a repository has no effect with ``--model-path`` alone.

    Raises:
        UsageError: the options contradict each other.
    """
    rest: list[str] = []
    values: dict[str, str] = {}
    names = {_name_of(argument) for argument in arguments}
    ahead = iter(arguments)
    for argument in ahead:
        if _name_of(argument) in DOWNLOAD_OPTIONS:
            _, is_attached, value = argument.partition("=")
            values[_name_of(argument)] = value if is_attached else next(ahead, "")
        elif _name_of(argument) not in DOWNLOAD_FLAGS:
            rest.append(argument)
    if not names & {*DOWNLOAD_OPTIONS, *DOWNLOAD_FLAGS}:
        return SourceModels(list(arguments))
    if "model_path" in names and names & {*DOWNLOAD_OPTIONS, *DOWNLOAD_FLAGS} == {"model_repository_path"}:
        return SourceModels(rest)
    option, source, draft = "--source-model", values.get("source_model", ""), values.get("draft_source_model", "")
    if not source and not draft and "model_path" not in names:
        option, source = "--model-name", _value_of("model_name", rest)
    if not source and not draft:
        given = ", ".join(option_name(each) for each in (*DOWNLOAD_OPTIONS, *DOWNLOAD_FLAGS) if each in names)
        raise UsageError([Problem("needs --source-model, such as OpenVINO/Qwen3-8B-int4-ov", path=given)])
    if source and "model_path" in names:
        raise UsageError([Problem("cannot be combined", path="--source-model and --model-path")])
    repository = values.get("model_repository_path") or os.environ.get("OVMS_MODEL_REPOSITORY_PATH", "")
    found = [
        _source(each, file, repository, given_by, replaces="overwrite_models" in names)
        for given_by, each, file in (
            (option, source, values.get("gguf_filename", "")),
            ("--draft-source-model", draft, ""),
        )
        if each
    ]
    options = [name for name, each in (("--model-path", source), ("--draft-models-path", draft)) if each]
    named = ["--model-name", source] if source and "model_name" not in names else []
    paths = [part for name, (path, _) in zip(options, found, strict=True) for part in (name, path)]
    downloads = tuple(download for _, download in found if download is not None)
    return SourceModels([*rest, *named, *paths], downloads, "pull" in names)


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """Return the last value of an option on a command line; empty if it is not given."""
    found = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if _name_of(argument) == option:
            _, is_attached, value = argument.partition("=")
            found = value if is_attached else following
    return found


def _source(name: str, file: str, repository: str, option: str, *, replaces: bool) -> tuple[str, Download | None]:
    """Return the path or address of a model, and its download if it is not in the repository."""
    address = find_address("/".join(filter(None, (name if "://" in name else f"hf://{name}", file))))
    if address is None:
        raise UsageError([Problem("the address cannot be used", path=option, found=name)])
    if not repository:
        return address.text, Download(address, None)
    folder = Path(repository) / (address.folder.name if "://" in name else name)
    path = folder / Path(file).name
    return str(path), None if path.exists() and not replaces else Download(address, folder)


def _name_of(argument: str) -> str:
    return argument[2:].partition("=")[0].replace("-", "_") if argument.startswith("--") else ""


# Single text model

_GGUF: Final = ".gguf"


def is_text_model(settings: ServerSettings) -> bool:
    """Return whether a single text model is configured, by its task or its files."""
    if settings.model_name is None or settings.model_path is None:
        return False
    path = settings.model_path
    if settings.task is not None or path.suffix == _GGUF:
        return True
    absolute = path.absolute()
    return detect_task(absolute) is not None and not is_graph({"base_path": str(absolute)}, absolute)


def text_problems(settings: ServerSettings, others: Collection[str]) -> list[Problem]:
    """Return all problems of the options; ``others`` are options of tensor models."""
    problems = [
        Problem("not an option of text models", path=option_name(name), suggestion="remove it")
        for name in sorted(set(others) & settings.model_fields_set - TEXT_OPTIONS)
    ]
    return problems + _read(settings)[2]


def text_model(settings: ServerSettings, cache_dir: Path | None, origin: str) -> TextModelSpec:
    """Return the specification of the single text model."""
    path = (settings.model_path or Path()).absolute()
    task, fields, problems = _read(settings)
    if "max_queue" in settings.model_fields_set:
        # The only queue is that of requests waiting for this model's KV cache.
        fields["max_queue"] = settings.max_queue
    return TextModelSpec(
        name=settings.model_name or "",
        base_path=path.parent if path.suffix == _GGUF else path,
        path=path,
        task=task,
        cache_dir=cache_dir,
        origin=origin,
        problems=tuple(problems),
        **fields,
    )


def _read(settings: ServerSettings) -> tuple[Task, dict[str, Any], list[Problem]]:
    try:
        task = detect_task((settings.model_path or Path()).absolute()) or Task.TEXT_GENERATION
        task = task if settings.task is None else parse_task(settings.task)
    except ConfigError as error:
        return Task.TEXT_GENERATION, {}, [_option(problem) for problem in error.problems]
    given = {name: getattr(settings, name) for name in sorted(TEXT_OPTIONS & settings.model_fields_set)}
    given = {name: value for name, value in given.items() if value is not None}
    fields, problems = parse_text_options(task, given, Path.cwd())
    return task, fields, [_option(problem) for problem in problems]


def _option(problem: Problem) -> Problem:
    return replace(problem, path=option_name(problem.path))


# Settings

_ORIGIN: Final = "the command line"
_OVMS_CACHE: Final = Path("/opt/cache")
_UNIX: Final = "unix:"


class UsageError(Exception):
    """Invalid command line; the paths of ``problems`` are options."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)

    @property
    def lines(self) -> list[str]:
        """The problems, one line each."""
        return [str(problem) for problem in self.problems]


def read_settings(options: Mapping[str, Any], *, model_option_error: str = "") -> ServerSettings:
    """Validate options and convert them to settings.

    Args:
        options: values by name; None for options that were not given.
        model_option_error: error for model options, if a project or service with its own configuration is served.

    Raises:
        UsageError: unknown options, invalid values, or conflicting or missing options.
    """
    given = {name: value for name, value in options.items() if value is not None}
    problems: list[Problem] = []
    try:
        settings = ServerSettings.model_validate(given)
    except ValidationError as error:
        bad = {str(fault["loc"][0]): fault for fault in error.errors(include_url=False)}
        problems += [_invalid_option(option, fault) for option, fault in bad.items()]
        # Check the rest with defaults in place of invalid values.
        settings = ServerSettings.model_validate({name: value for name, value in given.items() if name not in bad})
    problems += [*_security(settings), *_metric_lists(settings), *_log_levels(settings)]
    if model_option_error:
        problems += [
            Problem(model_option_error, path=option_name(name))
            for name in sorted(_MODEL_ONLY_OPTIONS & settings.model_fields_set)
        ]
    else:
        problems += [*_addresses(settings), *_groups(settings), *_metrics(settings)]
    # The files of a remote model decide which options it has.
    if not model_option_error and all(address.index.exists() for address in addresses_of(settings).values()):
        problems += single_problems(settings)
    if problems:
        raise UsageError(problems)
    return settings


_ADDRESS_OPTIONS: Final = ("config_path", "model_path", "draft_models_path")


def addresses_of(settings: ServerSettings) -> dict[str, Address]:
    """Return the remote addresses among the options, by option."""
    given = {name: getattr(settings, name) for name in _ADDRESS_OPTIONS}
    found = {name: find_address(value) for name, value in given.items() if value is not None}
    return {name: address for name, address in found.items() if address is not None}


def with_local_copies(settings: ServerSettings) -> ServerSettings:
    """Return the settings with the paths of local copies instead of remote addresses."""
    paths = {name: text_model_path(address.path) for name, address in addresses_of(settings).items()}
    return settings.model_copy(
        update={name: str(path) if name == "draft_models_path" else path for name, path in paths.items()}
    )


def single_servable_spec(settings: ServerSettings) -> ServerSpec:
    """Return the model or graph of the command line, with the models of the graph's subconfig; may be empty.

    The files of remote addresses must have been downloaded.
    """
    sources = tuple(addresses_of(settings).values())
    spec = _single_spec(with_local_copies(settings))
    if not sources:
        return spec
    services = [
        each.model_copy(update={"sources": sources})
        if settings.model_name in {each.name, getattr(each, "parent", "")}
        else each
        for each in spec.services
    ]
    return spec.model_copy(update={"services": tuple(services)})


def single_model_policy(settings: ServerSettings) -> VersionPolicy:
    """Return the policy that selects the versions of the model of the command line."""
    policy: VersionPolicy = _read_model(with_local_copies(settings))[0].get("version_policy", LatestVersions())
    return policy


def single_problems(settings: ServerSettings) -> list[Problem]:
    """Return the problems of the options of a single model, which depend on its files."""
    if not _is_single_model(settings):
        return []
    return [each for each in _single_problems(with_local_copies(settings)) if each.severity == "error"]


def _single_spec(settings: ServerSettings) -> ServerSpec:
    if settings.model_name is None or settings.model_path is None:
        return ServerSpec()
    if is_text_model(settings):
        return ServerSpec(services=tuple(text_model(settings, cache_directory(settings), _ORIGIN).with_adapters()))
    if _is_graph(settings):
        return _graph_alone(settings, settings.model_name)
    fields, problems = _read_model(settings)
    model = ModelSpec(
        name=settings.model_name,
        base_path=settings.model_path.absolute(),
        cache_dir=cache_directory(settings),
        origin=_ORIGIN,
        problems=tuple(problem for problem in problems if problem.severity == "error"),
        **fields,
    )
    return ServerSpec(services=(model,))


def _graph_alone(settings: ServerSettings, name: str) -> ServerSpec:
    files = _graph_files(settings)
    subconfigs = Subconfigs(cache_directory(settings), {})
    problems = subconfigs.read(files.subconfig)
    models = [model for model in subconfigs.known.values() if model.name != name]
    if len(models) < len(subconfigs.known):
        message = f"Given mediapipe graph name is already occupied: a model of {files.subconfig} is called {name!r}"
        problems = (*problems, Problem(message, path="--model-name", suggestion="rename one of them"))
    cache = cache_directory(settings)
    graph = GraphSpec(name=name, origin=_ORIGIN, problems=problems, cache_dir=cache, **files._asdict())
    text = find_text_graph(graph, cache)
    warnings = () if text is None else text.warnings
    return ServerSpec(services=(*models, text.spec if text else graph), problems=(*subconfigs.problems, *warnings))


def ignored_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the given options without effect, with the reason."""
    reasons = {name: IGNORED[name] for name, value in options.items() if name in IGNORED and value is not None}
    given = {name: value for name, value in options.items() if name in _MODEL_OPTIONS and value is not None}
    for problem in parse_model_options(given)[1]:
        if problem.severity == "warning":
            reasons[problem.path] = problem.message
    return reasons


def config_conflicts(settings: ServerSettings, spec: ServerSpec) -> list[Problem]:
    """Return fatal conflicts between command line and configuration file."""
    if spec.metrics is None:
        return []
    problem = Problem("", file=str(settings.config_path or ""), path="monitoring.metrics")
    given = sorted({"metrics_enable", *_METRIC_LISTS} & settings.model_fields_set)
    if given:
        message = f"metrics are configured here and by {option_name(given[0])}"
        return [replace(problem, message=message, suggestion="remove one of them")]
    if spec.metrics.enable and not settings.rest_port:
        message = "metrics require the REST port, and --rest-port is 0"
        return [replace(problem, message=message, suggestion="set --rest-port, or enable to false")]
    return []


def metric_families(settings: ServerSettings) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return the enabled OVMS families and ``ovmstrio_*`` families; None for the default."""
    if settings.metrics_families is not None:
        chosen = matching_families(_parts(settings.metrics_families))
        return chosen, chosen
    return None if settings.metrics_list is None else _parts(settings.metrics_list), None


def cache_directory(settings: ServerSettings) -> Path | None:
    """Return the directory for compiled models: the configured one, or OVMS's default if it exists."""
    return settings.cache_dir or (_OVMS_CACHE if _OVMS_CACHE.is_dir() else None)


def listen_addresses(addresses: str, port: int, *, zero_is_any: bool = False) -> list[str]:
    """Return the listen addresses for comma-separated hosts and a port.

    Port 0 keeps Unix sockets only, unless ``zero_is_any`` makes it a free port.
    """
    parts = _parts(addresses)
    return [_with_port(part, port) for part in parts if port or zero_is_any or part.startswith(_UNIX)]


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _with_port(address: str, port: int) -> str:
    if address.startswith(_UNIX):
        return address
    return f"[{address.strip('[]')}]:{port}" if ":" in address else f"{address}:{port}"


def _invalid_option(option: str, fault: Any) -> Problem:
    if fault["type"] == "extra_forbidden":
        suggestion = did_you_mean(option_name(option), map(option_name, ServerSettings.model_fields))
        return Problem("unknown option", path=option_name(option), suggestion=suggestion)
    return Problem(
        "the value cannot be used",
        path=option_name(option),
        expected=expected_text(fault, ServerSettings),
        found=to_short_json(fault["input"]),
    )


def _addresses(settings: ServerSettings) -> list[Problem]:
    both = Problem("", path="--port and --rest-port")
    grpc = listen_addresses(settings.grpc_bind_address, settings.port)
    rest = listen_addresses(settings.rest_bind_address, settings.rest_port)
    if not grpc and not rest:
        return [replace(both, message="both are disabled", suggestion="set one of the ports")]
    if settings.port and settings.port == settings.rest_port:
        return [replace(both, message=f"both are {settings.port}", suggestion="use different ports")]
    return []


def probe_addresses(settings: ServerSettings) -> list[str]:
    """Return the addresses of the probe port: the REST hosts, or all interfaces without any."""
    addresses = listen_addresses(settings.rest_bind_address, settings.probe_port)
    return [each for each in addresses if not each.startswith("unix:")] or listen_addresses(
        ALL_INTERFACES, settings.probe_port
    )


def _options_of(group: str) -> tuple[str, ...]:
    fields = ServerSettings.model_fields.items()
    return tuple(name for name, field in fields if (field.json_schema_extra or {}) == {"group": group})


_MODEL_OPTIONS: Final = _options_of(MODEL)
_TEXT_OPTIONS: Final = _options_of(TEXT)
_MODEL_ONLY_OPTIONS: Final = {*_MODEL_OPTIONS, *_TEXT_OPTIONS, "config_path", "allow_empty", "cache_dir", "workers"}
"""Options that apply to models only."""
_MODEL_KEYS: Final = {"name": "model_name", "base_path": "model_path"}
"""Options with another name in the configuration file."""


def _is_single_model(settings: ServerSettings) -> bool:
    return settings.model_name is not None and settings.model_path is not None


def _groups(settings: ServerSettings) -> list[Problem]:
    given = [name for name in (*_MODEL_OPTIONS, *_TEXT_OPTIONS) if name in settings.model_fields_set]
    options = ", ".join(option_name(name) for name in given)
    if settings.config_path is not None and given:
        message = "cannot be combined with --config-path"
        return [Problem(message, path=options, suggestion="remove one of them")]
    if given and not _is_single_model(settings):
        missing = " and ".join(option_name(name) for name in _MODEL_KEYS.values() if getattr(settings, name) is None)
        return [Problem("needs a model", path=options, suggestion=f"set {missing}")]
    return []


def _security(settings: ServerSettings) -> list[Problem]:
    problems = []
    if settings.probe_port and settings.probe_port in {settings.port, settings.rest_port}:
        message = f"port {settings.probe_port} is in use by gRPC or REST"
        problems.append(Problem(message, path="--probe-port", suggestion="use a separate port"))
    if (settings.tls_cert is None) != (settings.tls_key is None):
        problems.append(Problem("both are required", path="--tls-cert and --tls-key"))
    if settings.client_ca is not None and settings.tls_cert is None:
        problems.append(Problem("needs --tls-cert and --tls-key", path="--client-ca"))
    try:
        TrustedProxies.parse(settings.trusted_proxies)
    except ValueError as error:
        problems.append(Problem(str(error), path="--trusted-proxies"))
    return [*problems, *_token_problems(settings)]


def _token_problems(settings: ServerSettings) -> list[Problem]:
    """Check the token settings; signing keys fetched without TLS could be forged."""
    problems = []
    if settings.jwt_audience is not None and settings.jwks_file is None and settings.oidc_issuer is None:
        problems.append(Problem("needs --jwks-file or --oidc-issuer", path="--jwt-audience"))
    issuer = urlsplit(settings.oidc_issuer or "")
    is_safe = issuer.scheme == "https" or settings.jwks_file is not None
    if settings.oidc_issuer is not None and not (is_safe or issuer.hostname in _LOCAL_HOSTS):
        expected = "an https:// URL"
        problems.append(Problem("unsafe URL for signing keys", "", None, "--oidc-issuer", expected, issuer.geturl()))
    return problems


_LOCAL_HOSTS: Final = {"localhost", "127.0.0.1", "::1"}


def _log_levels(settings: ServerSettings) -> list[Problem]:
    try:
        parse_log_levels(settings.log_levels or "")
    except ValueError as error:
        return [Problem(str(error), path="--log-levels")]
    return []


_METRIC_LISTS: Final = ("metrics_list", "metrics_families")


def _metric_lists(settings: ServerSettings) -> list[Problem]:
    given = {name: getattr(settings, name) for name in _METRIC_LISTS if getattr(settings, name) is not None}
    if len(given) > 1:
        path = " and ".join(option_name(name) for name in given)
        return [Problem("mutually exclusive", path=path, suggestion="remove one of them")]
    return [
        Problem(message, path=option_name(name), suggestion=suggestion)
        for name, names in given.items()
        for _, message, suggestion in check_families(_parts(names), patterns=name == "metrics_families")
    ]


def _metrics(settings: ServerSettings) -> list[Problem]:
    metrics_options = [name for name in ("metrics_enable", *_METRIC_LISTS) if name in settings.model_fields_set]
    if not metrics_options:
        return []
    problems: list[Problem] = []
    if settings.metrics_enable and not listen_addresses(settings.rest_bind_address, settings.rest_port):
        message = "metrics require the REST port, and --rest-port is 0"
        problems.append(Problem(message, path=option_name(metrics_options[0]), suggestion="set --rest-port"))
    problems += [
        Problem("metrics are disabled", path=option_name(name), suggestion="remove one of them")
        for name in _METRIC_LISTS
        if getattr(settings, name) is not None and not settings.metrics_enable
    ]
    return problems


def _single_problems(settings: ServerSettings) -> list[Problem]:
    own = set(_MODEL_KEYS.values())
    if is_text_model(settings):
        return [*text_problems(settings, others=set(_MODEL_OPTIONS) - own), *_own_problems(settings)]
    if not _is_graph(settings):
        hint = "remove it, or set --task"
        texts = _misplaced(settings, _TEXT_OPTIONS, "is an option of text models", hint)
        return [*texts, *_read_model(settings)[1]]
    texts = _misplaced(settings, _TEXT_OPTIONS, "is an option of models, not of graphs", "set it in the graph file")
    models = [name for name in _MODEL_OPTIONS if name not in own]
    of_models = _misplaced(settings, models, "is an option of models, not of graphs", "remove it")
    return [*texts, *of_models, *_own_problems(settings)]


def _misplaced(settings: ServerSettings, names: Iterable[str], message: str, hint: str) -> list[Problem]:
    given = [name for name in names if name in settings.model_fields_set]
    return [Problem(message, path=option_name(name), suggestion=hint) for name in given]


def _is_graph(settings: ServerSettings) -> bool:
    path = settings.model_path
    return path is not None and (path.suffix == GRAPH_SUFFIX or is_file(_graph_files(settings).graph_path))


def _graph_files(settings: ServerSettings) -> GraphFiles:
    path = (settings.model_path or Path()).absolute()
    if path.suffix == GRAPH_SUFFIX and not is_folder(path):
        return find_graph({"base_path": str(path.parent), "graph_path": path.name}, path.parent)
    return find_graph({"base_path": str(path)}, path)


def _read_model(settings: ServerSettings) -> tuple[dict[str, Any], list[Problem]]:
    options = {name: getattr(settings, name) for name in _MODEL_OPTIONS if name in settings.model_fields_set}
    fields, problems = parse_model_options(options)
    placed = [replace(problem, path=option_name(problem.path)) for problem in problems]
    return fields, placed + _own_problems(settings)


def _own_problems(settings: ServerSettings) -> list[Problem]:
    problems = [*check_name(settings.model_name or ""), *check_base_path(str(settings.model_path or ""))]
    return [replace(problem, path=option_name(_MODEL_KEYS[problem.path])) for problem in problems]
