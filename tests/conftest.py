"""What all tests share: slow tests need a flag."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A machine that is busy with something else must not fail a property.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that lets slow tests run."""
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless they were asked for."""
    if config.getoption("--run-slow"):
        return
    skip = pytest.mark.skip(reason="slow; --run-slow runs it")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
