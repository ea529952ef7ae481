"""The command line of ``ovms serve``, read into settings and, for a single model or graph, into its spec.

Everything that is wrong with a command line is said at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from ovmstrio.config.config_file import Subconfigs, check_families
from ovmstrio.config.documents import did_you_mean, expected_by, shown
from ovmstrio.config.graph_entries import GRAPH_SUFFIX, GraphFiles, find_graph, is_graph
from ovmstrio.config.model_options import check_base_path, check_name, read_model_options
from ovmstrio.config.specs import GraphSpec, ModelSpec, ServerSpec, TextModelSpec
from ovmstrio.config.text_entries import TEXT_OPTIONS, read_task, read_text_options
from ovmstrio.core.connection import TrustedProxies
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.metric_families import families_like
from ovmstrio.graphs.kind import text_graph_of
from ovmstrio.server.settings import EVERYWHERE, IGNORED, MODEL, TEXT, ServerSettings
from ovmstrio.telemetry.log_levels import read_log_levels

__all__ = [
    "CONFIGURING",
    "WAYS_OUT",
    "UsageProblems",
    "cache_directory",
    "contradictions",
    "ignored_options",
    "is_text_model",
    "listen_addresses",
    "makes_text",
    "metric_families",
    "probe_addresses",
    "read_settings",
    "refused_options",
    "single_servable",
    "text_model",
    "text_problems",
    "with_source_in_place",
]

# ----------------------------------------------------------------------
# Options of OpenVINO Model Server that mean something there and nothing here, each with what to do in its place
# ----------------------------------------------------------------------

_FETCHING: Final = (
    "models are fetched from no hub: put the model's folder, or its .gguf, in place and name it with --model_name and "
    "--model_path, with --source_model and --model_repository_path for a folder of that name in this one, or in the "
    "file of --config_path; ovms prepare makes it of files of other formats, and "
    "ovms prepare --sample chat has a model that chats"
)
_DRAFTING: Final = "the model of --draft_models_path has the settings of the first: leave it out, answers are the same"
_IMAGES: Final = "models that take or make images are not served: leave it out"
_ENGINE: Final = 'it is no option here; what is one of OpenVINO goes into --plugin_config, such as {"NUM_STREAMS": "1"}'
_CONFIGURING: Final = (
    "no files are written for models: --task and its options serve a folder as it is, and --add_to_config puts it into "
    "model_config_list or text_model_config_list of the file of --config_path"
)

CONFIGURING: Final = frozenset({"list_models", "add_to_config", "remove_from_config"})
"""Options that stand for commands of their own."""

WAYS_OUT: Final = {
    **dict.fromkeys(
        (
            "pull",
            "source_model",
            "model_repository_path",
            "gguf_filename",
            "overwrite_models",
            "weight_format",
            "extra_quantization_params",
            "source_loras",
            "draft_source_model",
        ),
        _FETCHING,
    ),
    **dict.fromkeys(
        (
            "draft_cache_size",
            "draft_eagle3_mode",
            "draft_max_num_batched_tokens",
            "draft_max_num_seqs",
        ),
        _DRAFTING,
    ),
    **dict.fromkeys(
        (
            "allowed_local_media_path",
            "allowed_media_domains",
            "default_num_inference_steps",
            "default_resolution",
            "guidance_scale",
            "max_num_images_per_prompt",
            "max_num_inference_steps",
            "max_resolution",
            "num_images_per_prompt",
            "resolution",
        ),
        _IMAGES,
    ),
    **dict.fromkeys(
        ("cache_interval_multiplier", "max_prompt_len", "model_distribution_policy", "model_type", "num_streams"),
        _ENGINE,
    ),
    "configure": _CONFIGURING,
    "trace_path": "times of calls are in /metrics, and those of each node of a pipeline of Ops in ovms trace",
}
"""What to do in place of an option; options that are accepted without effect are ``settings.IGNORED``."""


def refused_options(arguments: Iterable[str]) -> list[str]:
    """Say what to do in place of the options of OVMS among arguments that are not served: a line for each way out."""
    names = (_name_of(argument) for argument in arguments)
    by_way_out: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if name in WAYS_OUT:
            by_way_out.setdefault(WAYS_OUT[name], []).append(f"--{name}")
    return [f"{', '.join(options)}: {way_out}" for way_out, options in by_way_out.items()]


_FETCHED: Final = ("source_model", "model_repository_path", "gguf_filename")
_NEVER_IN_PLACE: Final = frozenset({"pull", "overwrite_models"})


def with_source_in_place(arguments: Sequence[str]) -> list[str]:
    """Write a model that OVMS would not fetch again, for its folder is there, as ``--model_name`` and ``--model_path``.

    ``--source_model Org/Model`` is the folder of that name in ``--model_repository_path``, of which ``--gguf_filename``
    is one file.  Arguments that want anything else are given as they are.
    """
    rest: list[str] = []
    said: dict[str, str] = {}
    names = {_name_of(argument) for argument in arguments}
    ahead = iter(arguments)
    for argument in ahead:
        if _name_of(argument) in _FETCHED:
            _, is_attached, value = argument.partition("=")
            said[_name_of(argument)] = value if is_attached else next(ahead, "")
        else:
            rest.append(argument)
    repository = said.get("model_repository_path") or os.environ.get("OVMS_MODEL_REPOSITORY_PATH", "")
    source = said.get("source_model", "")
    path = Path(repository) / source / said.get("gguf_filename", "")
    if not (repository and source) or names & _NEVER_IN_PLACE or "model_path" in names or not path.exists():
        return list(arguments)
    named = [] if "model_name" in names else ["--model_name", source]
    return [*rest, *named, "--model_path", str(path)]


def _name_of(argument: str) -> str:
    return argument[2:].partition("=")[0].replace("-", "_") if argument.startswith("--") else ""


# ----------------------------------------------------------------------
# A model of text that the command line describes: ``ovms serve --model_name NAME --model_path PATH --task TASK``
# ----------------------------------------------------------------------

_GGUF: Final = ".gguf"
_FILES_OF_GENERATION: Final = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")
"""What a folder holds that makes text, and no folder of another kind."""


def is_text_model(settings: ServerSettings) -> bool:
    """Tell whether one model is served, and whether that is a model of text: by its task, else by its files."""
    if settings.model_name is None or settings.model_path is None:
        return False
    path = settings.model_path
    if settings.task is not None or path.suffix == _GGUF:
        return True
    whole = path.absolute()
    return makes_text(whole) and not is_graph({"base_path": str(whole)}, whole)


def text_problems(settings: ServerSettings, others: Collection[str]) -> list[Problem]:
    """Tell everything that is wrong with the options; ``others`` are those of models of tensors."""
    problems = [
        Problem(
            "is an option of models of tensors, and this is a model of text",
            path=f"--{name}",
            suggestion="leave it out",
        )
        for name in sorted(set(others) & settings.model_fields_set - TEXT_OPTIONS)
    ]
    return problems + _read(settings)[2]


def text_model(settings: ServerSettings, cache_dir: Path | None, origin: str) -> TextModelSpec:
    """Give the model."""
    path = (settings.model_path or Path()).absolute()
    task, fields, problems = _read(settings)
    if "max_queue" in settings.model_fields_set:
        # There is one queue then, of those that wait for room in this model's cache.
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


def makes_text(folder: Path) -> bool:
    """Tell whether a folder holds what openvino-genai makes text of."""
    return all((folder / name).is_file() for name in _FILES_OF_GENERATION)


def _read(settings: ServerSettings) -> tuple[Task, dict[str, Any], list[Problem]]:
    try:
        task = Task.TEXT_GENERATION if settings.task is None else read_task(settings.task)
    except ConfigError as error:
        return Task.TEXT_GENERATION, {}, [_option(problem) for problem in error.problems]
    given = {name: getattr(settings, name) for name in sorted(TEXT_OPTIONS & settings.model_fields_set)}
    given = {name: value for name, value in given.items() if value is not None}
    fields, problems = read_text_options(task, given, Path.cwd())
    return task, fields, [_option(problem) for problem in problems]


def _option(problem: Problem) -> Problem:
    return replace(problem, path=f"--{problem.path}")


# ----------------------------------------------------------------------
# The command line of ``ovms serve``, read into settings and, for a single model or graph, into its spec
# ----------------------------------------------------------------------

_ORIGIN: Final = "the command line"
_OVMS_CACHE: Final = Path("/opt/cache")
_UNIX: Final = "unix:"


class UsageProblems(Exception):
    """A command line that cannot be used; ``problems`` have the options as their paths."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)

    @property
    def lines(self) -> list[str]:
        """The problems in words, a line each."""
        return [str(problem) for problem in self.problems]


