"""A headless Chromium, one for each module of tests, and pages that tolerate neither errors nor other hosts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

__all__ = ["OpenPage"]

PATIENCE_MS: Final = 60_000
_OPTIONS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)

OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a browser."""
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
    """Give what opens a page at an address, and sees at its end that nothing was wrong with it."""

    @contextmanager
    def opened(url: str, *, may_fail: bool = False, **options: Any) -> Iterator[Page]:
        wrong: list[str] = []
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()

        def refuse(dialog: Dialog) -> None:
            wrong.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        origin = "/".join(url.split("/", 3)[:3])
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda line: wrong.append(line.text) if line.type == "error" and not may_fail else None)
        page.on("request", lambda asked: None if asked.url.startswith((origin, "blob:")) else wrong.append(asked.url))
        page.on("dialog", refuse)
        try:
            page.goto(url)
            yield page
        finally:
            context.close()
        assert wrong == []

    return opened
