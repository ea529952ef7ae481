"""Processes of our own that run what belongs to users, and how the server talks with them."""

from ovmstrio.work.processes.memory import make_file, map_file
from ovmstrio.work.processes.packets import PacketSocket, packet_pair
from ovmstrio.work.processes.program import describe_end, serve_descriptor, start_program

__all__ = [
    "PacketSocket",
    "describe_end",
    "make_file",
    "map_file",
    "packet_pair",
    "serve_descriptor",
    "start_program",
]
