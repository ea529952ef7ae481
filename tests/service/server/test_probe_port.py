"""A server that requires client certificates has a plain port for probes, which serves health only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import trio
import trustme

from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from tests.support import ir
from tests.support.served_plans import serving_plan
