"""The program of an image worker: decodes clients' images one by one, under resource limits of the operating system.

A planner starts it (worker_process.py) and talks to it over a socket, which is its standard input. It imports only the
standard library, NumPy and Pillow, so that it starts quickly and has no secrets that a decoder exploit could reach.

Protocol: the worker reports that it is ready. For each image the planner sends the encoded bytes, the worker answers
with width and height, the planner sends GO, and the worker sends the patches, whose number follows from the size. Each
answer starts with a 4-byte length and a JSON object; the key `refused` ends the image. The key `failed` also ends the
worker, and comes with the lines that it has logged, `log`.
"""

import base64
import binascii
import contextlib
import json
import logging
import resource
import socket
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from PIL import Image

from engine.processing import image_grids
from engine.processing.image_file import ImageFile, ImageRefused
from engine.processing.image_grid import ImageGrid
from engine.processing.video_grid import VideoGrid
from engine.worker_log import WorkerLog

if TYPE_CHECKING:
    from engine.media_config import MediaConfig

log = logging.getLogger("orchard.images")

REQUEST = struct.Struct(">QBBB")
"""Header of an image or video: number of bytes, and whether they are base64 text, whether to decode in low detail, and
whether they are a video."""
LENGTH = struct.Struct(">I")
FROM_URL_ALPHABET = bytes.maketrans(b"-_", b"+/")
GO = b"g"
WALL_PER_CPU = 6.0
"""Limit of the elapsed time of one image, as a multiple of decode_cpu_s."""


@dataclass(frozen=True)
class WorkerSettings:
    """Arguments of a worker."""

    grid: ImageGrid
    max_pixels: int  # of one image, width times height
    cpu_s: float  # CPU seconds for one image
    wall_s: float  # elapsed seconds for one image
    memory_bytes: int  # for decoding, in addition to the memory of the started worker
    limits_address_space: bool  # by RLIMIT_AS, which macOS ignores; there the planner watches the resident memory
    video: VideoGrid | None = None  # None if the model reads no videos

    def to_json(self) -> str:
        video = None if self.video is None else vars(self.video)
        return json.dumps({**vars(self), "grid": image_grids.to_json(self.grid), "video": video})

    @classmethod
    def of(cls, config: "MediaConfig", grid: ImageGrid, video: VideoGrid | None = None) -> "WorkerSettings":
        cpu_s, memory_bytes, limits = config.decode_cpu_s, config.decode_memory_mb * 2**20, sys.platform == "linux"
        return cls(grid, config.max_pixels, cpu_s, WALL_PER_CPU * cpu_s, memory_bytes, limits, video)

    @classmethod
    def from_json(cls, text: str) -> "WorkerSettings":
        fields = json.loads(text)
        video = None if fields["video"] is None else VideoGrid(**fields["video"])
        return cls(**{**fields, "grid": image_grids.from_json(fields["grid"]), "video": video})


def main() -> None:
    """Receive images from the planner and answer with their patches, or with the reason why one is refused.

    Ends when the planner closes the connection.
    """
    settings = WorkerSettings.from_json(sys.argv[1])
    worker_log = WorkerLog()
    Image.MAX_IMAGE_PIXELS = None  # ImageFile applies its own limit
    limit_process(settings)
    with socket.socket(fileno=0) as planner:
        send(planner, {"ready": True})
        while (request := receive_request(planner)) is not None:
            limit_cpu(settings.cpu_s)
            try:
                answer(planner, *request, settings)
            except ImageRefused as error:
                send(planner, {"refused": str(error)})
            except MemoryError:
                send(planner, {"refused": out_of_memory(settings.memory_bytes)})
            except ConnectionError:  # the planner has closed the connection
                return
            except Exception:
                log.exception("an image could not be decoded")
                send(planner, {"failed": True, "log": worker_log.take()})
                return


