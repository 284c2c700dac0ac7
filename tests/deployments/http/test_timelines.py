"""Each request's seconds are told by its timeline, whatever happens to it, and so is the cause of a slow one."""

import asyncio
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from deployments.http.timeline import (
    MAX_KEPT,
    MAX_STRETCHES,
    RequestTimeline,
    Timelines,
    arrival_header,
    arrived_s,
)
from tests.deployments.demo_graph import Body, DemoGraph
from tests.deployments.faulty_graph import PICTURE, WORDS
from tests.support.clock import Clock
from tests.support.fake_runner import until
from tests.support.faults import Failing
from tests.support.timelines import assert_sums

ENGINE_PHASES = ["handover", "queue", "prefill", "decode"]
AROUND = ["body", "parse", "place", "plan"]
LONG_SCHEMA = {
    "type": "object",
    "properties": {f"field{i}": {"type": "string", "maxLength": 8} for i in range(20)},
    "required": [f"field{i}" for i in range(20)],
    "additionalProperties": False,
}


def names(told: Body) -> list[str]:
    return [phase["name"] for phase in told["phases"]]


def phase(told: Body, name: str) -> Body:
    return next(one for one in told["phases"] if one["name"] == name)


@pytest.fixture(scope="module")
def house() -> Iterator[DemoGraph]:
    house = DemoGraph()
    yield house
    house.close()


@pytest.fixture(scope="module")
def narrow() -> Iterator[DemoGraph]:
    """One row at a time; a more urgent request takes its place."""
    house = DemoGraph(max_running=1, scheduler={"policy": "priority"}, prefix_cache={"enabled": False})
    yield house
    house.close()


def test_a_plain_answer(house: DemoGraph):
    async def test():
        answer, seconds = await house.ask("plain", "What is 12 + 30?")
        told = await house.timeline("plain")
        assert_sums(told, seconds)
        assert names(told) == [*AROUND, *ENGINE_PHASES, "return", "send"]
        usage = answer.json()["usage"]
        assert told["usage"]["num_prompt_tokens"] == usage["prompt_tokens"] == phase(told, "prefill")["num_tokens"]
        assert told["usage"]["num_tokens"] == usage["completion_tokens"]
        assert 0 < told["first_token_s"] < told["seconds"]
        assert told["outcome"] == "answered" and told["error"] is None and told["node_id"]
        assert (await house.timeline(answer.json()["id"]))["request_id"] == "plain"
        header = answer.headers["x-orchard-timing"]
        parts = dict(part.split(";dur=") for part in header.split(", "))
        assert list(parts) == [*AROUND, *ENGINE_PHASES, "return"]
        assert float(parts["prefill"]) == pytest.approx(1e3 * phase(told, "prefill")["seconds"], abs=0.1)

    house.run(test)


def test_a_stream_has_the_same_phases_and_no_header(house: DemoGraph):
    async def test():
        answer, seconds = await house.ask("stream", "What is 7 + 5?", stream=True)
        told = await house.timeline("stream")
        assert_sums(told, seconds)
        assert names(told) == [*AROUND, *ENGINE_PHASES, "return", "send"]
        assert "x-orchard-timing" not in answer.headers

    house.run(test)


def test_each_choice_has_its_own_entry_and_the_longest_tells_the_phases(house: DemoGraph):
    async def test():
        told = await house.told("choices", "Say something", n=3, temperature=1, seed=3, max_tokens=12)
        assert [one["index"] for one in told["choices"]] == [0, 1, 2]
        assert sum(one["num_tokens"] for one in told["choices"]) == told["usage"]["num_tokens"]

    house.run(test)


def test_a_cached_prefix_and_an_edited_system_prompt(house: DemoGraph):
    async def test():
        system = {"role": "system", "content": WORDS * 12}
        first = await house.told("first", [system, {"role": "user", "content": "Hello"}])
        again = await house.told("again", [system, {"role": "user", "content": "What is 3 + 4?"}])
        found = phase(again, "prefill")
        assert found["num_cached"] == again["usage"]["num_cached_tokens"] > 100 and found["saved_s"] > 0
        assert phase(first, "prefill")["num_cached"] < 16
        edited = {**system, "content": WORDS * 6 + "and plums " + WORDS * 6}
        miss = await house.told("edited", [edited, {"role": "user", "content": "Hello"}], max_tokens=1)
        assert "the text differs at token" in phase(miss, "prefill")["miss"]
        assert "baker" not in str(miss), "no text of the prompt"

    house.run(test)


