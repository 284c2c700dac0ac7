"""ImageWorkers: the pool of processes that decode images for a planner."""

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import TypeVar

from engine.errors import InvalidRequest
from engine.processing.byte_budget import ByteBudget
from engine.processing.image_file import ImageRefused
from engine.processing.image_grid import CutImage
from engine.processing.image_worker import WorkerSettings
from engine.processing.video_grid import CutVideo
from engine.processing.worker_process import WorkerEnded, WorkerProcess

NUM_WORKERS = 2
MAX_IMAGES_PER_WORKER = 500
"""Images after which a worker is replaced, to free memory that a decoder leaked."""
DECODED_PIXEL_BYTES = 4

T = TypeVar("T")


@dataclass
class WorkerCounts:
    """Counters since the start."""

    num_images: int = 0  # decoded
    num_refused: int = 0  # broken or beyond a limit
    num_replaced: int = 0  # workers that ended at a limit, were killed by a cancellation, or reached their last image


class ImageWorkers:
    """Decodes images in `num_workers` processes, in order of arrival.

    Args:
        settings: Arguments of the workers.
        budget: Bytes of decoded pixels, DECODED_PIXEL_BYTES per pixel of the size in the image's header.
        num_workers: Number of processes.
    """

    def __init__(self, settings: WorkerSettings, budget: ByteBudget, num_workers: int = NUM_WORKERS):
        self._settings = settings
        self._budget = budget
        self._threads = ThreadPoolExecutor(num_workers, "image-worker")
        self._places = asyncio.Semaphore(num_workers)
        self._idle: list[WorkerProcess] = []
        self._alive: set[WorkerProcess] = set()
        self.counts = WorkerCounts()
        self._close = weakref.finalize(self, _end, self._alive, self._threads)

    def start_one(self) -> None:
        """Start a worker in the background, so that the first image does not wait for its start."""
        worker = self._make()
        self._idle.append(worker)
        self._threads.submit(worker.start)

    def close(self) -> None:
        """End all workers."""
        self._close()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._alive if worker.pid is not None]

    async def cut(
        self, read: Callable[[], bytes | bytearray], is_base64: bool = False, has_low_detail: bool = False
    ) -> CutImage:
        """Decode an encoded image, resize it for the model and cut it into patches. Cancelling kills the worker.

        Args:
            read: Returns the encoded bytes or base64 text; called in a thread once a worker is free.
            is_base64: Whether `read` returns base64 text.
            has_low_detail: See ImageGrid.for_detail.

        Raises:
            InvalidRequest: The image is broken or exceeds a limit.
            Unavailable: No worker can be started.
        """
        return await self._use(
            lambda worker: worker.examine(read, is_base64, has_low_detail), lambda worker: worker.decode()
        )

    async def cut_video(self, read: Callable[[], bytes | bytearray], is_base64: bool = False) -> CutVideo:
        """Decode some frames of an encoded video and cut them into patches. Otherwise as `cut`."""
        return await self._use(
            lambda worker: worker.examine(read, is_base64, is_video=True), lambda worker: worker.decode_video()
        )

    async def _use(
        self, examine: Callable[[WorkerProcess], tuple[int, int]], decode: Callable[[WorkerProcess], T]
    ) -> T:
        async with self._places:
            worker = self._idle.pop() if self._idle else self._make()
            try:
                width, height = await self._call(lambda: examine(worker))
                async with self._budget.hold(width * height * DECODED_PIXEL_BYTES):
                    cut = await self._call(lambda: decode(worker))
            except ImageRefused as error:
                self.counts.num_refused += 1
                if isinstance(error, WorkerEnded):
                    self._replace(worker)
                else:
                    self._put_back(worker)
                raise InvalidRequest(str(error)) from None
            except InvalidRequest:  # raised by `read`
                self._idle.append(worker)
                raise
            except BaseException:
                self._replace(worker)
                raise
            self.counts.num_images += 1
            self._put_back(worker)
            return cut

    async def _call(self, step: Callable[[], T]) -> T:
        in_context = copy_context().run  # log lines have the id of the request
        return await asyncio.get_running_loop().run_in_executor(self._threads, in_context, step)

    def _make(self) -> WorkerProcess:
        worker = WorkerProcess(self._settings)
        self._alive.add(worker)
        return worker

    def _put_back(self, worker: WorkerProcess) -> None:
        if worker.num_images < MAX_IMAGES_PER_WORKER:
            self._idle.append(worker)
        else:
            self._replace(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        self.counts.num_replaced += 1
        worker.kill()
        self._alive.discard(worker)
        self._threads.submit(worker.reap)
        self.start_one()


def _end(workers: set[WorkerProcess], threads: ThreadPoolExecutor) -> None:
    for worker in workers:
        worker.kill()
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.reap()
