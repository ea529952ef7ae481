"""What a service manager and a server have to do with each other: sockets at the start, and news from then on."""

from ovmstrio.server.systemd.inherited import managed
from ovmstrio.server.systemd.notifier import Notifier

__all__ = ["Notifier", "managed"]
