"""Large bodies are read in processes, with the same result, and the processes are replaced and end as they should."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.http import body_reader
from deployments.http.body_process import BodyProcess
from deployments.http.body_reader import BodyReader
from deployments.http.errors import ModelNotFound
from deployments.http.parsed_request import ReadingRules
from deployments.http.request_reader import MAX_INLINE_BYTES, read_request
from deployments.requests import PackedMessages
from engine.errors import InvalidRequest, Unavailable

RULES = ReadingRules("org/demo", frozenset({"image"}))
LARGE = "é🙂 word " * (MAX_INLINE_BYTES // 8)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * MAX_INLINE_BYTES}}


def body(*messages: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"model": "org/demo", "messages": messages, **fields}).encode()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def children() -> list[psutil.Process]:
    def reads_bodies(child: psutil.Process) -> bool:
        try:
            return "body_process" in str(child.cmdline())
        except psutil.NoSuchProcess:  # a zombie is one
            return False

    return list(filter(reads_bodies, psutil.Process().children()))


@pytest.fixture
def read(request):
    """read(body, ...): what one reader says of these bodies, one after the other, errors among them."""
    readers = []

    def read_all(
        *bodies: bytes, rules: ReadingRules = RULES, max_body_bytes: int = 32 * 2**20, between=lambda: None
    ) -> list:
        async def talk() -> list[Any]:
            reader = BodyReader(rules, max_body_bytes)
            readers.append(reader)
            said: list[Any] = []
            for one in bodies:
                try:
                    said.append(await reader.read(one, "chat"))
                except Exception as error:
                    said.append(error)
                between()
            return said

        return asyncio.run(talk())

    yield read_all
    for reader in readers:
        reader.close()


@pytest.mark.parametrize(
    "sent",
    [
        body(user(LARGE), stream=True, stream_options={"include_usage": True}, stop=["a", "b"], seed=7),
        body({"role": "system", "content": "x-anthropic-billing-header: a=b;\nBe brief."}, user("Hi"), user(LARGE)),
        body(user([{"type": "text", "text": "Look"}, IMAGE]), temperature=0.5, logit_bias={"7": 1.5}),
        body(user(LARGE), response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"b": 1.5}}}),
    ],
    ids=["text", "merged", "image", "schema"],
)
def test_large_body_read_in_a_process_equals_the_body_read_inline(read, sent: bytes):
    assert len(sent) > MAX_INLINE_BYTES
    [there] = read(sent)
    assert isinstance(there.request.messages, PackedMessages)
    assert there == read_request(sent, "chat", RULES)
    assert tuple(there.request.messages) == read_request(sent, "chat", RULES).request.messages


def test_errors_of_a_body_read_in_a_process_equal_those_of_an_inline_read(read):
    unknown, wrong, broken = body(user(LARGE), model="other"), body(user(LARGE), top_p=3), body(user(LARGE))[:-1]
    said = read(unknown, wrong, broken)
    for error, sent in zip(said, (unknown, wrong, broken), strict=True):
        with pytest.raises(InvalidRequest) as caught:
            read_request(sent, "chat", RULES)
        assert type(error) is type(caught.value) and error.args == caught.value.args
        assert error.field == caught.value.field
    assert isinstance(said[0], ModelNotFound)


def test_small_bodies_start_no_process_and_large_bodies_share_a_process(read):
    before = set(children())
    read(body(user("Hi")), between=lambda: None)
    assert set(children()) == before
    started = []
    read(*[body(user(LARGE))] * 3, between=lambda: started.append({c.pid for c in set(children()) - before}))
    assert started[0] == started[2] and len(started[0]) == 1


def test_patterns_of_the_operator_never_run_on_the_event_loop(read, monkeypatch):
    """Nothing is known of the time that they take: this one takes for ever, and its process is replaced."""
    monkeypatch.setattr(body_reader, "READ_TIMEOUT_S", 3.5)
    rules = ReadingRules("org/demo", frozenset(), volatile_patterns=(re.compile("^(a+)+$"),))
    good, evil = ([{"role": "system", "content": text}, user("Hi")] for text in ("aaa\nb", "a" * 64 + "b"))
    ticks = 0

    async def talk() -> list[Any]:
        nonlocal ticks

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        reader = BodyReader(rules, 2**20)
        said: list[Any] = [await reader.read(body(*good), "chat")]
        ticks = 0
        for messages in (evil, good):
            said += await asyncio.gather(reader.read(body(*messages), "chat"), return_exceptions=True)
        ticking.cancel()
        reader.close()
        return said

    first, failed, after = asyncio.run(talk())
    assert first.request.messages[0] == {"role": "system", "content": "b"}
    assert isinstance(failed, Unavailable) and "3.5 s" in failed.message
    assert after == first
    assert ticks > 10


def test_killed_reader_process_is_replaced(read):
    before = set(children())

    def kill() -> None:
        for child in set(children()) - before:
            child.send_signal(signal.SIGKILL)
            child.wait(10)

    said = read(*[body(user(LARGE))] * 2, between=kill)
    assert said[0] == said[1] == read_request(body(user(LARGE)), "chat", RULES)


def test_request_whose_reader_process_dies_is_unavailable_and_the_next_body_is_read(monkeypatch):
    async def talk() -> None:
        reader, before = BodyReader(RULES, 2**25), set(children())
        good = await reader.read(body(user(LARGE)), "chat")
        [child] = set(children()) - before
        child.suspend()
        reading = asyncio.create_task(reader.read(body(user(LARGE * 20)), "chat"))
        await asyncio.sleep(0.05)
        child.kill()
        with pytest.raises(Unavailable, match="has died"):
            await reading
        assert await reader.read(body(user(LARGE)), "chat") == good
        reader.close()

    asyncio.run(talk())


def test_cancelled_read_ends_no_reader_process(read):
    async def talk() -> None:
        reader, before = BodyReader(RULES, 2**25), set(children())
        await reader.read(body(user(LARGE)), "chat")
        mine = set(children()) - before
        for _ in range(3):
            reading = asyncio.create_task(reader.read(body(user(LARGE * 4)), "chat"))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        last = await reader.read(body(user("Hi " + LARGE)), "chat")
        assert last.request.messages == (user("Hi " + LARGE),)
        assert mine <= set(children()) - before and len(set(children()) - before) <= body_reader.NUM_PROCESSES
        reader.close()

    asyncio.run(talk())


def test_closing_ends_the_processes():
    before = set(children())

    async def talk() -> BodyReader:
        reader = BodyReader(RULES, 2**25)
        await reader.read(body(user(LARGE)), "chat")
        return reader

    reader = asyncio.run(talk())
    mine = set(children()) - before
    assert len(mine) == 1
    del reader
    gone, alive = psutil.wait_procs(mine, 10)
    assert gone and not alive


def test_reader_processes_end_with_their_parent_process():
    story = (
        "import asyncio, json, os, signal\n"
        "from deployments.http.body_reader import BodyReader\n"
        "from tests.deployments.http.test_body_reader import LARGE, RULES, body, children, user\n"
        "async def talk():\n"
        "    reader = BodyReader(RULES, 2**25)\n"
        "    await reader.read(body(user(LARGE)), 'chat')\n"
        "    print(*(child.pid for child in children()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(talk())\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", story], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    [pid] = map(int, done.stdout.split())
    for _ in range(1000):
        if not psutil.pid_exists(pid):
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the process lives on")


@pytest.mark.parametrize("is_watched", [False, True], ids=["by the system", "by the parent, as on macOS"])
def test_memory_of_a_process_is_limited(read, monkeypatch, is_watched: bool):
    if not is_watched and sys.platform != "linux":
        pytest.skip("only Linux keeps the limit")
    monkeypatch.setattr(body_reader, "BodyProcess", partial(BodyProcess, is_watched=is_watched))
    monkeypatch.setattr(body_reader, "BASE_MEMORY_BYTES", 280 * 2**20)
    monkeypatch.setattr(body_reader, "MEMORY_PER_BODY_BYTE", 0)
    heavy = body(user("x" * 100 * 2**20))
    said = read(heavy, body(user(LARGE)))
    assert isinstance(said[0], InvalidRequest) and str(280 * 2**20) in said[0].message
    assert said[1] == read_request(body(user(LARGE)), "chat", RULES)


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_a_loop_that_ends_while_a_process_starts_leaves_none_behind(wait_s: float, monkeypatch: pytest.MonkeyPatch):
    """wait_s: until the process is started, of which the loop waits 0.1 s."""
    made: list[BodyProcess] = []

    class Slow(BodyProcess):
        def __init__(self, *args: Any):
            time.sleep(wait_s)
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(body_reader, "BodyProcess", Slow)

    async def talk() -> None:
        reading = asyncio.create_task(BodyReader(RULES, 2**25).read(body(user(LARGE)), "chat"))
        await asyncio.sleep(0.1)
        assert not reading.done()

    asyncio.run(talk())
    (process,) = made
    assert process._socket.fileno() == -1, "it is closed"
    _, alive = psutil.wait_procs([one for one in children() if one.pid == process.pid], 10)
    assert not alive