def test_a_sparse_prompt(house: DemoGraph):
    async def test():
        told = await house.told("sparse", WORDS * 40, specprefill=True)
        plan = phase(told, "plan")
        assert plan["num_scored"] > 0 and plan["sparse_s"] > 0 and plan["dense_because"] is None
        assert told["usage"]["num_skipped_tokens"] > 0
        dense = await house.told("dense", "Hi", specprefill=True)
        assert "too short" in phase(dense, "plan")["dense_because"]

    house.run(test)


def test_an_image(house: DemoGraph):
    async def test():
        told = await house.told("image", PICTURE)
        assert phase(told, "plan")["num_images"] == 1 and phase(told, "plan")["images_s"] > 0
        [image] = phase(told, "prefill")["images"]
        assert image["num_patches"] > 0 and image["seconds"] > 0

    house.run(test)


def test_a_grammar(house: DemoGraph):
    async def test():
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": LONG_SCHEMA}}
        told = await house.told("grammar", "Fill in the form", response_format=form)
        assert "grammar" in names(told) and "handover" not in names(told)

    house.run(test)


def test_a_refused_request(house: DemoGraph):
    async def test():
        told = await house.told("refused", "Hi", temperature=7)
        assert (told["outcome"], told["status"]) == ("refused", 400) and told["error"]
        assert names(told) == ["body", "send"]
        long = await house.told("too-long", WORDS * 4000)
        assert (long["outcome"], long["error"]) == ("refused", "context_length_exceeded")
        assert names(long) == ["body", "parse", "place", "send"]

    house.run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_tells_what_the_engine_did(house: DemoGraph, stream: bool):
    async def test():
        id = f"cancelled {stream}".replace(" ", "-")
        house.note()
        asking = asyncio.ensure_future(
            house.ask(id, "Tell me everything", max_tokens=4000, ignore_eos=True, stream=stream)
        )
        await house.is_decoding()
        assert (await house.http.post(f"/v1/chat/completions/{id}/cancel", json={})).status_code == 200
        _, seconds = await asking
        await until(lambda: not house.graph.engine.status().num_running, 60.0)
        told = await house.timeline(id)
        assert_sums(told, seconds)
        assert (told["outcome"], told["status"]) == ("cancelled", 499)
        assert phase(told, "decode")["num_tokens"] > 0
        assert told["choices"][0]["finish_reason"] == "abort"

    house.run(test)


def test_a_failed_step(house: DemoGraph):
    async def test():
        house.graph.faults.arm("decode", Failing())
        told = await house.told("failed", "Tell me everything", max_tokens=50, ignore_eos=True)
        assert (told["outcome"], told["status"]) == ("failed", 503) and told["error"]
        assert told["choices"][0]["finish_reason"] == "error"
        assert {"prefill", "decode"} < set(names(told))  # and `retry`, if the first token comes with the failure

    house.run(test)


def test_a_request_behind_others_names_what_it_waited_for(narrow: DemoGraph):
    async def test():
        narrow.note()
        ahead = asyncio.ensure_future(narrow.ask("ahead", "Tell me everything", max_tokens=200, ignore_eos=True))
        await narrow.is_decoding()
        _, seconds = await narrow.ask("behind", "Hi", max_tokens=1)
        told = await narrow.timeline("behind")
        assert_sums(told, seconds)
        waited = phase(told, "queue")
        assert waited["obstacle"] == "rows" and waited["num_decoding"] == 1
        assert waited["seconds"] > 0.5 * told["seconds"]
        assert "max_running" in told["why"]
        await ahead

    narrow.run(test)


def test_a_short_prompt_behind_a_long_one_names_it(narrow: DemoGraph):
    async def test():
        long = asyncio.ensure_future(narrow.ask("long", WORDS * 150, max_tokens=1, specprefill=False))
        await until(lambda: narrow.graph.engine.status().num_running == 1, 60.0)
        await narrow.ask("short", "Hi", max_tokens=1)
        told = await narrow.timeline("short")
        assert phase(told, "queue")["num_prompt_tokens"] > 1000
        assert "tokens of other prompts were being computed" in told["why"] or "max_running" in told["why"]
        await long

    narrow.run(test)


