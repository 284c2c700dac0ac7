"""`orchard keys`: the file it writes, and a running server that takes it."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.http.api_keys import read_api_keys
from deployments.http.config import HttpConfig
from tests.deployments.commands.conftest import Orchard
from tests.deployments.http.clients.conftest import ServerThread


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "Schlüssel und mehr" / "keys.yaml"


def test_a_key_is_printed_once_and_its_hash_is_what_a_server_accepts(orchard: Orchard, keys: Path):
    limits = ("--max-rows", 4, "--max-tokens-per-minute", 1000)
    status, key, note = orchard("keys", "add", "ann", "--tenant", "acme", "--admin", *limits, "--file", keys)
    assert status == 0 and "only time" in note and key.strip() not in note
    assert key.strip() not in keys.read_text() and stat.S_IMODE(keys.stat().st_mode) == 0o600
    found = read_api_keys(HttpConfig(api_keys_file=str(keys))).find(key.strip())
    assert found is not None and (found.name, found.tenant, found.client) == ("ann", "acme", "ann")
    assert found.is_administrative and (found.limits.max_rows, found.limits.max_tokens_per_minute) == (4, 1000)
    assert orchard("keys", "add", "ann", "--file", keys)[0] == 1, "the name is taken"
    listed = json.loads(orchard("keys", "ls", "--json", "--file", keys)[1])
    assert [one["name"] for one in listed["keys"]] == ["ann"] and key.strip() not in json.dumps(listed)
    assert "acme" in orchard("keys", "ls", "--file", keys)[1]


@pytest.fixture
def server(orchard: Orchard, keys: Path) -> Iterator[ServerThread]:
    orchard("keys", "add", "root", "--file", keys)
    server = ServerThread(HttpConfig(api_keys_file=str(keys)))
    server.start()
    yield server
    server.stop()


def test_a_running_server_takes_new_and_revoked_keys(orchard: Orchard, keys: Path, server: ServerThread):
    def status(key: str) -> int:
        return httpx.get(f"{server.base_url}/v1/models", headers={"x-api-key": key.strip()}).status_code

    key = orchard("keys", "add", "ann", "--file", keys)[1]
    assert status(key) == 200
    assert orchard("keys", "revoke", "ann", "--file", keys)[0] == 0
    assert status(key) == 401
    assert orchard("keys", "revoke", "root", "--file", keys)[0] == 0, "the last key can be revoked, too"
    assert status(key) == 401 and orchard("keys", "ls", "--file", keys)[0] == 0


def test_comments_and_other_keys_of_a_file_written_by_hand_are_kept(orchard: Orchard, keys: Path):
    keys.parent.mkdir()
    digits = "0f" * 32
    text = f"# our keys\n- hash: sha256:{digits}  # Ann's laptop\n  name: ann\n  tenant: acme\n"
    keys.write_text(text)
    keys.chmod(0o600)
    orchard("keys", "add", "bob", "--file", keys)
    orchard("keys", "add", "eve", "--file", keys)
    assert keys.read_text().startswith(text)
    orchard("keys", "revoke", "bob", "--file", keys)
    assert keys.read_text().startswith(text) and [one["name"] for one in yaml.safe_load(keys.read_text())] == [
        "ann",
        "eve",
    ]
    keys.write_text(json.dumps(yaml.safe_load(keys.read_text())))
    assert orchard("keys", "revoke", "ann", "--file", keys)[0] == 0, "a file in JSON is rewritten"
    assert [one["name"] for one in yaml.safe_load(keys.read_text())] == ["eve"]


def test_commands_at_the_same_time_lose_no_key(keys: Path):
    code = "import sys; from deployments.commands.program import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "keys", "add", "--file", str(keys)]
    running = [subprocess.Popen([*command, f"key-{i}"], stdout=subprocess.DEVNULL) for i in range(3)]
    assert [process.wait(60) for process in running] == [0] * 3
    assert {one["name"] for one in yaml.safe_load(keys.read_text())} == {f"key-{i}" for i in range(3)}
    assert not list(keys.parent.glob(".keys.yaml.??*[!k]")), "no unfinished file stays"


def test_the_file_is_that_of_the_configuration(orchard: Orchard, tmp_path: Path, keys: Path):
    args: dict[str, Any] = {"http": {"api_keys_file": str(keys)}}
    config = {"http_options": {"host": "127.0.0.1"}, "applications": [{"import_path": "deployments.app:build_app"}]}
    (tmp_path / "serve_config.yaml").write_text(yaml.safe_dump(config))
    status, _, note = orchard("keys", "add", "ann")
    default = tmp_path / "home" / ".config" / "orchard" / "keys.yaml"
    assert status == 0 and default.exists() and f"api_keys_file: {default}" in note
    config["applications"][0]["args"] = args  # pyright: ignore[reportArgumentType]
    (tmp_path / "serve_config.yaml").write_text(yaml.safe_dump(config))
    assert orchard("keys", "add", "ann")[0] == 0 and keys.exists()
    assert orchard("keys", "ls", "--config", "nowhere.yaml")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add", "a\nb"], "NAME is 'a\\nb': it must be 1 to 128 characters"),
        (["add", ""], "NAME is '': it must be"),
        (["add", "ann", "--tenant", " x"], "--tenant is ' x': it must be"),
        (["add", "ann", "--max-rows", "0"], "--max-rows is 0: it must be at least 1"),
        (["add", "ann", "--config", "x", "--file", "y"], "not allowed with"),
        ([], "ACTION"),
    ],
)
def test_wrong_usage_is_status_2_and_changes_nothing(orchard: Orchard, keys: Path, arguments: list[str], said: str):
    more = ["--file", keys] if arguments and "--file" not in arguments else []
    status, out, err = orchard("keys", *arguments, *more)
    assert status == 2 and said in err and not out and not keys.exists()


def test_what_cannot_be_written_or_read_is_named_and_leaves_the_file(orchard: Orchard, keys: Path, tmp_path: Path):
    orchard("keys", "add", "ann", "--file", keys)
    before = keys.read_text()
    status, _, err = orchard("keys", "revoke", "bob", "--file", keys)
    assert status == 1 and "no key with the name 'bob'; its keys: ann" in err
    keys.chmod(0o644)
    status, _, err = orchard("keys", "add", "bob", "--file", keys)
    assert status == 1 and "mode 0644" in err and keys.read_text() == before
    status, out, err = orchard("keys", "add", "bob", "--file", "/proc/keys.yaml")
    assert status == 1 and "cannot be changed" in err and not out
    status, out, err = orchard("keys", "add", "bob", "--file", tmp_path)
    assert status == 1 and not out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_leaves_the_file(orchard: Orchard, keys: Path, monkeypatch: pytest.MonkeyPatch):
    orchard("keys", "add", "ann", "--file", keys)
    before = keys.read_text()

    def fail(file: int) -> None:
        with open("/dev/full", "w") as full:
            full.write("x")

    monkeypatch.setattr("deployments.commands.key_file.os.fsync", fail)
    status, out, err = orchard("keys", "add", "bob", "--file", keys)
    assert status == 1 and "No space left" in err and "as it was" in err and not out
    assert keys.read_text() == before and len(list(keys.parent.iterdir())) == 2, "the keys and the lock"