def answer(
    planner: socket.socket,
    content: bytearray,
    is_base64: bool,
    has_low_detail: bool,
    is_video: bool,
    settings: WorkerSettings,
) -> None:
    """Answer one request. Raises ImageRefused and MemoryError."""
    decoded = from_base64(content) if is_base64 else content
    if is_video:
        answer_video(planner, decoded, settings)
        return
    file = ImageFile(decoded, settings.max_pixels)
    grid = settings.grid.for_detail(has_low_detail)
    send(planner, {"width": file.size[0], "height": file.size[1]})
    if planner.recv(1) != GO:
        return
    cut = grid.cut(file.rgb(grid.target_size(*file.size)), file.size)
    send(planner, {"content_hash": cut.content_hash}, cut.patches.data.cast("B"))


def answer_video(planner: socket.socket, content: bytes | bytearray, settings: WorkerSettings) -> None:
    """Answer a request with a video. Raises ImageRefused and MemoryError."""
    from engine.processing.video_file import VideoFile  # loads FFmpeg's libraries

    assert settings.video is not None
    file = VideoFile(content, settings.max_pixels, settings.video)
    width, height = file.size
    send(planner, {"width": width, "height": height, "target": file.target, "times_s": file.times_s})
    if planner.recv(1) != GO:
        return
    patches, content_hashes = settings.video.cut(file.frames())
    send(planner, {"content_hashes": content_hashes}, patches.data.cast("B"))


def from_base64(text: bytearray) -> bytes:
    """Decode the base64 text of a data: URL; raise ImageRefused if it is invalid.

    As in browsers (WHATWG, "forgiving-base64 decode"), white space, also percent-encoded, and missing padding are no
    errors; neither is the alphabet for URLs.
    """
    with contextlib.suppress(binascii.Error):
        return base64.b64decode(text, validate=True)
    plain = unquote_to_bytes(bytes(text)).translate(FROM_URL_ALPHABET, b"\t\n\f\r ")
    bare = plain.rstrip(b"=")
    try:
        if len(plain) - len(bare) > 2:
            raise binascii.Error
        return base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except binascii.Error:
        raise ImageRefused("the data: URL is not valid base64") from None


def out_of_memory(limit_bytes: int) -> str:
    """Return the error message for an image whose decoding exceeds the memory limit."""
    return f"decoding the image takes more than {limit_bytes >> 20} MiB of memory, which is the limit"


def limit_process(settings: WorkerSettings) -> None:
    """Set the resource limits for the lifetime of the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if settings.limits_address_space:
        with open("/proc/self/statm") as file:
            at_start = int(file.read().split()[0]) * resource.getpagesize()
        limit = at_start + settings.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_cpu(seconds: float) -> None:
    """Make the system end this process after this many more CPU seconds, rounded up to whole seconds."""
    usage, (_, hard) = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def send(planner: socket.socket, answer: dict[str, Any], payload: bytes | memoryview = b"") -> None:
    """Send an answer: its JSON, preceded by the length, and then the payload."""
    encoded = json.dumps(answer).encode()
    planner.sendall(LENGTH.pack(len(encoded)) + encoded)
    planner.sendall(payload)


def receive_request(planner: socket.socket) -> tuple[bytearray, bool, bool, bool] | None:
    """Read the next image; return its bytes and the flags of REQUEST, None when the planner closed the socket."""
    header = receive(planner, REQUEST.size)
    if header is None:
        return None
    num_bytes, *flags = REQUEST.unpack(header)
    is_base64, has_low_detail, is_video = map(bool, flags)
    content = receive(planner, num_bytes)
    return None if content is None else (content, is_base64, has_low_detail, is_video)


def receive(planner: socket.socket, num_bytes: int) -> bytearray | None:
    """Read exactly `num_bytes` bytes; None if the connection ended before."""
    content = bytearray(num_bytes)
    view, done = memoryview(content), 0
    while done < num_bytes:
        received = planner.recv_into(view[done:])
        if not received:
            return None
        done += received
    return content


if __name__ == "__main__":
    main()
