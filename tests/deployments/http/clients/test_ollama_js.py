"""The ollama package of npm on the routes of Ollama's API."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deployments.http.clients.scripted import RAW_TEXT
from tests.e2e.clients.questions import CAPITAL, CAPITAL_THOUGHT, MODEL, SHAPE, TOOL_NAME

pytestmark = pytest.mark.night("the gate runs the Python package, which reads the same bytes")

SDKS = ()
PACKAGE = "ollama@0.6.4"
SCRIPT = Path(__file__).with_name("ollama_js.mjs")


def test_npms_package_chats_calls_tools_sees_and_embeds(base_url: str, red_circle: str, tmp_path: Path):
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("this machine has no npm")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(tmp_path), PACKAGE]
    subprocess.run(install, check=True, timeout=300, capture_output=True)
    image = red_circle.partition(",")[2]
    command = ["node", str(SCRIPT), str(tmp_path), base_url, image]
    ran = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    capital = found["capital"]
    assert (capital["content"], capital["thinking"], capital["done_reason"]) == (CAPITAL, CAPITAL_THOUGHT, "stop")
    assert capital["eval_count"] > 1
    [call] = found["weather"]["calls"]
    assert (call["name"], call["arguments"]) == (TOOL_NAME, {"city": "Paris"})
    assert found["whole"]["content"] == CAPITAL and found["image"]["content"] == SHAPE
    assert found["generate"] == RAW_TEXT and found["embed"] == [[0, 1, 0], [1, 1, 0]]
    assert found["models"] == found["running"] == [f"{MODEL}:latest"]
    assert found["capabilities"] == ["completion", "vision"] and found["version"]
    assert found["missing"]["status"] == 404 and "not found" in found["missing"]["error"]
    assert found["pull"]["status"] == 403 and "orchard pull" in found["pull"]["error"]
