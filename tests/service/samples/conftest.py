from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ovmstrio.samples import prepare_repository
from tests.support.served_in_thread import ServedInThread, serving_in_thread


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_repository(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def server(embedded: Path) -> Iterator[ServedInThread]:
    with serving_in_thread(config_path=embedded) as running:
        yield running
