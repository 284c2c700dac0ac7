"""Encoded videos."""

import io
from typing import Any

import av
import numpy as np


def video(num_frames: int, fps: int = 4, size: tuple[int, int] = (64, 48), kind: str = "mp4") -> bytes:
    """An encoded video whose frames have ever lighter colours."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream: Any = container.add_stream("mpeg4" if kind == "mp4" else "libvpx", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i in range(num_frames):
            pixels = np.full((size[1], size[0], 3), 20 + 200 * i // num_frames, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