def read_settings(options: Mapping[str, Any], *, foreign: str = "") -> ServerSettings:
    """Make settings of the options that were given; texts are converted.

    With ``foreign`` something else than models is served, whose own file says what it is and where it listens; it is
    what is said of options that are for models.

    Raises:
        UsageProblems: options that do not exist, values out of bounds, or options that exclude or need each other.
    """
    given = {name: value for name, value in options.items() if value is not None}
    problems: list[Problem] = []
    try:
        settings = ServerSettings.model_validate(given)
    except ValidationError as error:
        bad = {str(fault["loc"][0]): fault for fault in error.errors(include_url=False)}
        problems += [_refused(option, fault) for option, fault in bad.items()]
        # The rest is judged with the defaults in place of what was refused.
        settings = ServerSettings.model_validate({name: value for name, value in given.items() if name not in bad})
    problems += [*_security(settings), *_metric_lists(settings), *_log_levels(settings)]
    if foreign:
        problems += [Problem(foreign, path=f"--{name}") for name in sorted(_OF_MODELS & settings.model_fields_set)]
    else:
        problems += [*_addresses(settings), *_groups(settings), *_metrics(settings)]
    if _is_single_model(settings) and not foreign:
        problems += [problem for problem in _single_problems(settings) if problem.severity == "error"]
    if problems:
        raise UsageProblems(problems)
    return settings


