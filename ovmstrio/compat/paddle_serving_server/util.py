"""``ArgsParser``, the command line of many service scripts."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import TYPE_CHECKING

from ovmstrio.ops.config_file import CONFIG_VARIABLE, conf_dict

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CONFIG_VARIABLE", "ArgsParser"]


class ArgsParser(ArgumentParser):
    """Parser of ``-c/--config`` and ``-o/--opt key.key=value ...``; ``conf_dict`` of the result merges both.

    Without ``-c`` the file is ``$OVMS_PIPELINE_CONFIG``.
    """

    def __init__(self) -> None:
        super().__init__(formatter_class=RawDescriptionHelpFormatter)
        self.add_argument("-c", "--config", default=os.environ.get(CONFIG_VARIABLE), help="configuration file to use")
        self.add_argument("-o", "--opt", nargs="+", help="set configuration options")

    def parse_args(self, argv: Sequence[str] | None = None) -> Namespace:  # type: ignore[override]
        """Parse the arguments and read the file.

        Raises:
            ConfigError: the file cannot be read, or an option is not ``key=value``.
        """
        args: Namespace = super().parse_args(argv)
        if args.config is None:
            self.error("Please specify --config=configure_file_path.")
        args.conf_dict = conf_dict(Path(args.config), args.opt or ())
        return args
