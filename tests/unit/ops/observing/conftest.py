"""What tests of log files have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def log_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the directory that log files will be in."""
    monkeypatch.setenv("SERVING_LOG_PATH", str(tmp_path))
    return tmp_path / "PipelineServingLogs"