def single_servable(settings: ServerSettings) -> ServerSpec:
    """Give what the command line describes: a model, a graph with the models of its subconfig, or nothing."""
    if settings.model_name is None or settings.model_path is None:
        return ServerSpec()
    if is_text_model(settings):
        return ServerSpec(services=(text_model(settings, cache_directory(settings), _ORIGIN),))
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
    models = [model.spec for model in subconfigs.known.values() if model.spec.name != name]
    if len(models) < len(subconfigs.known):
        message = f"Given mediapipe graph name is already occupied: a model of {files.subconfig} is called {name!r}"
        problems = (*problems, Problem(message, path="--model_name", suggestion="call one of them otherwise"))
    cache = cache_directory(settings)
    graph = GraphSpec(name=name, origin=_ORIGIN, problems=problems, cache_dir=cache, **files._asdict())
    text = text_graph_of(graph, cache)
    warnings = () if text is None else text.warnings
    return ServerSpec(services=(*models, text.spec if text else graph), problems=(*subconfigs.problems, *warnings))


def ignored_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Tell which of the options that were given have no effect, and why."""
    reasons = {name: IGNORED[name] for name, value in options.items() if name in IGNORED and value is not None}
    given = {name: value for name, value in options.items() if name in _MODEL_OPTIONS and value is not None}
    for problem in read_model_options(given)[1]:
        if problem.severity == "warning":
            reasons[problem.path] = problem.message
    return reasons


def contradictions(settings: ServerSettings, spec: ServerSpec) -> list[Problem]:
    """Tell where the command line and a configuration file exclude each other; the server must not start then."""
    if spec.metrics is None:
        return []
    problem = Problem("", file=str(settings.config_path or ""), path="monitoring.metrics")
    given = sorted({"metrics_enable", *_METRIC_LISTS} & settings.model_fields_set)
    if given:
        message = f"metrics are set here and by --{given[0]}"
        return [replace(problem, message=message, suggestion="leave one of them out")]
    if spec.metrics.enable and not settings.rest_port:
        message = "metrics are served on the REST port, and --rest_port is 0"
        return [replace(problem, message=message, suggestion="set --rest_port, or enable to false")]
    return []


def metric_families(settings: ServerSettings) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Give the families that the command line asks for: OVMS's, and the server's own; None for the default set."""
    if settings.metrics_families is not None:
        chosen = families_like(_parts(settings.metrics_families))
        return chosen, chosen
    return None if settings.metrics_list is None else _parts(settings.metrics_list), None


def cache_directory(settings: ServerSettings) -> Path | None:
    """Give where compiled models are kept: what was asked for, else OVMS's own place if it exists."""
    return settings.cache_dir or (_OVMS_CACHE if _OVMS_CACHE.is_dir() else None)


