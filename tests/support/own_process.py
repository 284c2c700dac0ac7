"""Runs a function in a process of its own: MLX's memory counters are those of a whole process."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def run_in_own_process(function: Callable[[], None]) -> None:
    """Call a module's function where no other test has left models, threads or garbage.

    Raises:
        Exception: What the function raises.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(function).result()
