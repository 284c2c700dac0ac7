"""A server that cannot start ends soon, with the reason and a non-zero exit code."""

import re
from typing import Any

import pytest

from tests.e2e.server import ServeRun, serve_run


def ended(server: ServeRun, timeout_s: float) -> str:
    """What the operator reads, without the log lines of Ray's processes."""
    assert server.process.wait(timeout_s) == 1, server.output
    return "\n".join(line for line in server.output.splitlines() if not line.startswith("\x1b"))


def test_an_unknown_key_is_named_before_ray_starts():
    def misspell(config: dict[str, Any]) -> None:
        config["applications"][0]["args"]["engine"] = {"modle": "demo", "max_running": 0}

    with serve_run(misspell) as server:
        output = ended(server, 60)
    assert "args.engine.modle: there is no such key" in output
    assert re.search(r"args\.engine\.max_running: .*greater than or equal to 1, not 0", output)
    assert "Traceback" not in output


def test_a_config_without_applications_is_refused():
    with serve_run(lambda config: config.pop("applications")) as server:
        output = ended(server, 60)
    assert re.search(r"applications\s+Field required", output)


@pytest.mark.server
def test_a_model_that_is_not_there_ends_the_server_with_the_reason():
    def change(config: dict[str, Any]) -> None:
        config["applications"][0]["args"]["engine"]["model"] = "./no-such-model"

    with serve_run(change) as server:
        output = ended(server, 180)
    reason = output[output.index("Application 'orchard' could not be started:") :]
    assert "no-such-model" in reason
    assert "Traceback" not in reason
