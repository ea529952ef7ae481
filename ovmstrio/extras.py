"""Public API for optional dependencies: the extras, and the command that installs an extra."""

from ovmstrio.util.extras import Extra, way_to_install

__all__ = ["Extra", "way_to_install"]
