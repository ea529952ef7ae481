"""Addresses of the server: ``program GRPC REST``, each ``host:port``."""

from __future__ import annotations

import sys

__all__ = ["GRPC", "REST"]

GRPC, REST = sys.argv[1:3]
