"""Videos: the frames, patches and prompt of the library's own processor; decoding within limits, in the workers."""

import asyncio
import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import _timestamped_video_placeholder

from engine.errors import InvalidRequest
from engine.media_config import MediaConfig
from engine.processing.checkpoint import DEMO_MODEL, media_kinds, read_config, videos_unsupported_reason
from engine.processing.images import ImagePreprocessor, normalize
from engine.processing.media import MediaLoader
from engine.processing.message import ImageSource, video_part
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.video_file import VideoFile
from engine.processing.video_grid import VideoGrid
from engine.protocol import ImagePatches
from tests.support.image_files import PNG, data_url, encoded, picture
from tests.support.video_files import recorded, split_video, turned_clockwise, video
from tests.support.vision_families import SIGHTED, video_pixels
from tests.support.vision_zoo import image, write_files

FIELD = "messages[0].content[0].video_url.url"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"), SIGHTED["qwen3_vl"])


@pytest.fixture(scope="module")
def grid(model_dir: Path) -> VideoGrid:
    grid = ImagePreprocessor(model_dir).video_grid
    assert grid is not None
    return grid


def load(model_dir: Path, *contents: bytes | str, **limits: int) -> tuple[ImagePatches, ...]:
    """Load videos, or images where the content is a URL."""
    preprocessor = ImagePreprocessor(model_dir)

    async def go() -> tuple[ImagePatches, ...]:
        config = MediaConfig.model_validate(limits)
        loader = MediaLoader(config, preprocessor.grid, video=preprocessor.video_grid)
        sources = [
            ImageSource("image", content) if isinstance(content, str)
            else ImageSource(FIELD, data_url(content, "video/mp4"), is_video=True)
            for content in contents
        ]  # fmt: skip
        try:
            async with loader.load(sources) as images:
                return images
        finally:
            loader.workers.close()

    return asyncio.run(go())


@pytest.mark.parametrize(("num_frames", "size"), [(2, (48, 40)), (5, (33, 70)), (8, (20, 100)), (8, (300, 200))])
def test_normalised_patches_are_those_of_the_library(
    model_dir: Path, grid: VideoGrid, num_frames: int, size: tuple[int, int]
):
    frames = [image(*size, seed=seed) for seed in range(num_frames)]
    expected = video_pixels(frames)
    target = grid.target_size(num_frames, *size)
    patches, _ = grid.cut([frame.resize(target, resample=grid.resample) for frame in frames])
    groups, rows, columns = expected["video_grid_thw"][0]
    assert (len(patches), target) == (groups, (columns * grid.patch_size, rows * grid.patch_size))
    ours = _normalized(patches, model_dir)
    assert np.abs(ours - expected["pixel_values_videos"]).max() < 1e-5


