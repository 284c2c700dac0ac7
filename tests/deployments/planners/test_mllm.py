import asyncio
import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from deployments.args import AppArgs
from deployments.planners.mllm import MLLM
from deployments.requests import ChatRequest, Plan
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.media_config import MediaConfig
from engine.processing import media
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.tokenizer import ChatTokenizer
from tests.support.image_files import scan_bomb
from tests.support.video_files import video
from tests.support.vision_families import SIGHTED
from tests.support.vision_zoo import write_files

LIMITS = MediaConfig(max_images=3)


def data_url(size: tuple[int, int] = (64, 64), color: str = "red") -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


TEXT = {"type": "text", "text": "What is in the image?"}


def plan(*messages: dict[str, Any], limits: MediaConfig = LIMITS, **engine: Any) -> Plan:
    async def go() -> Plan:
        make: Any = MLLM.func_or_class
        return await make(AppArgs(engine=EngineConfig(**engine), media=limits)).plan(ChatRequest("r", messages))

    return asyncio.run(go())


def test_placeholder_tokens_stand_for_each_image_in_order():
    planned = plan(user(picture(data_url((64, 64))), picture(data_url((128, 64), "blue")), TEXT))
    images = planned.request.images
    assert [image.num_tokens for image in images] == [4, 8]
    assert (planned.request.token_ids == 6).sum() == 12
    assert len({image.content_hash for image in images}) == 2


def test_video_becomes_frames_behind_their_times():
    url = "data:video/mp4;base64," + base64.b64encode(video(num_frames=12, fps=4, size=(64, 64))).decode()
    part = {"type": "video_url", "video_url": {"url": url}}
    planned = plan(user(part, picture(data_url()), {"type": "text", "text": "What is in the video?"}))
    frames = [image for image in planned.request.images if image.frame is not None]
    assert len(planned.request.images) == len(frames) + 1
    assert (planned.request.token_ids == 6).sum() == sum(image.num_tokens for image in planned.request.images)
    prompt = ChatTokenizer(DEMO_MODEL).decode(planned.request.token_ids.tolist())
    times = [f"<{image.frame.time_s:.1f} seconds>" for image in frames if image.frame is not None]
    assert re.findall(r"<[0-9.]+ seconds>", prompt) == times
    assert len(times) > 1


OTHERS = [
    *("deepseekocr", "gemma3 with pan-and-scan", "glm4v", "idefics3", "internvl", "internvl_chat", "llava_next"),
    *("mistral3", "molmo", "phi3_v", "aya_vision"),
]


@pytest.mark.parametrize("name", OTHERS)
def test_image_of_another_family_is_planned_with_its_own_placeholder(name: str, tmp_path: Path):
    model_dir = write_files(tmp_path, SIGHTED[name])
    planned = plan(user(picture(data_url((64, 40))), TEXT), model=str(model_dir))
    [image] = planned.request.images
    assert SIGHTED[name].placed(image) in ChatTokenizer(model_dir).decode(planned.request.token_ids.tolist())


def test_undecodable_image_is_refused_by_path():
    with pytest.raises(InvalidRequest, match="decoded") as error:
        plan(user(TEXT, picture("data:image/png;base64,AAAA")))
    assert error.value.field == "messages[0].content[1].image_url.url"


def test_more_images_than_allowed_are_refused():
    with pytest.raises(InvalidRequest, match="4 images; the limit is 3"):
        plan(user(*[picture(data_url())] * 4))


def test_images_beyond_the_byte_limit_of_a_request_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(media, "MAX_REQUEST_BYTES", 20_000)
    limits = MediaConfig(max_image_tokens=4)
    plan(user(picture(data_url((64, 64)))), limits=limits)
    with pytest.raises(InvalidRequest, match=r"take 24576 bytes.*limit for a request is 20000") as error:
        plan(user(picture(data_url()), picture(data_url())), limits=limits)
    assert error.value.field == "messages[0].content[1].image_url.url"


def test_image_for_a_text_only_model_is_refused(tmp_path: Path):
    for file in DEMO_MODEL.iterdir():
        if file.name != "preprocessor_config.json" and file.is_file():
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(InvalidRequest, match="does not accept images"):
        plan(user(picture(data_url())), model=str(tmp_path))


def test_hostile_image_is_refused_by_path_and_counted_in_the_status():
    async def go() -> dict[str, Any]:
        make: Any = MLLM.func_or_class
        planner = make(AppArgs(media=LIMITS))
        bomb = "data:image/jpeg;base64," + base64.b64encode(scan_bomb(1000)).decode()
        with pytest.raises(InvalidRequest, match="more than 64 scans") as error:
            await planner.plan(ChatRequest("r", (user(picture(bomb)),)))
        assert error.value.field == "messages[0].content[0].image_url.url"
        await planner.plan(ChatRequest("s", (user(picture(data_url())),)))
        return planner._loader.status()

    status = asyncio.run(go())
    assert (status["num_images"], status["num_refused"], status["planning_bytes"]) == (1, 1, 0)
