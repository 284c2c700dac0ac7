"""A machine that lacks the model joins by the usual command, which copies it from the head."""

import shutil

import pytest

from engine.demo import DEMO_MODEL
from tests.cluster.conftest import wait_until
from tests.cluster.members import CONFIG, READY_S, members, serve, token_of

pytestmark = [pytest.mark.cluster, pytest.mark.night("deployments/cluster/test_model_copy.py has it without Ray")]

MODEL = "~/models/mine"


def test_a_machine_without_the_model_joins_and_answers_with_it():
    with members(2, config=CONFIG.replace("args: {}", f'args: {{engine: {{model: "{MODEL}"}}}}')) as (head, far):
        shutil.copytree(DEMO_MODEL, head.home / "models" / "mine", ignore=shutil.ignore_patterns("draft", "*.py"))
        serve(head).wait_for("orchard join")
        token = token_of(head)

        looked = far.orchard("join", head.machine.address, "--token", token, "--check")
        assert looked.wait() == 0, looked.output
        assert f"✓ model {MODEL}" in looked.output and "will be copied from the head" in looked.output
        assert not (far.home / "models").exists(), "--check copies nothing"

        joined = far.orchard("join", head.machine.address, "--token", token)
        assert joined.wait() == 0, joined.output[-4000:]
        assert f"Copying {MODEL} from the head" in joined.output
        weights = {path.name: path.read_bytes() for path in (head.home / "models" / "mine").glob("*.safetensors")}
        assert {name: (far.home / "models" / "mine" / name).read_bytes() for name in weights} == weights
        wait_until(lambda: far.num_engines() == 2, READY_S)
        question = [{"role": "user", "content": "hello"}]
        answers = [
            one.node.ask(question, model=one.node.get("/v1/models")["data"][0]["id"], max_tokens=8).result(READY_S)
            for one in (head, far)
        ]
        assert answers[0].text and answers[0].text == answers[1].text
