"""Changes of the key file while requests come: what is in force, and what stays counted."""

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

CHAT = {"model": "org/demo", "messages": [{"role": "user", "content": "Hi"}]}


def entry(key: str, **fields: Any) -> dict[str, Any]:
    return {"hash": "sha256:" + hashlib.sha256(key.encode()).hexdigest(), "name": key, **fields}


class Keyed:
    """An app with a key file that tests change."""

    def __init__(self, path: Path, make_app: Callable[..., FastAPI]):
        self.path = path
        self.write([entry("ann"), entry("bob")])
        self._app = make_app(api_keys_file=str(path))

    def write(self, content: Any, mode: int = 0o600) -> None:
        """Replace the file, as an editor or `orchard keys` does."""
        new = self.path.with_suffix(".new")
        new.write_text(content if isinstance(content, str) else json.dumps(content))
        new.chmod(mode)
        os.replace(new, self.path)

    def status(self, key: str) -> int:
        return self.ask(key).status_code

    def ask(self, key: str) -> httpx.Response:
        return asyncio.run(self._ask(key))[0]

    def ask_at_once(self, key: str, number: int) -> list[httpx.Response]:
        return asyncio.run(self._ask(key, number))

    async def _ask(self, key: str, number: int = 1) -> list[httpx.Response]:
        transport = httpx.ASGITransport(self._app, client=("10.0.0.7", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            headers = {"x-api-key": key}
            asked = (http.post("/v1/chat/completions", json=CHAT, headers=headers) for _ in range(number))
            return list(await asyncio.gather(*asked))


@pytest.fixture
def keyed(tmp_path: Path, make_app: Any) -> Keyed:
    return Keyed(tmp_path / "keys.json", make_app)


def test_a_new_key_is_accepted_and_a_revoked_one_refused_at_the_next_request(keyed: Keyed):
    assert [keyed.status(key) for key in ("ann", "bob", "eve")] == [200, 200, 401]
    keyed.write([entry("ann"), entry("eve")])
    assert [keyed.status(key) for key in ("ann", "bob", "eve")] == [200, 401, 200]


def test_the_last_key_can_be_revoked_and_the_server_still_asks_for_one(keyed: Keyed):
    keyed.write([])
    assert keyed.status("ann") == 401
    keyed.write([entry("eve")])
    assert keyed.status("eve") == 200


@pytest.mark.parametrize("broken", ["- {hash: ", "{}", "- {hash: plainsecret, name: x}", None])
def test_a_broken_or_missing_file_keeps_the_keys_and_is_logged_once(
    keyed: Keyed, broken: str | None, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, "orchard.http"):
        if broken is None:
            keyed.path.unlink()
        else:
            keyed.write(broken)
        assert [keyed.status(key) for key in ("ann", "bob", "eve")] == [200, 200, 401]
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1 and f"http.api_keys_file: {keyed.path}" in errors[0]
        assert "stay in force" in errors[0] and "plainsecret" not in errors[0]
        keyed.write([entry("eve")])
        assert [keyed.status(key) for key in ("ann", "eve")] == [401, 200]


def test_a_file_that_others_may_read_is_not_taken(keyed: Keyed, caplog: pytest.LogCaptureFixture):
    keyed.write([entry("eve")], 0o644)
    assert [keyed.status(key) for key in ("ann", "eve")] == [200, 401]
    assert "has the mode 0644" in caplog.text
    keyed.path.chmod(0o600)
    assert [keyed.status(key) for key in ("ann", "eve")] == [401, 200]


def test_a_changed_file_is_read_once_by_requests_that_come_together(keyed: Keyed, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "orchard.http"):
        keyed.write([entry("eve")])
        assert {answer.status_code for answer in keyed.ask_at_once("eve", 8)} == {200}
    assert sum("api_keys_file has changed: 1 keys" in message for message in caplog.messages) == 1


def test_what_a_key_has_used_stays_counted_when_the_file_changes(keyed: Keyed):
    keyed.write([entry("ann", max_requests_per_minute=2)])
    assert [keyed.status("ann") for _ in range(3)] == [200, 200, 429]
    keyed.write([entry("ann", max_requests_per_minute=2), entry("bob")])
    assert keyed.status("ann") == 429, "another key does not refill the allowance"
    keyed.write([entry("ann", max_requests_per_minute=5)])
    assert [keyed.status("ann") for _ in range(4)] == [200, 200, 200, 429], "two of five were used"
    keyed.write([entry("ann")])
    assert keyed.status("ann") == 200 and "x-ratelimit-limit-requests" not in keyed.ask("ann").headers
