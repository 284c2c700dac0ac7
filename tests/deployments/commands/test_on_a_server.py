"""`orchard run`, `ps` and `launch` against the whole graph with the demo model, over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.deployments.commands.conftest import MAX_RUNNING, GraphServer, Orchard
from tests.e2e.pictures import shape
from tests.e2e.programs.terminal import Terminal
from tests.e2e.server import ROOT

COMMAND = [sys.executable, "-c", "import sys; from deployments.commands.program import main; sys.exit(main())"]
TIMEOUT_S = 60.0


@pytest.fixture
def url(graph_server: GraphServer) -> tuple[str, str]:
    return "--url", graph_server.url


# --- run -------------------------------------------------------------------------------------------------------------


def test_a_question_is_answered_with_and_without_the_name_of_the_model(orchard: Orchard, url: tuple[str, str]):
    assert orchard("run", "What is 12 + 30?", *url)[:2] == (0, "12 + 30 = 42\n")
    status, out, err = orchard("run", "demo", "What is 12 + 30?", "--verbose", *url)
    assert (status, out) == (0, "12 + 30 = 42\n") and "22 prompt tokens" in err


def test_a_piped_question_and_a_piped_text_behind_a_question(orchard: Orchard, url: tuple[str, str]):
    assert orchard("run", *url, stdin=b"What is 1 + 2?")[:2] == (0, "1 + 2 = 3\n")
    status, out, _ = orchard("run", "demo", "Tell me:", "--json", *url, stdin="Ä ".encode() * 20)
    assert status == 0 and json.loads(out)["usage"]["prompt_tokens"] > 40
    assert orchard("run", *url, stdin=b"  \n")[0] == 2


def test_an_image_is_seen_and_a_file_that_is_none_is_named(orchard: Orchard, url: tuple[str, str], tmp_path: Path):
    path = tmp_path / "grüner Kreis.png"
    shape("green", "circle").save(path)
    assert "green circle" in orchard("run", "What is in the image?", "--image", path, *url)[1]
    path.write_text("<html>")
    status, _, err = orchard("run", "What is in the image?", "--image", path, *url)
    assert status == 1 and f"{path} is no image" in err
    assert orchard("run", "What is it?", "--image", tmp_path / "nothing", *url)[0] == 1


def test_refusals_of_the_server_are_shown_with_status_1(orchard: Orchard, url: tuple[str, str]):
    status, out, err = orchard("run", *url, stdin=b"word " * 200_000)
    assert (status, out) == (1, "") and "32768" in err
    status, _, err = orchard("run", "nosuch", "What is it?", *url)
    assert status == 1 and "serves demo, not 'nosuch'" in err
    status, _, err = orchard("run", "What is it?", "--temperature", "7", *url)
    assert status == 1 and "temperature" in err


def started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command that listens to Ctrl-C, which a shell's background jobs, and their children, ignore."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_in_a_stream_ends_the_answer_and_frees_its_row(graph_server: GraphServer):
    command = [*COMMAND, "run", "Tell me a story.", "--max-tokens", "4000", "--url", graph_server.url]
    running = started(command)
    assert running.stdout is not None
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 130 and b"Traceback" not in err
    deadline = time.monotonic() + TIMEOUT_S
    while httpx.get(f"{graph_server.url}/v1/status").json()["num_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_chat_on_a_terminal_goes_on_after_an_error_and_ends_with_the_input(graph_server: GraphServer, tmp_path: Path):
    env = {**os.environ, "TERM": "dumb", "HOME": str(tmp_path)}
    terminal = Terminal([*COMMAND, "run", "--url", graph_server.url, "--verbose"], env, ROOT)
    deadline = time.monotonic() + TIMEOUT_S
    terminal.type("/image nowhere.png\rWhat is 12 + 30?\r")
    assert terminal.wait(lambda: "generated" in terminal.text, deadline), terminal.text
    assert "nowhere.png cannot be read" in terminal.text and "12 + 30 = 42" in terminal.text
    terminal.type("\x04")
    assert terminal.exit_code(deadline) == 0 and "Traceback" not in terminal.text


def test_a_reader_that_closes_the_pipe_ends_the_command_without_a_traceback(graph_server: GraphServer):
    line = " ".join([f"'{word}'" for word in COMMAND])
    shell = f"{line} run 'Tell me a story.' --url {graph_server.url} </dev/null | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.endswith(("141\n", "0\n")) and "Traceback" not in done.stderr


@pytest.mark.night("a process with the engine; tests/engine/test_main.py tests that command")
def test_without_a_server_the_model_runs_in_a_process(tmp_path: Path):
    command = [*COMMAND, "run", "--local", "demo"]
    done = subprocess.run(command, input="What is 12 + 30?", capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "12 + 30 = 42\n"), done.stderr


def test_a_server_that_is_missing_or_another_program_is_named(orchard: Orchard):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=_answer_once, args=(listener,), daemon=True).start()
        status, _, err = orchard("ps", "--url", f"http://127.0.0.1:{port}")
    assert status == 1 and "is this an Orchard server?" in err
    status, _, err = orchard("run", "What is it?", "--url", f"http://127.0.0.1:{port}")
    assert status == 1 and "no server answers" in err and "`orchard serve`" in err
    for url in ("localhost:8000", "ftp://x", "http://", "http://a@b", "http://x:99999"):
        assert orchard("ps", "--url", url)[0] == 2
    assert orchard("ps", "--key", "a\nb")[0] == 2


def _answer_once(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>")


# --- ps --------------------------------------------------------------------------------------------------------------


def test_ps_shows_nodes_memory_and_slow_requests(orchard: Orchard, url: tuple[str, str]):
    orchard("run", "What is 12 + 30?", *url)
    status, out, _ = orchard("ps", *url)
    assert status == 0
    for part in (
        "model demo, ready",
        f"0/{MAX_RUNNING}",
        "prefix cache",
        "Slowest requests",
        "generated",
    ):
        assert part in out, out
    found = json.loads(orchard("ps", "--json", *url)[1])
    assert found["status"]["ready"] and found["requests"][0]["seconds"] > 0


def test_nodes_lists_the_engines_and_an_unknown_node_is_not_drained(orchard: Orchard, url: tuple[str, str]):
    status, out, _ = orchard("nodes", *url)
    assert status == 0 and f"0/{MAX_RUNNING}" in out and "ready" in out
    (engine,) = json.loads(orchard("nodes", "--json", *url)[1])
    assert engine["engine"]["state"] == "ready"
    status, out, err = orchard("drain", "abcdef", *url)
    assert (status, out) == (1, "") and "0 nodes have an id that begins with 'abcdef'" in err
    assert orchard("drain", "abc", *url)[0] == 1
    status, _, err = orchard("drain", "abcdef", "--undo", "--deadline", "5", *url)
    assert status == 2 and "--deadline 5 would have no effect" in err
    assert orchard("drain", *url)[0] == 2


def test_ps_shows_the_queue(orchard: Orchard, url: tuple[str, str], graph_server: GraphServer):
    question = [{"role": "user", "content": "Tell me a story."}]
    body = {"model": "demo", "messages": question, "max_tokens": 150, "n": MAX_RUNNING, "ignore_eos": True}
    chat = f"{graph_server.url}/v1/chat/completions"
    asked = [threading.Thread(target=httpx.post, args=(chat,), kwargs={"json": body, "timeout": 60}) for _ in range(2)]
    for one in asked:
        one.start()
    deadline = time.monotonic() + TIMEOUT_S
    while "Queue" not in (out := orchard("ps", *url)[1]):
        assert time.monotonic() < deadline, out
        time.sleep(0.05)
    assert "chatcmpl-" in out.partition("Queue")[2]
    for one in asked:
        one.join()


def test_watching_ends_by_ctrl_c_with_status_0(graph_server: GraphServer):
    command = [*COMMAND, "ps", "--watch", "--json", "--interval", "0.1", "--url", graph_server.url]
    running = started(command)
    assert running.stdout is not None
    assert json.loads(running.stdout.readline())["status"]["model"] == "demo"
    running.send_signal(signal.SIGINT)
    assert running.wait(TIMEOUT_S) == 0 and running.communicate()[1] == b""


# --- bench -----------------------------------------------------------------------------------------------------------


def test_bench_sends_prompts_and_gets_answers_of_exact_lengths(orchard: Orchard, url: tuple[str, str]):
    loads = ("--pp", 40, "--tg", 4, "--depth", 0, 64, "--concurrency", 2, "--rounds", 1)
    status, out, _ = orchard("bench", "--json", *loads, *url)
    cold, deep = json.loads(out)["results"]
    assert status == 0 and (cold["load"]["depth"], deep["load"]["depth"]) == (0, 64)
    assert cold["num_cached"] == 0, "each prompt begins with other words"
    assert deep["num_cached"] >= 48
    assert all(one["tg_tokens_per_s"]["median"] > 0 and one["first_token_ms"]["lowest"] > 0 for one in (cold, deep))
    assert "tg tokens/s" in orchard("bench", "--pp", 16, "--tg", 2, "--rounds", 1, *url)[1]


def test_bench_refuses_what_does_not_fit_before_it_measures(orchard: Orchard, url: tuple[str, str]):
    status, _, err = orchard("bench", "--pp", 40000, *url)
    assert status == 1 and "needs 40128 tokens; the context of demo has 32768" in err
    assert orchard("bench", "--tg", 1, *url)[0] == 2


# --- report ----------------------------------------------------------------------------------------------------------


def test_a_report_has_status_and_timelines_without_prompts(orchard: Orchard, url: tuple[str, str], tmp_path: Path):
    orchard("run", "What is 12 + 30 for Rumpelstiltskin?", *url)
    path = tmp_path / "report.tar.gz"
    assert orchard("report", "--no-logs", "--output", path, *url)[0] == 0
    with tarfile.open(path) as archive:
        files = [archive.extractfile(member) for member in archive]
        text = "".join(file.read().decode() for file in files if file is not None)
    assert "Rumpel" not in text and "not available" not in text
    assert '"num_prompt_tokens"' in text and "vllm:" in text and '"admission"' in text


# --- launch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode", "qwen"])
def test_settings_name_the_server_its_model_and_its_context(orchard: Orchard, url: tuple[str, str], agent: str):
    status, out, _ = orchard("launch", agent, "--config-only", "--json", *url, "--", "--flag", "a b")
    found = json.loads(out)
    assert status == 0 and found["command"][0] == agent and found["command"][-2:] == ["--flag", "a b"]
    told = json.dumps([found["env"], found["command"]])
    assert (url[1] in told and "32768" in told) or agent == "qwen"
    shell = orchard("launch", agent, "--config-only", *url)[1]
    assert shell.splitlines()[-1].startswith(agent) and "export " in shell


def test_the_agent_takes_the_place_of_the_command(graph_server: GraphServer, tmp_path: Path):
    folder = tmp_path / "with spaces ü"
    folder.mkdir()
    program = folder / "claude"
    program.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL|$ANTHROPIC_MODEL|$ANTHROPIC_API_KEY|$1"\nexit 7\n')
    program.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "ANTHROPIC_API_KEY": "of the user",
        "HOME": str(folder),
    }
    command = [*COMMAND, "launch", "claude", "--url", graph_server.url, "--", "a b"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (7, f"{graph_server.url}|demo||a b\n"), "the user's own key stays here"


def test_a_program_that_is_missing_is_named_with_its_installation(
    orchard: Orchard, url: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = orchard("launch", "codex", *url)
    assert status == 1 and "npm install -g @openai/codex" in err
