"""all-MiniLM-L6-v2: its cosines are those that Hugging Face's documentation of sentence similarity has published.

Skipped where the package with the weights cannot be fetched, see tests/support/minilm.py.
"""

import numpy as np
import pytest

from deployments.planners.prompt_planner import PromptPlanner
from deployments.requests import ChatRequest
from engine.config import EngineConfig
from engine.worker.runner_factory import make_runner
from tests.support.driver import Driver
from tests.support.gemma3 import NotAvailable
from tests.support.minilm import checkpoint
from tests.support.pooled_plans import planned

pytestmark = pytest.mark.night("tiny random encoders run in the gate, against transformers' definition in float64")

SOURCE = "That is a happy person"
COSINES = {
    "That is a happy dog": 0.69457734,
    "That is a very happy person": 0.94291508,
    "Today is a sunny day": 0.25687608,
}
LONG = "That is a happy person. " * 40


def test_cosines_are_the_published_ones_alone_and_beside_a_longer_text():
    try:
        config = EngineConfig(model=str(checkpoint()), device="cpu", dtype="float32")
    except NotAvailable as reason:
        pytest.skip(str(reason))
    planner, runner = PromptPlanner(config), make_runner(config, lambda progress: None)
    texts = [ChatRequest(text, (), raw_prompt=text) for text in (SOURCE, *COSINES, LONG)]
    requests = planned(planner, *texts)
    for arrivals in ([requests], [[one] for one in requests]):
        driver = Driver(runner)
        for arriving in arrivals:
            driver.run({0: arriving})
        vectors = {name: np.frombuffer(chunks[0].embedding or b"", "<f4") for name, chunks in driver.chunks.items()}
        for text, cosine in COSINES.items():
            assert float(vectors[SOURCE] @ vectors[text]) == pytest.approx(cosine, abs=2e-6)