def test_a_preempted_request_names_the_reason(narrow: DemoGraph):
    async def test():
        narrow.note()
        asking = asyncio.ensure_future(
            narrow.ask("weak", "Tell me everything", max_tokens=80, ignore_eos=True, priority=5)
        )
        await narrow.is_decoding()
        urgent, _ = await narrow.ask("urgent", "Hi", priority=-5)
        assert urgent.status_code == 200
        _, seconds = await asking
        told = await narrow.timeline("weak")
        assert_sums(told, seconds)
        assert phase(told, "preempted")["preempted_by"] == "priority"
        assert names(told).count("decode") == 2 and told["choices"][0]["num_preemptions"] == 1
        assert sum(one["num_tokens"] for one in told["phases"] if one["name"] == "decode") + 2 == 80

    narrow.run(test)


def test_the_list_names_the_slowest_and_the_newest(house: DemoGraph):
    async def test():
        for i in range(3):
            await house.ask(f"listed-{i}", "Hi", max_tokens=1 + 20 * (i == 1), ignore_eos=True)
        newest = (await house.http.get("/v1/requests?newest=3")).json()["data"]
        assert [one["request_id"] for one in newest] == ["listed-2", "listed-1", "listed-0"]
        slowest = (await house.http.get("/v1/requests?slowest=100")).json()["data"]
        seconds = [one["seconds"] for one in slowest]
        assert seconds == sorted(seconds, reverse=True) and len(seconds) <= MAX_KEPT
        for query in ("slowest=0", "slowest=101", "slowest=x", "slowest=1&newest=1", "fastest=1", "newest=-1"):
            assert (await house.http.get(f"/v1/requests?{query}")).status_code == 400, query
        assert (await house.http.get("/v1/requests/unknown")).status_code == 404

    house.run(test)


def test_only_the_machine_itself_and_keys_may_ask(house: DemoGraph):
    async def test():
        transport = httpx.ASGITransport(house.graph.app, client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as other:
            for path in ("/v1/requests", "/v1/requests/plain"):
                assert (await other.get(path)).status_code == 403

    house.run(test)


# --- RequestTimeline itself ----------------------------------------------------------------------------------------


def test_laps_follow_one_another_and_the_same_name_continues_a_stretch():
    clock = Clock()
    timeline = RequestTimeline("r", "/v1/x", clock=clock)
    for name, seconds in (("body", 1.0), ("place", 0.5), ("place", 0.25), ("plan", 2.0), ("place", 0.5)):
        clock.advance(seconds)
        timeline.lap(name)
    clock.advance(0.25)
    timeline.end("answered", 200)
    timeline.end("disconnected", 499)
    told = [(one.name, one.seconds) for one in timeline.stretches()]
    assert told == [("body", 1.0), ("place", 0.75), ("plan", 2.0), ("place", 0.5), ("send", 0.25)]
    assert timeline.seconds == 4.5 and (timeline.outcome, timeline.status) == ("answered", 200)


def test_a_timeline_is_bounded_and_still_adds_up():
    clock = Clock()
    timeline = RequestTimeline("r", "/v1/x", clock=clock)
    for i in range(10 * MAX_STRETCHES):
        clock.advance(1.0)
        timeline.lap(f"place {i}")
    assert len(timeline.stretches()) == MAX_STRETCHES
    assert sum(one.seconds for one in timeline.stretches()) == timeline.seconds == 10 * MAX_STRETCHES


def test_only_the_last_timelines_are_kept():
    kept = Timelines(max_kept=3)
    for i in range(5):
        timeline = RequestTimeline(f"r{i}", "/v1/x")
        timeline.answer_id = f"a{i}"
        kept.keep(timeline)
    assert kept.find("r1") is None and kept.find("a1") is None
    assert [one.request_id for one in kept.newest(9)] == ["r4", "r3", "r2"]
    assert kept.find("a3") is kept.find("r3") is not None


@pytest.mark.parametrize(
    "header", [None, "", "x", "elsewhere 1.0", f"{socket.gethostname()} nan", f"{socket.gethostname()} 1e300",
               f"{socket.gethostname()} -5", f"{socket.gethostname()} inf"]
)  # fmt: skip
def test_an_arrival_that_cannot_be_is_not_believed(header: str | None):
    assert arrived_s(header) is None


def test_an_arrival_at_the_proxy_of_this_machine_counts():
    header = arrival_header()
    arrived = arrived_s(header)
    assert arrived is not None and 0 <= time.monotonic() - arrived < 10
    timeline = RequestTimeline("r", "/v1/x", arrived_s=arrived)
    assert [one.name for one in timeline.stretches()] == ["proxy"] and timeline.spent_s >= timeline.seconds
