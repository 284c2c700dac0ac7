"""Coding agents as they come from npm and PyPI, and how their runs are judged and recorded."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.http.errors import ModelNotFound
from engine.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from tests.e2e.programs import record, terminal
from tests.e2e.programs.catalogue import CASES, LAUNCHED, Case, Program
from tests.e2e.programs.install import Installed
from tests.e2e.programs.loopback import Loopback
from tests.e2e.programs.outcome import ending, outcome, outcome_of_edit, refusals, stream_flaw, unusual
from tests.e2e.programs.recorder import Exchange, Refuse
from tests.e2e.programs.refusing import Always, Once, WithField
from tests.e2e.programs.run import Run, Site
from tests.e2e.programs.servers import scripted_server
from tests.e2e.server import ROOT

ASKER = """
import json, sys, urllib.error, urllib.request
url, is_patient = sys.argv[1], "patient" in sys.argv
body = {"model": "demo", "stream": True, "user": "me", "messages": [{"role": "user", "content": "Hello!"}]}
for attempt in range(3):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        lines = urllib.request.urlopen(request).read().decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        print("".join(event["choices"][0]["delta"].get("content", "") for event in events))
        break
    except urllib.error.HTTPError as refusal:
        words = json.load(refusal)["error"]["message"]
        if "`user`" in words:
            del body["user"]
        elif not is_patient:
            sys.exit(words)
