"""Configuration files written as dictionaries and read as the content of ``/etc/ovms/config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.config_file import ParsedConfig, parse_config, parse_config_leniently
from ovmstrio.config.specs import ServerSpec
from ovmstrio.core.errors import Problem
from ovmstrio.server.kinds import KINDS

CONFIG_FILE: Final = Path("/etc/ovms/config.json")


def config_content(**sections: Any) -> bytes:
    """Return a file with these sections and one key or item per line; the list of models is empty unless given."""
    return json.dumps({"model_config_list": [], **sections}, indent=1).encode()


def parse_sections(path: Path = CONFIG_FILE, **sections: Any) -> ServerSpec:
    return parse_config(KINDS.values(), config_content(**sections), path)


def examine_sections(**sections: Any) -> ParsedConfig:
    return parse_config_leniently(KINDS.values(), config_content(**sections), CONFIG_FILE)


def fatal_problems(**sections: Any) -> tuple[Problem, ...]:
    return examine_sections(**sections).fatal