def listen_addresses(addresses: str, port: int, *, zero_is_any: bool = False) -> list[str]:
    """Spell out where to listen: each comma-separated address with the port.

    Port 0 leaves socket files only, unless it stands for any that is free.
    """
    parts = _parts(addresses)
    return [_with_port(part, port) for part in parts if port or zero_is_any or part.startswith(_UNIX)]


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _with_port(address: str, port: int) -> str:
    if address.startswith(_UNIX):
        return address
    return f"[{address.strip('[]')}]:{port}" if ":" in address else f"{address}:{port}"


def _refused(option: str, fault: Any) -> Problem:
    if fault["type"] == "extra_forbidden":
        suggestion = did_you_mean(option, ServerSettings.model_fields)
        return Problem("there is no such option", path=f"--{option}", suggestion=suggestion)
    return Problem(
        "the value cannot be used", path=f"--{option}", expected=expected_by(fault), found=shown(fault["input"])
    )


def _addresses(settings: ServerSettings) -> list[Problem]:
    both = Problem("", path="--port and --rest_port")
    grpc = listen_addresses(settings.grpc_bind_address, settings.port)
    rest = listen_addresses(settings.rest_bind_address, settings.rest_port)
    if not grpc and not rest:
        return [replace(both, message="both are off", suggestion="give one of them a port")]
    if settings.port and settings.port == settings.rest_port:
        return [replace(both, message=f"both are {settings.port}", suggestion="give them different ports")]
    return []


def probe_addresses(settings: ServerSettings) -> list[str]:
    """Give the addresses for probes: those of REST that have ports, and all of the machine's where none has."""
    addresses = listen_addresses(settings.rest_bind_address, settings.probe_port)
    return [each for each in addresses if not each.startswith("unix:")] or listen_addresses(
        EVERYWHERE, settings.probe_port
    )


def _options_of(group: str) -> tuple[str, ...]:
    fields = ServerSettings.model_fields.items()
    return tuple(name for name, field in fields if (field.json_schema_extra or {}) == {"group": group})


_MODEL_OPTIONS: Final = _options_of(MODEL)
_TEXT_OPTIONS: Final = _options_of(TEXT)
_OF_MODELS: Final = {*_MODEL_OPTIONS, *_TEXT_OPTIONS, "config_path", "allow_empty", "cache_dir", "workers"}
"""Options that say nothing where no models are served."""
_MODEL_KEYS: Final = {"name": "model_name", "base_path": "model_path"}
"""Options that a configuration file calls otherwise."""


def _is_single_model(settings: ServerSettings) -> bool:
    return settings.model_name is not None and settings.model_path is not None


def _groups(settings: ServerSettings) -> list[Problem]:
    """Check that what belongs to one model comes with a model, and not with a configuration file."""
    given = [name for name in (*_MODEL_OPTIONS, *_TEXT_OPTIONS) if name in settings.model_fields_set]
    options = ", ".join(f"--{name}" for name in given)
    if settings.config_path is not None and given:
        message = "cannot be used together with --config_path, which configures every model"
        return [Problem(message, path=options, suggestion="leave one of them out")]
    if given and not _is_single_model(settings):
        missing = " and ".join(f"--{name}" for name in _MODEL_KEYS.values() if getattr(settings, name) is None)
        return [Problem("needs a model", path=options, suggestion=f"give {missing} as well")]
    return []


def _security(settings: ServerSettings) -> list[Problem]:
    problems = []
    if settings.probe_port and settings.probe_port in {settings.port, settings.rest_port}:
        message = f"{settings.probe_port} is the port of a protocol"
        problems.append(Problem(message, path="--probe_port", suggestion="give probes a port of their own"))
    if (settings.tls_cert is None) != (settings.tls_key is None):
        problems.append(Problem("each needs the other", path="--tls_cert and --tls_key"))
    if settings.client_ca is not None and settings.tls_cert is None:
        problems.append(Problem("needs --tls_cert and --tls_key", path="--client_ca"))
    try:
        TrustedProxies.parse(settings.trusted_proxies)
    except ValueError as error:
        problems.append(Problem(str(error), path="--trusted_proxies"))
    return [*problems, *_token_problems(settings)]


