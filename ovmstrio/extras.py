"""Public API for optional dependencies, and for the packages that user code of other servers imports."""

from ovmstrio.isolation.compat_path import COMPAT_FOLDER, add_compat_path
from ovmstrio.util.extras import Extra, way_to_install

__all__ = ["COMPAT_FOLDER", "Extra", "add_compat_path", "way_to_install"]
