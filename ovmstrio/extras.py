"""What can be installed beside the server, and the command that does it: for programs that need an extra."""

from ovmstrio.util.extras import Extra, way_to_install

__all__ = ["Extra", "way_to_install"]
