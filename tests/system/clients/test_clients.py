from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.catalogue import (
    CLIENTS,
    DOCUMENT,
    PROGRAMS,
    TEXT_CLIENTS,
    Client,
    run_client,
    serving_repository,
    serving_texts,
)
from tests.clients.node_packages import NODE
from tests.support.served_in_thread import ServedInThread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    with serving_repository(tmp_path_factory.mktemp("repository")) as running:
        yield running


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    with serving_texts(tmp_path_factory.mktemp("texts")) as running:
        yield running


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.program)
def test_a_client_of_tensor_models_works_unmodified(server: ServedInThread, client: Client) -> None:
    if not client.version:
        pytest.skip(f"{client.package} is not installed")
    outcome = run_client(client, server)
    assert outcome.result == "passes", outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("client", TEXT_CLIENTS, ids=lambda client: client.program)
def test_a_client_of_openais_api_works_unmodified(request: pytest.FixtureRequest, client: Client) -> None:
    if not client.version:
        pytest.skip(f"{client.package} is not installed")
    outcome = run_client(client, request.getfixturevalue("texts"))
    assert outcome.result == "passes", outcome.output


def test_the_documented_table_lists_every_program_without_failures() -> None:
    text = DOCUMENT.read_text()
    assert "| fails |" not in text
    every = (*CLIENTS, *TEXT_CLIENTS)
    assert all(f"`{client.program}`" in text for client in every)
    programs = {path.stem for path in (*Path(PROGRAMS).glob("*.py"), *NODE.glob("*.mjs"))} - {"arguments"}
    assert programs == {client.program for client in every}
