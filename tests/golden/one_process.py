"""The demo model's graph in one process, which answers well-formed hostile requests without Ray and HTTP."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest
import yaml

from deployments.args import AppArgs
from deployments.planners import prompt_planner
from tests.deployments.faulty_graph import Graph
from tests.e2e.hostile.attack import Outcome, attack
from tests.e2e.hostile.rows import Row
from tests.e2e.server import SHIPPED_CONFIG

BASE_URL = "http://127.0.0.1:8000"


def args() -> AppArgs:
    """Return the shipped configuration, without what makes an answer depend on others and on measured speed."""
    given = yaml.safe_load(SHIPPED_CONFIG.read_text())["applications"][0]["args"]
    plain = {"prefix_cache": {"enabled": False}, "mtp": "off", "prompt_lookup": "off"}
    given["engine"] |= {**plain, "memory": {"min_available_gb": 0}, "grammar": {"compile_timeout_s": 300}}
    return AppArgs.model_validate(given)


def send(rows: Sequence[Row]) -> dict[str, Outcome]:
    """Return what the graph answers to rows with well-formed requests, by name; requests without a seed get seed 7."""

    async def go() -> dict[str, Outcome]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prompt_planner.secrets, "randbits", lambda num_bits: 7)
            graph = Graph(args(), patch, is_warm=True)
            await graph.start()
            try:
                return await attack(BASE_URL, rows, httpx.ASGITransport(graph.app))
            finally:
                await graph.close()

    return asyncio.run(go())
