"""VideoFile: an encoded video from a client, with the checks before it is decoded, and some of its frames.

Image workers import this module when the first video arrives, since it loads FFmpeg's libraries.
"""

import io
from collections.abc import Callable
from typing import TypeVar

import av
import numpy as np
from PIL import Image

from engine.processing.image_file import ImageRefused, check_sides
from engine.processing.video_grid import UNDECODABLE, VideoGrid

T = TypeVar("T")

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
        self._grid, self._content, self._format = grid, content, _format_of(content)
        self._open()
        width, height = self._stream.width, self._stream.height
        if width * height > max_pixels:
            raise ImageRefused(f"the video has {width} x {height} = {width * height} pixels; the limit is {max_pixels}")
        check_sides(width, height)
        self._quarter_turns = _decoding(self._read_quarter_turns)
        if self._quarter_turns % 2:
            width, height = height, width
        self.size = width, height
        """Width and height as displayed."""
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

    def _open(self) -> None:
        """Open the file at its beginning."""
        self._container = _decoding(lambda: av.open(io.BytesIO(self._content), mode="r", format=self._format))
        if not self._container.streams.video:
            raise ImageRefused("the file has no video")
        self._stream = self._container.streams.video[0]
        self._stream.codec_context.thread_count = 1

    def _read_quarter_turns(self) -> int:
        """Return by how many quarter turns, counterclockwise, frames are displayed; only a decoded frame tells."""
        frame = next(self._container.decode(self._stream), None)
        self._open()
        return 0 if frame is None else round(frame.rotation / 90) % 4

    def _length(self) -> tuple[int, float]:
        """Return the number of frames, and frames per second.

        Without a number in the header it is estimated from the duration, and counted where there is none either, as in
        WebM files of a browser's recorder.
        """
        rate = self._stream.average_rate or self._stream.guessed_rate
        if not rate:
            raise ImageRefused("the video does not tell its frames per second")
        if self._stream.frames:
            return self._stream.frames, float(rate)
        if self._container.duration:
            return max(int(self._container.duration / av.time_base * rate), 1), float(rate)
        num_packets = sum(packet.size > 0 for packet in self._container.demux(self._stream))
        self._open()
        return max(num_packets, 1), float(rate)

    def _frames(self) -> list[Image.Image]:
        wanted, found = set(self.indices), []
        for index, frame in enumerate(self._container.decode(self._stream)):
            if index in wanted:
                upright = np.rot90(frame.to_ndarray(format="rgb24"), self._quarter_turns)
                image = Image.fromarray(np.ascontiguousarray(upright))
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
