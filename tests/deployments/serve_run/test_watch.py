"""When the command ends by itself: the application cannot start, or what the command has started is gone for good."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ProxyStatus, ServeStatus

from deployments.serve_run.watch import NO_ANSWER_S, NOT_RUNNING_S, Watch, application_status, reason_in

ROOT = Path(__file__).parents[3]


@dataclass
class Application:
    """As in serve.status()."""

    status: str
    message: str = ""
    deployments: dict[str, Any] = field(default_factory=dict)


RUNNING, DEPLOYING, UNHEALTHY = Application("RUNNING"), Application("DEPLOYING"), Application("UNHEALTHY", "it is ill")
FAILED = Application("DEPLOY_FAILED", "no such model", {"Ingress": Application("UNHEALTHY", "no tokenizer")})


def seen(*states: tuple[float, Application | None]) -> list[str | None]:
    watch = Watch("orchard", 0.0)
    return [watch.see(application, at_s) for at_s, application in states]


def test_failed_start_of_an_application_ends_the_watch_with_all_reasons():
    (reason,) = seen((1.0, FAILED))
    assert reason == "Application 'orchard' could not be started:\nno such model\nIngress: no tokenizer"


def test_start_of_an_application_has_no_time_limit():
    assert seen((1.0, None), (1e6, DEPLOYING), (2e6, None), (3e6, RUNNING)) == [None] * 4


@pytest.mark.parametrize("gone", [None, UNHEALTHY, FAILED, Application("DELETING")])
def test_application_that_stays_down_is_given_up_after_the_time_limit(gone: Application | None):
    early, late = 10 + NOT_RUNNING_S - 1, 10 + NOT_RUNNING_S + 1
    *before, reason = seen((10.0, RUNNING), (11.0, gone), (early, gone), (late, gone))
    assert before == [None] * 3
    assert reason is not None and f"has not been running for {NOT_RUNNING_S:.0f} s" in reason
    assert gone is not UNHEALTHY or "it is ill" in reason


def test_application_that_recovers_in_time_is_not_given_up():
    steps = [(10.0 + i * NOT_RUNNING_S / 2, UNHEALTHY if i % 2 else RUNNING) for i in range(10)]
    assert seen(*steps) == [None] * 10


def test_deployment_of_a_new_version_has_no_time_limit():
    assert seen((1.0, RUNNING), (2.0, DEPLOYING), (1e5, DEPLOYING), (1e5 + 1, None), (1e5 + 2, RUNNING)) == [None] * 5


def test_failures_of_an_application_that_went_on_without_its_head_count_only_if_they_last():
    watch = Watch("orchard", 0.0, is_continued=True)
    assert watch.see(FAILED, 1.0) is None and watch.see(FAILED, NOT_RUNNING_S) is None and not watch.has_run
    assert watch.see(FAILED, NOT_RUNNING_S + 2.0) is not None
    assert watch.see(RUNNING, NOT_RUNNING_S + 3.0) is None and watch.has_run


def test_silence_of_serve_counts_from_its_last_answer():
    watch = Watch("orchard", 0.0)
    assert watch.hear_nothing(1e6) is None  # Ray is starting
    watch.see(RUNNING, 1e6)
    assert watch.hear_nothing(1e6 + NO_ANSWER_S - 1) is None
    assert "Serve has not answered" in (watch.hear_nothing(1e6 + NO_ANSWER_S + 1) or "")


def test_running_application_without_a_healthy_proxy_counts_as_unhealthy(monkeypatch: pytest.MonkeyPatch):
    status = ServeStatus(applications={"orchard": ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {})})
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.serve.status", lambda: status)
    for proxy, expected in ((ProxyStatus.STARTING, "UNHEALTHY"), (ProxyStatus.HEALTHY, "RUNNING")):
        status.proxies["node"] = proxy
        application = application_status("orchard")
        assert application is not None and application.status == expected
    assert application_status("another") is None


PROGRAM = """
import subprocess, sys, threading, time
from types import SimpleNamespace as Simple
from deployments.serve_run import watch
from deployments.serve_run.config_file import read_config

watch.POLL_S = watch.RUNNING_POLL_S = 0.05
watch.CHILDREN_LISTED_EVERY_S = 0.1
watch.NO_ANSWER_S, watch.NOT_RUNNING_S, watch.SHUTDOWN_S, watch.KILL_S = 1.0, 1.0, 0.5, 1.0
watch._shut_down_ray = lambda: threading.Event().wait()
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
asked = 0

def status_of():
    global asked
    asked += 1
    if asked > 3:
        {then}
    return Simple(status="RUNNING", message="", deployments=dict())

watch.Watcher(read_config("serve_config.yaml"), lambda: None, {owns}, status_of).start()
time.sleep(120)
"""


def program(then: str, owns: bool) -> tuple[int, str, int]:
    """Exit status and complaints of a command whose Ray never answers again; the pid of a process that it started."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then, owns=owns)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr, int(done.stdout)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() if sys.platform == "linux" else subprocess.run(["kill", "-0", str(pid)]) == 0


HANGS = "threading.Event().wait()"


def test_hanging_serve_ends_the_command_and_its_child_processes():
    code, complaints, child = program(HANGS, owns=True)
    assert code == 1, complaints
    assert "Orchard is ready: http://127.0.0.1:8000/v1 (model demo)" in complaints
    assert "Serve has not answered for 1 s" in complaints
    assert not is_alive(child)


def test_an_application_that_was_deleted_ends_the_command():
    code, complaints, _ = program("return None", owns=True)
    assert code == 1
    assert "Application 'orchard' has not been running for 1 s and no longer exists" in complaints


def test_processes_of_a_joined_cluster_are_not_ended():
    code, _, child = program(HANGS, owns=False)
    assert code == 1 and is_alive(child)
    subprocess.run(["kill", str(child)], check=True)


TRACEBACK = """Deploying app 'orchard' failed with exception:
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
    ^^^
  File "b.py", line 2, in g
    raise EngineFailed("no")
{error}
"""


@pytest.mark.parametrize(
    "error",
    [
        "engine.errors.EngineFailed: model './nope': there is no directory",
        "pydantic.ValidationError: 1 validation error for AppArgs\nengine.modle\n  Extra inputs are not permitted",
    ],
)
def test_reason_of_a_failure_is_the_last_part_of_its_traceback(error: str):
    assert reason_in(TRACEBACK.format(error=error)) == error


def test_reason_of_a_failure_without_traceback_is_the_whole_message():
    assert reason_in("Deployment Ingres does not exist.\n") == "Deployment Ingres does not exist."
    assert reason_in("") == ""