def _token_problems(settings: ServerSettings) -> list[Problem]:
    """Check what says which tokens are taken; keys that came unprotected could be anybody's."""
    problems = []
    if settings.jwt_audience is not None and settings.jwks_file is None and settings.oidc_issuer is None:
        problems.append(Problem("needs --jwks_file or --oidc_issuer", path="--jwt_audience"))
    issuer = urlsplit(settings.oidc_issuer or "")
    is_safe = issuer.scheme == "https" or settings.jwks_file is not None
    if settings.oidc_issuer is not None and not (is_safe or issuer.hostname in _THIS_MACHINE):
        expected = "an address that begins with https://"
        problems.append(Problem("keys cannot be had from there", "", None, "--oidc_issuer", expected, issuer.geturl()))
    return problems


_THIS_MACHINE: Final = {"localhost", "127.0.0.1", "::1"}


def _log_levels(settings: ServerSettings) -> list[Problem]:
    try:
        read_log_levels(settings.log_levels or "")
    except ValueError as error:
        return [Problem(str(error), path="--log_levels")]
    return []


_METRIC_LISTS: Final = ("metrics_list", "metrics_families")


def _metric_lists(settings: ServerSettings) -> list[Problem]:
    given = {name: getattr(settings, name) for name in _METRIC_LISTS if getattr(settings, name) is not None}
    if len(given) > 1:
        path = " and ".join(f"--{name}" for name in given)
        return [Problem("each says which families are served", path=path, suggestion="leave one of them out")]
    return [
        Problem(message, path=f"--{name}", suggestion=suggestion)
        for name, names in given.items()
        for _, message, suggestion in check_families(_parts(names), patterns=name == "metrics_families")
    ]


def _metrics(settings: ServerSettings) -> list[Problem]:
    asked = [name for name in ("metrics_enable", *_METRIC_LISTS) if name in settings.model_fields_set]
    if not asked:
        return []
    problems: list[Problem] = []
    if settings.metrics_enable and not listen_addresses(settings.rest_bind_address, settings.rest_port):
        message = "metrics are served on the REST port, and --rest_port is 0"
        problems.append(Problem(message, path=f"--{asked[0]}", suggestion="set --rest_port"))
    problems += [
        Problem("metrics are turned off", path=f"--{name}", suggestion="leave one of them out")
        for name in _METRIC_LISTS
        if getattr(settings, name) is not None and not settings.metrics_enable
    ]
    return problems


def _single_problems(settings: ServerSettings) -> list[Problem]:
    own = set(_MODEL_KEYS.values())
    if is_text_model(settings):
        return [*text_problems(settings, others=set(_MODEL_OPTIONS) - own), *_own_problems(settings)]
    if not _is_graph(settings):
        way_out = "leave it out, or say with --task what the model does"
        texts = _misplaced(settings, _TEXT_OPTIONS, "is an option of models of text", way_out)
        return [*texts, *_read_model(settings)[1]]
    texts = _misplaced(settings, _TEXT_OPTIONS, "is an option of models, and this is a graph", "set it in its file")
    models = [name for name in _MODEL_OPTIONS if name not in own]
    of_models = _misplaced(settings, models, "is an option of models, and this is a graph", "leave it out")
    return [*texts, *of_models, *_own_problems(settings)]


def _misplaced(settings: ServerSettings, names: Iterable[str], message: str, way_out: str) -> list[Problem]:
    given = [name for name in names if name in settings.model_fields_set]
    return [Problem(message, path=f"--{name}", suggestion=way_out) for name in given]


def _is_graph(settings: ServerSettings) -> bool:
    path = settings.model_path
    return path is not None and (path.suffix == GRAPH_SUFFIX or _graph_files(settings).graph_path.is_file())


def _graph_files(settings: ServerSettings) -> GraphFiles:
    path = (settings.model_path or Path()).absolute()
    if path.suffix == GRAPH_SUFFIX and not path.is_dir():
        return find_graph({"base_path": str(path.parent), "graph_path": path.name}, path.parent)
    return find_graph({"base_path": str(path)}, path)


def _read_model(settings: ServerSettings) -> tuple[dict[str, Any], list[Problem]]:
    options = {name: getattr(settings, name) for name in _MODEL_OPTIONS if name in settings.model_fields_set}
    fields, problems = read_model_options(options)
    placed = [replace(problem, path=f"--{problem.path}") for problem in problems]
    return fields, placed + _own_problems(settings)


def _own_problems(settings: ServerSettings) -> list[Problem]:
    problems = [*check_name(settings.model_name or ""), *check_base_path(str(settings.model_path or ""))]
    return [replace(problem, path=f"--{_MODEL_KEYS[problem.path]}") for problem in problems]
