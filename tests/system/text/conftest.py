from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from ovmstrio.text.text_model import TextModel
from tests.support.served_text_models import HostOf, ModelHost, hosts_of, serve_without_bound, server_of
from tests.support.tiny_llm import write_tiny_folder

ServeTiny = Callable[..., AbstractAsyncContextManager[TextModel]]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def host_of(tiny_folder: Path) -> Iterator[HostOf]:
    defaults = {"name": "tiny", "path": tiny_folder, "cache_size": 0.002}
    with hosts_of(lambda **settings: serve_without_bound(**{**defaults, **settings})) as host:
        yield host


@pytest.fixture(scope="module")
def model(host_of: HostOf) -> ModelHost:
    return host_of()


@pytest.fixture
def serve_tiny(tiny_folder: Path) -> ServeTiny:
    """Load the model while a block lasts, with settings."""
    return server_of(name="tiny", path=tiny_folder, cache_size=0.002)
