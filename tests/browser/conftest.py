"""One browser and one server for all tests of the page."""

from collections.abc import Callable, Iterator

import pytest

from tests.browser.chromium import Chromium, Window, find_chromium
from tests.browser.page_server import PageServer


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    browser = Chromium(find_chromium())
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def server(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    server = PageServer(tmp_path_factory.mktemp("page"))
    yield server
    server.close()


@pytest.fixture
def open_page(browser: Chromium, server: PageServer) -> Iterator[Callable[..., Window]]:
    """open_page(path, dark=..., width=..., height=...): a window in which no script may fail."""
    windows: list[Window] = []

    def open_one(path: str = "/", **options: object) -> Window:
        windows.append(browser.open(server.url + path, **options))  # type: ignore[arg-type]
        return windows[-1]

    yield open_one
    faults = [fault for window in windows for fault in window.faults()]
    for window in windows:
        window.close()
    assert not faults
