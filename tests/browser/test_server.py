"""The tab of the server in a real browser, what both tabs look like on small and dark screens, and accessibility."""

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from hashlib import sha512
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Window
from tests.browser.page_server import PageServer
from tests.browser.test_chat import ask, set_settings

OpenPage = Callable[..., Window]

AXE = "axe-core-4.14.1"
AXE_SHA512 = "1477dafa598d8d065f273d6af302aa203c02e83131707b7fa648cd41bd3d6b73"
"""Beginning of the hash of the package's file, in hex digits."""
PICTURES = os.environ.get("ORCHARD_PICTURES")
"""Folder for screenshots; none are written without it."""


def test_the_tab_shows_the_figures_of_the_api_live(open_page: OpenPage, server: PageServer):
    page = open_page("/#server")
    page.wait_text("#server", "You use no key and see everything.")
    page.wait_text("#server", "Prefix cache")
    before = server.ingress.figures.status(shows_names=True)["keys"].get("none", {"num_answers": 0})
    page.run(
        "fetch('v1/chat/completions', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: "
        """'{"model": "demo", "messages": [{"role": "user", "content": "Hello!"}]}'}).then((one) => one.json())"""
    )
    num = 1 + before["num_answers"]
    page.wait(f"[...document.querySelectorAll('#server tr')].some((row) => row.innerText.startsWith('no key\\t{num}'))")
    text = page.text("#server")
    for part in ("Tokens a second", "rows running", "weights", "Queue", "MTP head", "Refusals by limit"):
        assert part in text
    assert len([url for url in page.requested() if url.endswith("/v1/status/stream")]) == 1


def test_the_stream_ends_with_the_tab_and_is_opened_again_when_the_server_comes_back(
    open_page: OpenPage, server: PageServer
):
    page = open_page("/#server")
    page.wait_text("#server", "is ready")
    server.go_away()
    try:
        page.wait_text("#connection", "The server does not answer.")
    finally:
        server.come_back()
    page.wait("document.querySelector('#connection').hidden")
    page.wait_text("#server", "is ready")
    page.click("#tab-chat")
    server.wait(lambda: not server.num_connections("/v1/status/stream"))


def queued(position: int, expected_wait_s: float | None) -> dict[str, Any]:
    counts = {"num_rows": 1, "num_bytes": 3 * 2**20, "waited_s": 2.5}
    return {"request_id": f"chatcmpl-{position}", "position": position, "expected_wait_s": expected_wait_s, **counts}


def test_queued_requests_have_positions_and_predicted_waits(
    open_page: OpenPage, server: PageServer, monkeypatch: pytest.MonkeyPatch
):
    status = server.call(server.ingress.status())
    [engine] = status["engines"]
    waiting = {"queue": (queued(1, 4.0), queued(2, None)), "num_waiting": 2, "expected_wait_s": 8.0}
    status |= {"num_waiting": 2, "engines": [{**engine, "engine": {**engine["engine"], **waiting}}]}

    async def full() -> dict[str, Any]:
        return status

    monkeypatch.setattr(server.scripted, "status", full)
    page = open_page("/scripted/#server")
    text = page.wait_text("#server", "2 requests wait. A new one is expected to wait 8.00 s.")
    assert "1\tchatcmpl-1\t1\t3.0 MB\t2.50 s\t4.00 s" in text
    assert "2\tchatcmpl-2\t1\t3.0 MB\t2.50 s\tunknown" in text


def test_tabs_are_reached_by_keys(open_page: OpenPage):
    page = open_page()
    page.run("document.getElementById('tab-chat').focus()")
    page.press("ArrowRight")
    assert page.run("document.activeElement.id") == "tab-server"
    assert page.run("[...document.querySelectorAll('[role=tabpanel]')].map((one) => one.hidden)") == [True, False]
    page.press("ArrowLeft")
    assert page.run("document.activeElement.id") == "tab-chat"


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_nothing_overflows_and_nothing_is_inaccessible(open_page: OpenPage, look: str, axe: str):
    size = {"width": 390, "height": 800} if look == "phone" else {}
    page = open_page(dark=look == "dark", **size)
    page.run(axe)
    set_settings(page, temperature="0", effort="low")
    ask(page, "What is 47 + 38?")
    page.wait_text(".answer .figures", "cached")
    page.click("button", "Why was this slow?")
    page.wait_text(".timeline", "the answer was generated")
    check(page, f"chat-{look}")
    page.click("#tab-server")
    page.wait_text("#server", "Slowest of the last requests")
    check(page, f"server-{look}")
    page.click("#open-settings")
    check(page, f"settings-{look}")


def check(page: Window, name: str) -> None:
    if PICTURES:
        page.picture(Path(PICTURES) / f"{name}.png")
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the window"
    found = json.loads(page.run("axe.run().then(({violations}) => JSON.stringify(violations))"))
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert not serious, [(name, one["id"], [node["html"][:200] for node in one["nodes"]]) for one in serious]


@pytest.fixture(scope="session")
def axe(pytestconfig: pytest.Config) -> str:
    """The script of axe-core, which the page never loads: from the npm registry, kept in pytest's cache."""
    folder = Path(str(pytestconfig.cache.mkdir("axe")))  # type: ignore[union-attr]
    file = folder / f"{AXE}.tgz"
    if not file.exists():
        package = AXE.replace("axe-core-", "axe-core@")
        try:
            command = ["npm", "pack", "--silent", package]
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            if os.environ.get("ORCHARD_CHROMIUM") == "required":
                raise
            pytest.skip(f"{package} cannot be fetched by npm ({error}), and ORCHARD_CHROMIUM is not `required`")
    content = file.read_bytes()
    assert sha512(content).hexdigest().startswith(AXE_SHA512), f"{file} is not the file that was meant"
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()
