"""`orchard report`: what is taken out of texts, configurations and metrics, and an archive without a server."""

import json
import os
import stat
import tarfile
from pathlib import Path

import pytest
import yaml

from deployments.commands.report import figures, redacted_config, without_key_names
from deployments.commands.text_redaction import TextRedaction
from tests.deployments.commands.conftest import Orchard
from tests.e2e.server import free_port


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("from 10.1.2.3:4711 to 127.0.0.1:8000", "from [address]:4711 to 127.0.0.1:8000"),
        ("fe80::1c2d:3e4f and ::1 at 08:17:53", "[address] and ::1 at 08:17:53"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [secret]"),
        ("key orc-abcdefghijklmnop and hf_abcdefghijklmnop", "key [secret] and [secret]"),
        (f"hash: sha256:{'0f' * 32}", "hash: [secret]"),
        ("http://ann:pw@mac.example:80/v1 http://127.0.0.1/x", "http://[address]:80/v1 http://127.0.0.1/x"),
        ("/Users/ann/models and /home/bob/x", "~/models and ~/x"),
        ("ann@example.org, 3c:22:fb:00:11:22", "[address], [address]"),
        ("mlx 0.32.4, openblas 0.3.34.481.3, 12:30", "mlx 0.32.4, openblas 0.3.34.481.3, 12:30"),
        ("my-own-secret-word here", "[secret] here"),
    ],
)
def test_secrets_and_addresses_are_taken_out_and_the_rest_stays(text: str, left: str):
    assert TextRedaction(["my-own-secret-word"])(text) == left


def test_long_quoted_texts_of_logs_may_be_prompts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_TOKEN", "the-value-of-it")
    line = f"failed on {'w' * 70!r} with the-value-of-it, field 'model'"
    assert TextRedaction().log_line(line) == "failed on [text of 70 characters] with [secret], field 'model'"


def test_a_configuration_keeps_its_figures_and_loses_keys_prompts_and_addresses(tmp_path: Path):
    http = {"api_keys": [f"sha256:{'0f' * 32}"], "allowed_hosts": ["mac.example"], "max_body_bytes": 5000}
    engine = {"prefix_cache": {"pinned": [{"system": "You are secret."}], "max_gb": 3}}
    config = {
        "applications": [{"args": {"http": http, "engine": engine}, "runtime_env": {"env_vars": {"A": "secret"}}}]
    }
    path = tmp_path / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    text = redacted_config(path)
    assert "secret" not in text and "mac.example" not in text and "0f0f" not in text
    assert "max_body_bytes: 5000" in text and "max_gb: 3" in text and "(1 hidden)" in text


def test_names_of_keys_become_numbers_and_timelines_keep_figures():
    text = 'a{key="ann",x="1"} 3\nb{key="ann"} 4\na{key="bob \\"x\\""} 5\nc{key="all"} 6\n'
    assert without_key_names(text) == 'a{key="key-1",x="1"} 3\nb{key="key-1"} 4\na{key="key-2"} 5\nc{key="all"} 6\n'
    page = {"id": "mine", "key": "ann", "seconds": 1.5, "why": "it waited", "phases": [{"name": "plan", "what": "x"}]}
    assert figures(page) == {"seconds": 1.5, "why": "it waited", "phases": [{"name": "plan"}]}


def test_a_report_without_a_server_has_everything_else(
    orchard: Orchard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    logs = tmp_path / "ray" / "session_latest" / "logs" / "serve"
    logs.mkdir(parents=True)
    (logs / "proxy_10.1.2.3.log").write_text("INFO GET from 10.1.2.3\n" * 400)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    path = tmp_path / "mit Leerzeichen ü.tar.gz"
    url = f"http://127.0.0.1:{free_port()}"
    status, out, _ = orchard("report", "--url", url, "--output", path, "--json")
    assert status == 0 and json.loads(out)["files"]["versions.json"] > 1000
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with tarfile.open(path) as archive:
        files = {one.name.removeprefix("orchard-report/"): archive.extractfile(one) for one in archive}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert texts["status.json"].startswith("not available: Unreachable")
    assert json.loads(texts["versions.json"])["packages"]["ray"] == "2.60.0"
    assert texts["logs/proxy_[address].log"] == "INFO GET from [address]\n" * 300
    assert "10.1.2.3" not in "".join(texts.values())
    status, _, err = orchard("report", "--url", url, "--output", path)
    assert status == 1 and "File exists" in err, "nothing is overwritten"