"""
"""A client of its own that knows one field by name; `patient` asks again whatever the words are."""
LIMIT_S = 60.0
ASKER_HERE = Installed(Program("Asker", "pypi", "asker", "python", {}), Path(sys.executable), "1.0", os.environ["PATH"])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as url:
        yield url


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    loopback = Loopback()
    yield loopback
    loopback.close()


@pytest.fixture
def site(url: str, loopback: Loopback, tmp_path: Path) -> Site:
    return Site(tmp_path, url, loopback)


def go(site: Site, refuse: Refuse | None = None, *arguments: str) -> Run:
    case = Case("Asker", "chat", ("-c", ASKER, "$url/v1/chat/completions", *arguments))
    return site.run(case, ASKER_HERE, refuse, LIMIT_S)


def test_a_program_that_is_answered_works_and_its_unusual_fields_are_named(site: Site):
    run = go(site)
    assert (outcome(run), refusals(run)) == ("answered", []), run.output
    assert run.output.strip() == "Hello!"
    assert [(one.path, one.status, one.is_whole) for one in run.exchanges] == [("/v1/chat/completions", 200, True)]
    assert unusual(run) == "0 tools, 0 kB, `user`"


def test_a_program_that_answers_but_does_not_change_the_file_has_failed_to_edit(site: Site):
    found = outcome_of_edit(go(site))
    assert found == "failed: the file says 'The harbor is bright and the old gate is quiet.'"


def test_a_program_that_goes_on_without_a_refused_field_is_answered_after_a_refusal(site: Site):
    run = go(site, WithField("user"))
    assert outcome(run) == "answered after a refusal", run.output
    assert refusals(run) == ["400 “`user` is not supported.”: asks again without `user`"]


def test_a_program_that_shows_the_words_of_a_refusal_has_failed_with_them(site: Site):
    run = go(site, Always(ModelNotFound("demo", "another")))
    assert outcome(run).startswith('failed: 404 The model "demo" does not exist: this server serves "another"')
    assert ending(run) == "ends and shows these words"


def test_a_program_that_tells_that_the_prompt_is_too_long_has_not_failed(site: Site):
    assert outcome(go(site, Always(ContextLengthExceeded(40000, 1, 32768)))) == "too long"


def test_a_program_that_shows_what_the_model_cannot_do_has_not_failed(site: Site):
    assert outcome(go(site, Always(InvalidRequest("The model's chat template does not support `tools`.")))) == (
        "the model cannot"
    )


def test_a_program_that_is_refused_once_and_asks_again_has_been_answered(site: Site):
    run = go(site, Once(Overloaded("The queue is full.", 1.0)), "patient")
    assert refusals(run) == ["429 “The queue is full.”: asks again unchanged"]
    assert ending(run) == "answers"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print('I am fine')", "it asked nothing; its last words: I am fine"),
        (f"{ASKER}\nsys.exit('after all')", "it ended with 1"),
        (ASKER.replace("print(", "len("), "it shows none of the answers"),
    ],
)
def test_a_program_that_does_not_work_is_found(site: Site, code: str, problem: str):
    run = site.run(Case("Asker", "chat", ("-c", code, "$url/v1/chat/completions")), ASKER_HERE, None, LIMIT_S)
    assert outcome(run).startswith("failed: ") and problem in outcome(run)


def test_a_program_on_a_screen_is_typed_to_and_left(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal, "QUIET_S", 0.3)
    code = (
        f"print('ready')\nwhile (typed := input('> ')) != '/exit':\n{textwrap.indent(ASKER, '    ')}\n    print(typed)"
    )
    case = Case("Asker", "chat", ("-c", code, "$url/v1/chat/completions"), is_screen=True)
    run = site.run(case, ASKER_HERE, limit_s=LIMIT_S, question="Who?")
    assert (run.exit_code, outcome(run)) == (0, "answered"), run.output
    assert len(run.exchanges) == 1 and "Hello!" in run.output and "Who?" in run.output


def test_what_a_program_leaves_running_ends_with_its_run(site: Site, loopback: Loopback):
    if loopback.why_open is not None:
        pytest.skip(loopback.why_open)
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 3)\n    time.sleep(600)"
    site.run(Case("Asker", "chat", ("-c", daemon)), ASKER_HERE, None, LIMIT_S)
    assert loopback.pids() == []


def test_programs_reach_loopback_alone(site: Site, loopback: Loopback):
    if loopback.why_open is not None:
        pytest.skip(loopback.why_open)
    listed = subprocess.run(loopback.inside(["ip", "-brief", "address"]), capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["lo"]


def test_the_tables_are_made_from_the_record():
    assert record.README.read_text().endswith(record.tables(record.read()))


def test_the_record_has_every_case():
    assert list(record.read()) == [case.name for case in (*CASES, *LAUNCHED)]


@pytest.mark.parametrize(
    ("path", "events", "flaw"),
    [
        ("/v1/chat/completions", 'data: {"choices": []}', "the stream ends with"),
        ("/v1/messages", 'event: message_delta\ndata: {"type": "message_delta"}', "the stream ends with"),
        ("/v1/responses", 'event: response.created\ndata: {"type": "response.created"}', "the stream ends with"),
        ("/v1/messages", 'event: error\ndata: {"type": "error", "error": {}}', "an error in the stream: "),
        ("/v1/chat/completions", 'data: {"error": {"message": "lost"}}\n\ndata: [DONE]', "an error in the stream: "),
    ],
)
def test_a_stream_without_its_end_is_found(path: str, events: str, flaw: str):
    whole = Exchange("POST", path, {}, {}, 200, {"content-type": "text/event-stream"}, f"{events}\n\n".encode(), True)
    assert (stream_flaw(whole) or "").startswith(flaw)


def test_a_program_may_close_the_connection_behind_the_last_event():
    events = 'event: message_start\ndata: {"type": "message_start"}\n\n'
    left = Exchange("POST", "/v1/messages", {}, {}, 200, {"content-type": "text/event-stream"}, events.encode())
    assert stream_flaw(left) == "the program broke the stream off"
    last = 'event: message_stop\ndata: {"type": "message_stop"}\n\n'
    assert stream_flaw(replace(left, answer=f"{events}{last}".encode())) is None


@pytest.mark.night("installs programs from registries, and answers prompts of 60 kB for half an hour")
def test_the_newest_programs_work_and_the_record_is_renewed():
    """A process of its own: the command that renews the record."""
    done = subprocess.run([sys.executable, "-m", "tests.e2e.programs"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
