"""Settings that come with a request to load a model, in the words of ``config.json`` or of Triton's ``ModelConfig``.

A client may send back what it was told of a configuration, changed in one place.  What only describes the model is
therefore taken and passed over; what sets something is read as the option that does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ovmstrio.config.findings import did_you_mean, wrong
from ovmstrio.config.model_options import MODEL_OPTIONS, read_model_options
from ovmstrio.config.path_properties import refuse_paths
from ovmstrio.config.shapes import object_in_text
from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["read_overrides"]

_DESCRIBING: Final = frozenset(
    {
        *("name", "platform", "backend", "runtime", "input", "output", "default_model_filename", "parameters"),
        *("sequence_batching", "dynamic_batching", "model_transaction_policy", "instance_group", "optimization"),
        *("model_warmup", "response_cache", "batch_input", "batch_output", "metric_tags", "cc_model_filenames"),
    }
)
_POLICY: Final = "version_policy"
_ROWS: Final = "max_batch_size"
_MOST_ROWS: Final = 65_536
_MAX_UNKNOWN_KEYS: Final = 8
"""Unknown keys in one error; a suggestion for each takes a millisecond."""


def read_overrides(text: str) -> tuple[dict[str, Any], list[str]]:
    """Read settings.

    Args:
        text: a JSON object.

    Returns:
        Fields of ``ModelSpec``, and the keys that have no effect here.

    Raises:
        ConfigError: with everything that is wrong.
    """
    given = object_in_text("config", text)
    strangers = [key for key in given if key not in {*_DESCRIBING, *MODEL_OPTIONS, _POLICY, _ROWS}]
    problems = [
        Problem(f"unknown key {key!r}", path=f"config.{key}", suggestion=did_you_mean(key, MODEL_OPTIONS))
        for key in strangers[:_MAX_UNKNOWN_KEYS]
    ]
    options = {key: value for key, value in given.items() if key in MODEL_OPTIONS}
    try:
        options |= _translated(given)
    except ConfigError as error:
        problems += error.problems
    fields, wrong_values = read_model_options(options)
    problems += wrong_values
    problems += refuse_paths(fields.get("plugin_config", {}))
    if problems:
        # What a file may have wrong with a warning, a client is told: it waits for the answer.
        raise ConfigError(problems)
    return fields, sorted(_DESCRIBING & given.keys())


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Say what Triton's words mean in those of ``config.json``."""
    options: dict[str, Any] = {}
    if _POLICY in given:
        options["model_version_policy"] = given[_POLICY]
    if _ROWS in given and (rows := _rows(given[_ROWS])):
        options["batch_size"] = f"1:{rows}"
    return options


def _rows(value: Any) -> int:
    """Read a number, which protobuf's JSON may have as a text."""
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()) or int(text[:9]) > _MOST_ROWS:
        raise wrong(f"config.{_ROWS}", value, f"an integer of 0 to {_MOST_ROWS}")
    return int(text)
