"""Encoded videos."""

import io
import struct
from typing import Any

import av
import numpy as np


def video(num_frames: int, fps: int = 4, size: tuple[int, int] = (64, 48), kind: str = "mp4") -> bytes:
    """An encoded video whose frames have ever lighter colours."""
    buffer = io.BytesIO()
    _encode(buffer, _lighter(num_frames, size), fps, kind)
    return buffer.getvalue()


def split_video() -> bytes:
    """An MP4 of 64 x 48 pixels whose left half is white and whose right half is black."""
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:, :32] = 255
    buffer = io.BytesIO()
    _encode(buffer, [pixels] * 4, 4, "mp4")
    return buffer.getvalue()


def turned_clockwise(mp4: bytes) -> bytes:
    """The same MP4, to be displayed a quarter turn clockwise, as phones store videos in portrait format."""
    matrix = mp4.index(b"tkhd") + 44  # of version 0: flags, times, track, duration, layer, group and volume before it
    one, whole = 1 << 16, 1 << 30
    turned = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, whole)
    return mp4[:matrix] + turned + mp4[matrix + len(turned) :]


class _Pipe(io.RawIOBase):
    """A file that can only be appended to."""

    def __init__(self) -> None:
        self.content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.content += bytes(data)
        return len(data)


def recorded(num_frames: int) -> bytes:
    """The WebM file of `video`, but without its length in the header, as of a browser's recorder."""
    pipe = _Pipe()
    _encode(pipe, _lighter(num_frames, (64, 48)), 4, "webm")
    return bytes(pipe.content)


def _lighter(num_frames: int, size: tuple[int, int]) -> list[np.ndarray]:
    return [np.full((size[1], size[0], 3), 20 + 200 * i // num_frames, np.uint8) for i in range(num_frames)]


def _encode(file: io.IOBase, frames: list[np.ndarray], fps: int, kind: str) -> None:
    height, width, _ = frames[0].shape
    with av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream("mpeg4" if kind == "mp4" else "libvpx", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
