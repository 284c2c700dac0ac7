"""A Ray of its own, two replicas that ask each other, and one whose request waits to hear that Serve stops it.

Run as a program, it prints what they were told.
"""

import asyncio
import sys
import warnings
from typing import Any

with warnings.catch_warnings():  # see tests/deployments/conftest.py
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field`", category=DeprecationWarning)
    import ray
    from ray import serve

from deployments.app import SAME_LOOP
from deployments.calls.replica_calls import ask_replicas
from deployments.draining import on_stop
from deployments.ingress import own_deployment

TIMEOUT_S = 60.0
SILENCE_S = 2.0


@serve.deployment(graceful_shutdown_timeout_s=TIMEOUT_S, graceful_shutdown_wait_loop_s=0.1)
class Waiting:
    def __init__(self) -> None:
        self._is_waiting, self._is_stopped = asyncio.Event(), asyncio.Event()
        self._stopping = on_stop(self._stop)

    async def _stop(self) -> None:
        self._is_stopped.set()

    async def until_it_waits(self) -> bool:
        await self._is_waiting.wait()
        return self._is_stopped.is_set()

    async def until_stopped(self) -> str:
        self._is_waiting.set()
        await self._is_stopped.wait()
        return "heard that it is stopped"


@serve.deployment(
    num_replicas=2,
    ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": SAME_LOOP}},
    graceful_shutdown_timeout_s=0.1,
)
class Asking:
    """Two replicas: the one that asks also answers, and the other one is silent."""

    def __init__(self) -> None:
        self._is_asking = False
        self._all = own_deployment()

    async def ask(self) -> list[Any]:
        assert self._all is not None
        self._is_asking = True
        return list(await asyncio.gather(*await ask_replicas(self._all, SILENCE_S, "answer", 42)))

    async def answer(self, value: int) -> int:
        if not self._is_asking:
            await asyncio.sleep(10 * SILENCE_S)
        return value


def main() -> str:
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    assert on_stop(nothing) is None, "this process is no replica, though Ray is there"
    serve.start(proxy_location="Disabled")
    asking: Any = serve.run(Asking.bind(), name="asking", route_prefix=None)
    said = asking.ask.remote().result(timeout_s=TIMEOUT_S)
    assert sorted(said, key=str) == [42, None], f"one answer is not lost because of the silent one: {said}"
    handle: Any = serve.run(Waiting.bind(), name="app", route_prefix=None)
    answer = handle.until_stopped.remote()
    assert handle.until_it_waits.remote().result(timeout_s=TIMEOUT_S) is False, "nobody stops it yet"
    serve.delete("app", _blocking=False)
    return answer.result(timeout_s=TIMEOUT_S)


async def nothing() -> None: ...


if __name__ == "__main__":
    sys.stdout.write(main())
    serve.shutdown()
    ray.shutdown()
