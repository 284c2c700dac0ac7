"""WorkerProcess: the planner's side of one image worker: starts, calls, watches and kills it.

All methods except `kill` block, and only one thread may use them at a time. The program itself is image_worker.py.
"""

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import engine
from engine import retry_after, worker_log
from engine.errors import Unavailable
from engine.processing.image_file import UNDECODABLE, ImageRefused
from engine.processing.image_grid import CutImage
from engine.processing.image_worker import GO, LENGTH, REQUEST, WorkerSettings, out_of_memory
from engine.processing.video_grid import UNDECODABLE as VIDEO_UNDECODABLE
from engine.processing.video_grid import CutVideo
from engine.socket_pair import wide_socket_pair

log = logging.getLogger("orchard.images")

START_TIMEOUT_S = 60.0
WATCH_PERIOD_S = 0.1
RESIDENT_AT_START = 64 * 2**20
MAX_HEADER_BYTES = 2**16
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")
"""Variables that a worker inherits from the planner. A process that decodes hostile bytes gets no secrets."""


class WorkerEnded(ImageRefused):
    """The worker was killed while it decoded the image, by the planner or by a limit of the system."""


class WorkerProcess:
    """One image worker, started with the first image or by `start`. After WorkerEnded it must be replaced."""

    def __init__(self, settings: WorkerSettings):
        self._settings = settings
        self._lock = threading.Lock()  # guards starting and killing
        self._busy = threading.Lock()  # guards the protocol
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._is_killed = False
        self._size = (0, 0)
        self._header: dict[str, Any] = {}  # of the last examined image or video
        self._grid = settings.grid  # of the last examined image
        self._is_video = False  # whether a video was examined last
        self.num_images = 0  # images sent so far

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process without waiting until it is ready. Raises Unavailable."""
        with self._lock:
            if self._process is not None or self._is_killed:
                return
            self._socket, theirs = wide_socket_pair()
            with theirs:
                try:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-m", "engine.processing.image_worker", self._settings.to_json()],
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=environment(),
                    )
                except OSError as error:
                    self._socket.close()
                    raise Unavailable(
                        f"no image worker can be started: {error.strerror}", retry_after.IMAGE_WORKER_S
                    ) from None

    def examine(
        self,
        read: Callable[[], bytes | bytearray],
        is_base64: bool,
        has_low_detail: bool = False,
        is_video: bool = False,
    ) -> tuple[int, int]:
        """Send an encoded image or video; return width and height.

        Raises ImageRefused, Unavailable, and what `read` raises.
        """
        with self._busy:
            content = read()
            self.start()
            if not self._is_ready:
                self._wait_ready()
            self.num_images += 1
            self._is_video = is_video
            deadline = self._deadline()
            self._grid = self._settings.grid.for_detail(has_low_detail)
            self._send(REQUEST.pack(len(content), is_base64, has_low_detail, is_video), deadline)
            self._send(content, deadline)
            self._header = self._receive_header(deadline)
            self._size = int(self._header["width"]), int(self._header["height"])
            return self._size

    def decode(self) -> CutImage:
        """Decode the last examined image. Raises ImageRefused."""
        with self._busy:
            deadline, grid = self._deadline(), self._grid
            self._send(GO, deadline)
            header = self._receive_header(deadline)
            layout = grid.layout(*self._size)
            patches = np.empty((layout.num_patches, 3, grid.patch_size, grid.patch_size), np.uint8)
            self._receive(patches.data.cast("B"), deadline)
            return CutImage(patches, layout, str(header["content_hash"]))

    def decode_video(self) -> CutVideo:
        """Decode the last examined video. Raises ImageRefused."""
        with self._busy:
            deadline, grid = self._deadline(), self._settings.video
            assert grid is not None
            width, height = self._header["target"]
            times_s = tuple(float(time_s) for time_s in self._header["times_s"])
            shape = len(times_s), *grid.group_shape((width, height))
            if len(times_s) > grid.num_groups(grid.max_frames) or math.prod(shape) > grid.max_bytes:
                raise WorkerEnded(VIDEO_UNDECODABLE)  # the worker does not keep to the limits that it was given
            self._send(GO, deadline)
            header = self._receive_header(deadline)
            patches = np.empty(shape, np.uint8)
            self._receive(patches.data.cast("B"), deadline)
            grid_hw = height // grid.patch_size, width // grid.patch_size
            return CutVideo(patches, grid_hw, times_s, tuple(map(str, header["content_hashes"])))

    def kill(self) -> None:
        """Kill the process at once without blocking. A thread that waits for it gets WorkerEnded."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    def reap(self) -> None:
        """Wait until a killed process has ended and no thread uses its socket, and close the socket."""
        with self._busy:
            if self._process is not None:
                self._process.wait()
            if self._socket is not None:
                self._socket.close()

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.wall_s

    def _wait_ready(self) -> None:
        try:
            self._receive_header(time.monotonic() + START_TIMEOUT_S)
        except WorkerEnded:
            raise Unavailable(
                "no image worker can be started: the process ended before it was ready", retry_after.IMAGE_WORKER_S
            ) from None
        self._is_ready = True

    def _receive_header(self, deadline: float) -> dict[str, Any]:
        length = bytearray(LENGTH.size)
        self._receive(memoryview(length), deadline)
        (num_bytes,) = LENGTH.unpack(length)
        if num_bytes > MAX_HEADER_BYTES:
            raise WorkerEnded(UNDECODABLE)
        encoded = bytearray(num_bytes)
        self._receive(memoryview(encoded), deadline)
        header = json.loads(encoded)
        worker_log.write(header.get("log", ()), self.pid or 0)
        if "failed" in header:
            raise WorkerEnded(VIDEO_UNDECODABLE if self._is_video else UNDECODABLE)
        if "refused" in header:
            raise ImageRefused(header["refused"])
        return header

    def _send(self, content: bytes | bytearray, deadline: float) -> None:
        view, done = memoryview(content), 0
        while done < len(view):
            try:
                done += self._connection().send(view[done:])
            except TimeoutError:
                self._watch(deadline)
            except OSError:
                raise WorkerEnded(self._why_ended()) from None

    def _receive(self, view: memoryview, deadline: float) -> None:
        done = 0
        while done < len(view):
            try:
                received = self._connection().recv_into(view[done:])
            except TimeoutError:
                self._watch(deadline)
                continue
            except OSError:
                received = 0
            if not received:
                raise WorkerEnded(self._why_ended())
            done += received

    def _connection(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the image worker was killed before it was started")
        self._socket.settimeout(WATCH_PERIOD_S)
        return self._socket

    def _watch(self, deadline: float) -> None:
        """Kill the worker if it exceeds a limit that the system does not enforce: elapsed time, and memory on macOS."""
        memory_bytes = self._settings.memory_bytes
        if time.monotonic() > deadline:
            limit_s = self._settings.wall_s
            self._kill_for(f"decoding the image took longer than {limit_s:g} s, which is the limit")
        if resident_bytes(self.pid) > RESIDENT_AT_START + memory_bytes:
            self._kill_for(out_of_memory(memory_bytes))

    def _kill_for(self, reason: str) -> None:
        log.warning("the image worker %d is killed: %s", self.pid, reason)
        self.kill()
        raise WorkerEnded(reason)

    def _why_ended(self) -> str:
        """Return the reason why the worker ended, for the client."""
        if self._process is not None and not self._is_killed:
            code = self._process.wait()
            log.warning("the image worker %d ended with the exit code %d while it decoded an image", self.pid, code)
            if code == -signal.SIGXCPU:
                limit_s = self._settings.cpu_s
                return f"decoding the image takes more than {limit_s:g} s of CPU time, which is the limit"
        return VIDEO_UNDECODABLE if self._is_video else UNDECODABLE


def environment() -> dict[str, str]:
    """Return the environment of a worker: the variables that it needs to start, and one thread for NumPy."""
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    package_root = str(Path(engine.__file__).parents[1])
    return {**passed_on, "PYTHONPATH": package_root, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def resident_bytes(pid: int | None) -> int:
    """Return the bytes of a process's resident memory; 0 without a process, or if it cannot be read."""
    try:
        return 0 if pid is None else psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
