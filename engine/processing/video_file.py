"""VideoFile: an encoded video from a client, with the checks before it is decoded, and some of its frames.

Image workers import this module when the first video arrives, since it loads FFmpeg's libraries.
"""

import io
from collections.abc import Callable
from typing import TypeVar

import av
from PIL import Image

from engine.processing.image_file import ImageRefused, check_sides
from engine.processing.video_grid import VideoGrid

T = TypeVar("T")

UNDECODABLE = "the video could not be decoded; MP4, MOV, WebM and MKV are supported"
MAX_DURATION_S = 3600


class VideoFile:
    """Reads the headers at once and frames later. The format is determined by the content alone.

    Args:
        content: The encoded video.
        max_pixels: Most pixels of a frame, width times height.
        grid: Which frames are read, and their size.

    Raises:
        ImageRefused: For every error, without the decoder's message.
    """

    def __init__(self, content: bytes | bytearray, max_pixels: int, grid: VideoGrid):
        self._grid = grid
        form = _format_of(content)
        self._container = _decoding(lambda: av.open(io.BytesIO(content), mode="r", format=form))
        if not self._container.streams.video:
            raise ImageRefused("the file has no video")
        self._stream = self._container.streams.video[0]
        self._stream.codec_context.thread_count = 1
        self.size = self._stream.width, self._stream.height
        """Width and height."""
        width, height = self.size
        if width * height > max_pixels:
            raise ImageRefused(f"the video has {width} x {height} = {width * height} pixels; the limit is {max_pixels}")
        check_sides(width, height)
        num_frames, fps = _decoding(self._length)
        if num_frames / fps > MAX_DURATION_S:
            raise ImageRefused(f"the video takes {num_frames / fps:.0f} s; the limit is {MAX_DURATION_S} s")
        self.indices = grid.frame_indices(num_frames, fps)
        """The frames that are read."""
        self.times_s = grid.times_s(self.indices, fps)
        """Of each group of these frames, in seconds."""
        self.target = grid.target_size(len(self.indices), width, height)
        """Width and height to which frames are resized."""

    def frames(self) -> list[Image.Image]:
        """Decode up to the last frame that is read; return these, RGB, resized. Raises ImageRefused, MemoryError."""
        return _decoding(self._frames)

    def _length(self) -> tuple[int, float]:
        """Return the number of frames and frames per second; the former is estimated where the header has none."""
        rate = self._stream.average_rate or self._stream.guessed_rate
        if not rate:
            raise ImageRefused("the video does not tell its frames per second")
        if self._stream.frames:
            return self._stream.frames, float(rate)
        duration_s = (self._container.duration or 0) / av.time_base
        return max(int(duration_s * rate), 1), float(rate)

    def _frames(self) -> list[Image.Image]:
        wanted, found = set(self.indices), []
        for index, frame in enumerate(self._container.decode(self._stream)):
            if index in wanted:
                image = Image.fromarray(frame.to_ndarray(format="rgb24"))
                found.append(image.resize(self.target, resample=self._grid.resample))
            if index >= self.indices[-1]:
                break
        if not found:
            raise ImageRefused(UNDECODABLE)
        return found + found[-1:] * (len(self.indices) - len(found))  # their number may have been an estimate


def _format_of(content: bytes | bytearray) -> str:
    """Return FFmpeg's name of the container. Raises ImageRefused for others, such as playlists of further files."""
    if content[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if content[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    raise ImageRefused(UNDECODABLE)


def _decoding(step: Callable[[], T]) -> T:
    try:
        return step()
    except (ImageRefused, MemoryError):
        raise
    except Exception:  # decoders raise many exception types for broken files
        raise ImageRefused(UNDECODABLE) from None
