"""Limits of the open requests of an engine: reached, and exceeded by one."""

import asyncio

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import InvalidRequest, Overloaded
from engine.open_requests import OpenRequests
from engine.protocol import EngineRequest, FinishReason, ImagePatches, SamplingParams

CONFIG = EngineConfig(max_running=2, max_queue=1, image_memory_mb=64)


def request(request_id: str, num_choices: int = 1, pixel_bytes: int = 0) -> EngineRequest:
    patches = np.zeros((pixel_bytes // 768, 3, 16, 16), np.uint8)
    images = (ImagePatches(patches, (1, 1, len(patches)), 1, "hash"),) if pixel_bytes else ()
    token_ids = np.zeros(3, np.int32)
    return EngineRequest(request_id, token_ids, SamplingParams(5), (), images, num_choices=num_choices)


def opened(requests: OpenRequests, one: EngineRequest) -> str:
    requests.check_room(one, lambda: 7.0)
    return requests.open(one)[0]


def test_choices_are_counted_until_their_request_is_closed():
    requests = OpenRequests(CONFIG)
    first, _ = opened(requests, request("a", 2)), opened(requests, request("b"))
    with pytest.raises(Overloaded, match=r"3 choices are open and the request has 1; the limit is 3 ") as error:
        requests.check_room(request("c"), lambda: 7.0)
    assert error.value.retry_after_s == 7.0
    requests.streams[first].end(FinishReason.ABORT)
    requests.check_room(request("c"), lambda: 7.0)  # a finished stream counts as one choice until it is read
    with pytest.raises(Overloaded, match="2 choices are open and the request has 2"):
        requests.check_room(request("c", 2), lambda: 7.0)
    requests.close(first)
    requests.check_room(request("c", 2), lambda: 7.0)


def test_images_are_counted_in_bytes_and_the_first_one_may_be_larger_than_the_limit():
    requests = OpenRequests(CONFIG)
    key = opened(requests, request("large", pixel_bytes=65 * 2**20))
    size = requests.num_pixel_bytes
    with pytest.raises(Overloaded, match=rf"take {size} bytes and .* request 768; the limit is 67108864 bytes"):
        requests.check_room(request("small", pixel_bytes=768), lambda: 7.0)
    requests.check_room(request("none"), lambda: 7.0)
    requests.close(key)
    assert requests.num_pixel_bytes == 0
    opened(requests, request("small", pixel_bytes=768))


def test_an_id_may_be_used_again_once_its_request_is_closed():
    requests = OpenRequests(CONFIG)
    key = opened(requests, request("a"))
    assert requests.key_of("a") == key
    requests.streams[key].end(FinishReason.ABORT)
    assert requests.key_of("a") is None
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        requests.check_room(request("a"), lambda: 7.0)
    requests.close(key)
    assert opened(requests, request("a")) != key


def test_waiting_ends_when_no_request_is_open():
    async def go() -> None:
        requests = OpenRequests(CONFIG)
        await asyncio.wait_for(requests.wait_closed(), 60)
        keys = [opened(requests, request(name)) for name in ("a", "b")]
        waiting = asyncio.ensure_future(requests.wait_closed())
        requests.close(keys[0])
        await asyncio.sleep(0.01)
        assert not waiting.done() and requests.compiling == {keys[1]}
        requests.close(keys[1])
        await asyncio.wait_for(waiting, 60)
        assert not requests.compiling

    asyncio.run(go())
