"""A server that cannot start ends soon, with the reason and a non-zero exit code.

Files that are wrong in other ways: tests/deployments/serve_run/test_config_file.py.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from engine.processing.checkpoint import DEMO_MODEL
from tests.e2e.server import ServeRun, serve_run


def ended(server: ServeRun, timeout_s: float) -> str:
    """Return the output that the operator reads, without the log lines of Ray's processes."""
    assert server.process.wait(timeout_s) == 1, server.output
    return "\n".join(line for line in server.output.splitlines() if not line.startswith("\x1b"))


@pytest.mark.night(
    "tests/deployments/serve_run has both: test_cli.py runs the command, test_config_file.py names the keys"
)
def test_an_unknown_key_is_named_before_ray_starts():
    def misspell(config: dict[str, Any]) -> None:
        config["applications"][0]["args"]["engine"] = {"modle": "demo", "max_running": 0}

    with serve_run(misspell) as server:
        output = ended(server, 60)
    assert "args.engine.modle: unknown key" in output
    assert re.search(r"args\.engine\.max_running: .*greater than or equal to 1, not 0", output)
    assert "Traceback" not in output


def broken_weights(config: dict[str, Any], directory: Path) -> None:
    for file in DEMO_MODEL.iterdir():
        if file.is_file():
            (directory / file.name).symlink_to(file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").write_bytes(b"no weights")
    config["applications"][0]["args"]["engine"]["model"] = str(directory)


def test_weights_that_cannot_be_read_are_named_before_ray_starts(tmp_path: Path):
    with serve_run(lambda config: broken_weights(config, tmp_path)) as server:
        output = ended(server, 60)
        assert "Started a local Ray instance" not in server.output
    assert output.count("model.safetensors: this is not a readable safetensors file") == 1
    assert "Traceback" not in output
