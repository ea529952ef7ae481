"""Public API for optional dependencies, and for the packages that user code of other servers imports."""

from ovmstrio.isolation.compat_path import COMPAT_FOLDER, add_compat_path
from ovmstrio.util.deprecation import forward_names
from ovmstrio.util.extras import Extra, install_command

__all__ = ["COMPAT_FOLDER", "Extra", "add_compat_path", "install_command"]

__getattr__ = forward_names(__name__, __name__, {"way_to_install": "install_command"})
