"""Optional dependencies of the server and their installation command."""

from ovmstrio.util.extras import Extra, way_to_install

__all__ = ["Extra", "way_to_install"]
