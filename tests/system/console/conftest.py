from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.console_services import write_services
from tests.support.served_in_thread import ServedInThread, serving_in_thread

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

OpenPage = Callable[..., AbstractContextManager[Any]]

_OPTIONS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=_OPTIONS)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> OpenPage:
    """Return a function that opens a page, and checks that it made no errors, dialogs or requests to other hosts."""

    @contextmanager
    def opened(url: str, *, may_fail: bool = False, **options: Any) -> Iterator[Page]:
        wrong: list[str] = []
        context = browser.new_context(**options)
        context.set_default_timeout(60_000)
        page = context.new_page()

        def refuse(dialog: Dialog) -> None:
            wrong.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        origin = "/".join(url.split("/", 3)[:3])
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda line: wrong.append(line.text) if line.type == "error" and not may_fail else None)
        page.on(
            "request", lambda request: None if request.url.startswith((origin, "blob:")) else wrong.append(request.url)
        )
        page.on("dialog", refuse)
        try:
            page.goto(url)
            yield page
        finally:
            context.close()
        assert wrong == []

    return opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    config = write_services(tmp_path_factory.mktemp("services"))
    with serving_in_thread(config_path=config) as served:
        yield served