def _normalized(patches: np.ndarray, model_dir: Path) -> np.ndarray:
    """Normalise uint8 [groups, patches, 3 * frames, side, side] to float32 [groups * patches, values]."""
    groups, num_patches, channels, side, _ = patches.shape
    by_frame = patches.reshape(-1, 3, channels // 3, side, side).swapaxes(1, 2)
    normalization = replace(ImagePreprocessor(model_dir).normalization, temporal_patch_size=1)
    flat = normalize(by_frame.reshape(-1, 3, side, side), normalization)
    return flat.reshape(-1, channels // 3, 3, side, side).swapaxes(1, 2).reshape(groups * num_patches, -1)


def test_frames_are_spread_over_the_video_and_the_prompt_has_their_times(model_dir: Path, grid: VideoGrid):
    images = load(model_dir, video(num_frames=24, fps=4))  # six seconds; eight frames of at most two per second
    indices = np.linspace(0, 23, 8).round().astype(int).tolist()
    assert grid.frame_indices(24, 4.0) == indices
    times_s = [(a + b) / 4 / 2 for a, b in zip(indices[::2], indices[1::2], strict=True)]
    assert [one.frame.time_s for one in images if one.frame] == times_s
    lightness = [one.patches.mean() for one in images]
    assert lightness == sorted(lightness) and lightness[-1] - lightness[0] > 100
    tokenizer = ChatTokenizer(model_dir)
    messages = [{"role": "user", "content": [video_part("")]}]
    ids = tokenizer.encode_chat(messages, template_kwargs={}, placeholders=tokenizer.placeholders(images))
    placed = _timestamped_video_placeholder(times_s, images[0].num_tokens, "<start>", "<end>")
    expected = placed.replace("<|placeholder|>", "<image>")
    assert tokenizer.decode(ids.tolist()).startswith(f"<|im_start|>user\n{expected}<|im_end|>")


def test_video_without_its_length_in_the_header_is_read_to_its_end(model_dir: Path):
    images = load(model_dir, recorded(num_frames=24))
    assert len(images) == len(load(model_dir, video(num_frames=24))) == 4
    assert images[-1].patches.mean() - images[0].patches.mean() > 100


def test_frames_are_turned_as_the_video_is_displayed(grid: VideoGrid):
    upright, turned = (VideoFile(one, 10**6, grid) for one in (split_video(), turned_clockwise(split_video())))
    assert (upright.size, turned.size) == ((64, 48), (48, 64))
    assert upright.target == turned.target[::-1]
    expected, found = (np.array(one.frames()[0], np.int32) for one in (upright, turned))
    width, height = upright.target
    assert expected[:, : width // 2].mean() > 200 and expected[:, width // 2 :].mean() < 50
    assert found.shape == (width, height, 3)
    assert found[: width // 2].mean() > 200 and found[width // 2 :].mean() < 50, "what was left is above"


def test_images_and_videos_keep_their_order_in_the_prompt(model_dir: Path):
    url = data_url(encoded(picture(64, 48)))
    images = load(model_dir, video(4), url, video(8, kind="webm"))
    assert [None if one.frame is None else one.frame.video for one in images] == [0, None, 2, 2]
    assert len(ChatTokenizer(model_dir).placeholders(images)) == 3


def test_same_video_has_the_same_hashes_and_another_one_others(model_dir: Path):
    one, again, other = (load(model_dir, video(n)) for n in (8, 8, 9))
    assert [image.content_hash for image in one] == [image.content_hash for image in again]
    assert one[0].content_hash != other[0].content_hash or one[1].content_hash != other[1].content_hash


def test_number_of_frames_and_their_bytes_are_limited(model_dir: Path, grid: VideoGrid):
    assert len(load(model_dir, video(40), max_video_frames=4)) == 2
    limited = grid.limited(4, max_bytes=3 * 16 * 16 * 8)
    width, height = limited.target_size(4, 640, 480)
    assert 4 * width * height <= 16 * 16 * 8


@pytest.mark.parametrize(
    ("content", "limits", "message"),
    [
        (b"#EXTM3U\nfile:///etc/passwd", {}, "the video could not be decoded; MP4, MOV, WebM and MKV"),
        (PNG, {}, "the video could not be decoded"),
        (video(3)[:200], {}, "the video could not be decoded"),
        (video(3), {"max_pixels": 1024}, "the video has 64 x 48 = 3072 pixels; the limit is 1024"),
        (video(3, size=(512, 512)), {"max_bytes": 1024}, "bytes; the limit is 1024"),
        (video(3, size=(1024, 2)), {}, "the longer side may be at most 200 times"),
    ],
)
def test_broken_or_large_video_is_refused_with_the_reason(
    model_dir: Path, content: bytes, limits: dict[str, int], message: str
):
    with pytest.raises(InvalidRequest, match=message) as caught:
        load(model_dir, content, **limits)
    assert caught.value.field == FIELD


def test_too_many_images_and_videos_are_counted_by_their_kind(model_dir: Path):
    with pytest.raises(InvalidRequest, match=r"^the request has 1 images and 2 videos; the limit is 2$"):
        load(model_dir, data_url(PNG), b"", b"", max_images=2)


def test_image_sent_as_a_video_is_refused(model_dir: Path):
    source = ImageSource(FIELD, data_url(PNG), is_video=True)
    preprocessor = ImagePreprocessor(model_dir)

    async def go(video_grid: VideoGrid | None) -> None:
        loader = MediaLoader(MediaConfig(), preprocessor.grid, video=video_grid)
        async with loader.load([source]):
            pass

    with pytest.raises(InvalidRequest, match=r"media type 'image/png'; expected video/\.\.\."):
        asyncio.run(go(preprocessor.video_grid))
    with pytest.raises(InvalidRequest, match="this model does not accept videos"):
        asyncio.run(go(None))


def test_videos_are_refused_by_name_where_they_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def reason(name: str, **settings: Any) -> str | None:
        model_dir = write_files(tmp_path / name, SIGHTED[name])
        path = model_dir / "video_preprocessor_config.json"
        if settings:
            path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return videos_unsupported_reason(model_dir, read_config(model_dir))

    assert reason("qwen3_vl") is None
    assert reason("qwen2_5_vl") == "videos of the family qwen2_5_vl are not supported"
    other = reason("qwen3_vl", video_processor_type="OtherProcessor")
    assert other == "the video processor is OtherProcessor; supported is Qwen3VLVideoProcessor"
    assert "image_mean of videos is [0, 0, 0], that of images" in str(reason("qwen3_vl", image_mean=[0, 0, 0]))
    copy = shutil.copytree(DEMO_MODEL, tmp_path / "demo", ignore=shutil.ignore_patterns("*.safetensors"))
    assert media_kinds(copy, read_config(copy)) == {"image", "video"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert media_kinds(copy, read_config(copy)) == {"image"}
    assert "the extra `video` brings it" in str(videos_unsupported_reason(copy, read_config(copy)))
