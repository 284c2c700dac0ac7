"""Gemma 4's assistants: their drafts are those of the library's, and what does not fit is refused by name."""

import io
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts, PromptChunk, RowOutput
from engine.errors import EngineFailed
from engine.processing.images import ImagePreprocessor
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import loader
from engine.worker.decode import DecodeGroup
from engine.worker.model_runner import MLXRunner, load_runner
from engine.worker.snapshot import StateSnapshot
from engine.worker.window_layer import RING_MARGIN
from tests.support import vision_zoo
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver
from tests.support.families import FAMILIES
from tests.support.families.family import VOCAB_SIZE, WINDOW
from tests.support.gemma4_assistant import LibraryAssistant, write_assistant
from tests.support.gemma4_family import GEMMA4_SIGHTED
from tests.support.night import some_at_night
from tests.support.sighted_family import IDS
from tests.support.zoo import make, prompt

KINDS: dict[str, dict[str, Any]] = {
    "clusters": {},
    "the whole vocabulary": {"use_ordered_embeddings": False},
    "one kind of layers": {"text_config": {"layer_types": ["sliding_attention"] * 3}},
}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("gemma4") / "model", FAMILIES["gemma4_text"])


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_zoo.make(tmp_path_factory.mktemp("gemma4") / "sighted", GEMMA4_SIGHTED)


def load(model: Path, head_dir: Path, **options: Any) -> loader.LoadedModel:
    config = EngineConfig.model_validate({"model": str(model), "mtp_head": str(head_dir)} | options)
    return loader.load(config, lambda progress: None)


def written(model: Path, tmp_path: Path, **changes: Any) -> Path:
    return write_assistant(model, **changes).rename(tmp_path / "assistant")


NUM_SAID = 60
"""Tokens that a row says in the tests of drafts, at most."""


@dataclass
class Drafting:
    """Records the drafts of all rows, and replaces them by drafts of which other numbers are right in each step."""

    texts: dict[str, list[int]]
    """By request, its prompt and its answer."""
    drafts: list[tuple[str, int, list[int]]] = field(default_factory=list)
    """For each row of a step: its request, the tokens before its newest one, and its drafts as they were made."""
    num_right: Counter[int] = field(default_factory=Counter)
    """How many rows of steps were given so many drafts that are right."""

    def replace(self, group: DecodeGroup, drafts: mx.array) -> mx.array:
        lengths, given = np.array(group._lengths).tolist(), list[list[int]]()
        for one, length, made in zip(group.rows, lengths, np.array(drafts).tolist(), strict=True):
            name = one.row.spec.request_id
            self.drafts.append((name, length, made))
            right = self.texts[name][length + 1 :][: (length + len(self.drafts)) % (len(made) + 1)]
            self.num_right[len(right)] += 1
            wrong = [(token + 1) % VOCAB_SIZE for token in self.texts[name][length + 1 + len(right) :]]
            given.append([*right, *wrong][: len(made)])
        return mx.array(given, mx.int32)


def joined(runner: MLXRunner, name: str, ids: list[int]) -> tuple[Row, list[int]]:
    """Let a prompt join the batch; return its row, and its tokens with the first one of the answer."""
    row = Row(EngineRequest(name, np.array(ids, np.int32), SamplingParams(2 * NUM_SAID, temperature=0.0), ()))
    while not (first := runner.prefill([row], 16).first):
        pass
    return row, [*ids, *first[row.id].token_ids]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_rows_of_different_lengths_are_those_of_the_library(kind, model, tmp_path, monkeypatch):
    """Rows join and leave between steps with and without drafts; the long one has passed the end of its rings."""
    head_dir = written(model, tmp_path, **KINDS[kind])
    runner = load_cold(EngineConfig(model=str(model), mtp_head=str(head_dir)))
    lengths = {"long": 2 * (WINDOW + RING_MARGIN) + 5, "short": 5, "middle": WINDOW + RING_MARGIN - 2}
    prompts, texts = {name: prompt(length, seed=length) for name, length in lengths.items()}, dict[str, list[int]]()
    for name, ids in prompts.items():
        row, texts[name] = joined(runner, name, ids)
        for _ in range(NUM_SAID):
            texts[name] += runner.decode(PLAIN)[row.id].token_ids
        runner.drop([row.id])
    drafting, draft = Drafting(texts), DecodeGroup._draft
    monkeypatch.setattr(DecodeGroup, "_draft", lambda group, *args: drafting.replace(group, draft(group, *args)))
    rows, found = dict[str, Row](), dict[str, list[int]]()

    def step(*num_drafts: int) -> None:
        for each in num_drafts:
            outputs = runner.decode(Drafts(each, "mtp") if each else PLAIN)
            for name, row in rows.items():
                found[name] += outputs.get(row.id, RowOutput(())).token_ids  # a row joins behind a launched step

    rows["long"], found["long"] = joined(runner, "long", prompts["long"])
    step(3, 0, 5)
    rows["short"], found["short"] = joined(runner, "short", prompts["short"])
    step(7, 0, 0, 1, 3)
    rows["middle"], found["middle"] = joined(runner, "middle", prompts["middle"])
    step(3, 3, 3)
    runner.drop([rows.pop("short").id])
    step(5, 1, 0, 0)
    runner.drop([row.id for row in rows.values()])
    library = LibraryAssistant(head_dir, runner._language_model.lm)
    for name, length, drafts in drafting.drafts:
        before, newest = texts[name][:length], texts[name][length]
        assert drafts == library.drafts(before, newest, len(drafts)), (name, length)
    assert len(drafting.drafts) >= 15 and len(drafting.num_right) >= 4
    assert all(texts[name][: len(ids)] == ids for name, ids in found.items())


def tokens_of(runner: MLXRunner, requests: list[EngineRequest], options: dict[str, Any]) -> tuple[Any, int]:
    """Return the tokens of requests that arrive at different steps, and how many drafts were made for them."""
    driver = Driver(runner, EngineConfig.model_validate({"prefill_chunk_tokens": 32, "prompt_lookup": "off"} | options))
    driver.run({3 * i: [request] for i, request in enumerate(requests)})
    assert not any(driver.errors.values())
    return driver.tokens, driver.core.stats.num_drafted


@pytest.mark.parametrize("temperature", some_at_night([0.0, 1.0], [1.0], "sampled tokens are harder to keep"))
def test_drafts_change_no_token_behind_images(temperature, sighted, tmp_path):
    head_dir = written(sighted, tmp_path)
    runner = load_cold(EngineConfig(model=str(sighted), mtp_head=str(head_dir)))
    preprocessor, requests = ImagePreprocessor(sighted), list[EngineRequest]()
    for i, images in enumerate(([(64, 40)], [], [(33, 64), (64, 40)], [(48, 48)])):
        patches = tuple(preprocessor.patches(vision_zoo.image(*size, seed=i)) for size in images)
        ids = prompt(9 + i, seed=i)
        for one in patches:
            ids += [IDS["<start>"], *[IDS["<image>"]] * one.num_tokens, IDS["<end>"], *prompt(3 + i, seed=9 + i)]
        sampling = SamplingParams(14, temperature=temperature, seed=i)
        requests.append(EngineRequest(f"{i}", np.array(ids, np.int32), sampling, (), patches))
    plain, num_drafted = tokens_of(runner, requests, {"mtp": "off"})
    assert num_drafted == 0
    for most in (1, 3, 7):
        found, num_drafted = tokens_of(runner, requests, {"mtp": {"max_draft_tokens": most, "max_rows": 4}})
        assert num_drafted > 0 and found == plain
    alone = load_cold(EngineConfig(model=str(sighted)))
    assert tokens_of(alone, requests, {})[0] == plain


@pytest.mark.parametrize("bits", some_at_night([8, 4], [4], "the gate has the fewest bits"))
def test_drafts_from_quantized_keys_and_values_change_no_token(bits, model, tmp_path):
    """The target's last layer with full attention is packed; those with windows are not."""
    head_dir = written(model, tmp_path)
    options = {"kv_cache": {"bits": bits}}
    runner = load_cold(EngineConfig.model_validate({"model": str(model), "mtp_head": str(head_dir)} | options))
    requests = [
        EngineRequest(f"{n}", np.array(prompt(n, seed=n), np.int32), SamplingParams(12, temperature=0.0), ())
        for n in (50, 7, 21)
    ]
    plain, _ = tokens_of(runner, requests, {"mtp": "off"} | options)
    found, num_drafted = tokens_of(runner, requests, {"mtp": {"max_draft_tokens": 3, "max_rows": 4}} | options)
    assert num_drafted > 0 and found == plain


def is_lazy(array: mx.array) -> bool:
    """Whether an array is a product that has not been computed."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "Multiply" in graph.getvalue()


@pytest.mark.parametrize("is_burst", [False, True])
def test_layers_without_keys_and_values_of_their_own_are_computed_only_for_the_end_of_a_prompt(
    is_burst, model, tmp_path
):
    """A weight of each layer is a product that is computed with the layer's first forward. The last layer with keys and
    values computes nothing else before the end."""
    runner = load_cold(EngineConfig(model=str(model), mtp_head=str(written(model, tmp_path))))
    layers = runner._language_model.lm.model.layers
    num_own = runner._language_model.lm.model.first_kv_shared_layer_idx
    weights = [layer.self_attn.q_proj.weight * 1 for layer in layers]
    for layer, weight in zip(layers, weights, strict=True):
        layer.self_attn.q_proj.weight = weight
    sampling = SamplingParams(9, temperature=0.0)
    rows = [Row(EngineRequest(f"{n}", np.array(prompt(n, seed=n), np.int32), sampling, ())) for n in (40, 50)]

    def prefill(*lengths: int) -> None:
        if is_burst:
            runner.prefill_burst([PromptChunk(row, length) for row, length in zip(rows, lengths, strict=True)])
            return
        for row, length in zip(rows, lengths, strict=True):
            runner.prefill([row], length)

    for lengths in ((8, 16), (16, 16)):
        prefill(*lengths)
        assert [is_lazy(weight) for weight in weights] == [i >= num_own - 1 for i in range(len(layers))]
    assert 1 < num_own < len(layers)
    prefill(8, 18)  # the second prompt is complete
    assert not any(map(is_lazy, weights))
    runner.drop([row.id for row in rows])


@pytest.mark.parametrize("decodes", [False, True])
def test_snapshots_keep_no_hidden_state_for_the_assistant_and_drafts_go_on_from_them(decodes, model, tmp_path):
    """Those of a prompt and of a row that has answered, on their way through host memory."""
    head_dir = written(model, tmp_path)
    runner = load_cold(EngineConfig(model=str(model), mtp_head=str(head_dir)))
    row = Row(EngineRequest("row", np.array(prompt(45, seed=1), np.int32), SamplingParams(30, temperature=0.0), ()))
    ids = list(row.spec.token_ids)
    if decodes:
        while not (first := runner.prefill([row], 16).first):
            pass
        runner.decode(Drafts(3, "mtp"))
        kept = runner.snapshot_row(row.id)
        assert kept is not None
        snapshot, ids = kept.snapshot, [*ids, *kept.token_ids.tolist()]
    else:
        runner.prefill([row], 21)
        snapshot, first = runner.snapshot([row]), None
    runner.drop([row.id])
    assert isinstance(snapshot, StateSnapshot) and snapshot.hidden is None and (first is not None) == decodes
    *_, imported = runner.import_snapshot(runner.export_snapshot(snapshot), snapshot.num_tokens)
    assert imported is not None and imported.state_bytes == snapshot.state_bytes

    def answer(restored: Any, drafts: Drafts) -> list[int]:
        again = Row(EngineRequest("again", np.array([*ids, 33, 34], np.int32), SamplingParams(40, temperature=0.0), ()))
        if restored is not None:
            runner.restore([again], restored)
        while not (first := runner.prefill([again], 64).first):
            pass
        said = list(first[again.id].token_ids)
        while len(said) < 12:
            said += runner.decode(drafts)[again.id].token_ids
        runner.drop([again.id])
        return said[:12]

    expected = answer(None, PLAIN)
    assert answer(imported, Drafts(3, "mtp")) == answer(snapshot, Drafts(7, "mtp")) == expected


def test_clusters_have_the_logits_of_the_library_for_each_row_alone_also_from_a_quantized_embedding(model, tmp_path):
    """The library's module reads the table itself, and takes the lowest logit of all rows."""
    head: Any = load(model, written(model, tmp_path)).proposers["mtp"].module
    states = mx.random.normal((3, 1, 32), key=mx.random.key(1)) * mx.array([[[1.0]], [[10.0]], [[0.1]]])
    embedding = head.model.embed_tokens

    def expected(table: mx.array) -> np.ndarray:
        return np.concatenate([np.array(head.masked_embedding(states[i : i + 1], table)) for i in range(3)])

    np.testing.assert_allclose(np.array(head.logits(states)), expected(embedding.weight), atol=1e-5)
    quantized = head.model.embed_tokens = embedding.to_quantized(group_size=32, bits=4)
    table = mx.dequantize(quantized.weight, quantized.scales, quantized.biases, group_size=32, bits=4)
    assert not mx.allclose(table, embedding.weight, atol=1e-3).item()
    np.testing.assert_allclose(np.array(head.logits(states)), expected(table), atol=1e-5)


def test_warm_up_times_each_number_of_drafts_and_memory_counts_the_hidden_states_of_one_step(model, tmp_path):
    config = {"model": str(model), "prompt_lookup": "off"}
    plain = load_runner(EngineConfig.model_validate(config), lambda progress: None)
    config["mtp_head"] = str(written(model, tmp_path))
    runner = load_runner(EngineConfig.model_validate(config), lambda progress: None)
    assert {step.drafts.num_tokens for step in runner.step_times} == {0, 1, 3, 5, 7}
    assert runner.costs.token_bytes == plain.costs.token_bytes, "the assistant has no keys and values"
    assert runner.costs.state_bytes == plain.costs.state_bytes
    assert runner.costs.window_bytes == plain.costs.window_bytes
    hidden_size, value_bytes = 64, 4
    assert runner.costs.pending_bytes >= hidden_size * value_bytes and runner.costs.pending_tokens == 7 + 1


def test_assistant_beside_the_model_is_found_under_its_published_name(tmp_path):
    model = make(tmp_path / "gemma-4-E2B-it", FAMILIES["gemma4_text"])
    head_dir = write_assistant(model)
    loaded = loader.load(EngineConfig(model=str(model)), lambda progress: None)
    assert loaded.proposers["mtp"].status == "ready"
    head: Any = loaded.proposers["mtp"].module
    assert head.model_path == head_dir and head_dir.name == "gemma-4-E2B-it-assistant"
    head_dir.rename(tmp_path / "elsewhere")
    without = loader.load(EngineConfig(model=str(model)), lambda progress: None)
    assert without.proposers["mtp"].module is None and "no Gemma 4 assistant" in without.proposers["mtp"].status


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "gemma3n_assistant"},
            "model_type is 'gemma3n_assistant', expected one of gemma4_assistant, gemma4_un",
        ),
        ({"backbone_hidden_size": 32}, "does not fit the model: backbone_hidden_size is 32, expected 64"),
        ({"backbone_hidden_size": None}, "config.json has no backbone_hidden_size"),
        ({"text_config": {"vocab_size": 1024}}, "does not fit the model: vocab_size is 1024, expected 512"),
        ({"text_config": {"sliding_window": 16}}, "does not fit the model: sliding_window is 16, expected 8"),
        ({"text_config": {"sliding_window": None}}, "config.json has no text_config.sliding_window"),
        ({"text_config": {"head_dim": 32}}, "does not fit the model: head_dim is 32, expected 16"),
        ({"text_config": {"global_head_dim": 16}}, "does not fit the model: global_head_dim is 16, expected 32"),
        ({"text_config": {"num_attention_heads": 3}}, "num_attention_heads is 3, expected a multiple of 2"),
        (
            {"text_config": {"rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": DEFAULT}}},
            "rope_parameters.full_attention is .*5000.0.*, expected .*1000000.0",
        ),
        (
            {"text_config": {"layer_types": ["chunked_attention"] * 3}},
            r"layer_types is \['chunked_attention', .* for each",
        ),
        ({"text_config": {"layer_types": ["full_attention"]}}, "layer_types is .* for each of 3 layers"),
        ({"text_config": {"num_kv_shared_layers": 1}}, "num_kv_shared_layers is 1, expected all 3 layers"),
        ({"text_config": {"hidden_size_per_layer_input": 16}}, "hidden_size_per_layer_input is 16, expected 0"),
        ({"text_config": {"hidden_activation": "relu"}}, "config.json has hidden_activation 'relu'"),
        ({"text_config": {"enable_moe_block": True}}, "enable_moe_block is True, expected False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, expected True"),
        ({"num_centroids": 30}, "num_centroids is 30, expected a divisor of vocab_size, 512"),
        ({"centroid_intermediate_top_k": 33}, "centroid_intermediate_top_k is 33, expected 1 to 32"),
        ({"auto_map": {"AutoModel": "evil.Assistant"}}, "'auto_map' names Python code"),
    ],
)
def test_assistant_that_does_not_fit_is_refused_with_the_value(changes, reason, model, tmp_path):
    head_dir = written(model, tmp_path)
    config = json.loads((head_dir / "config.json").read_text())
    config |= changes | {"text_config": config["text_config"] | changes.get("text_config", {})}
    (head_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFailed, match=reason):
        load(model, head_dir)


def test_assistant_for_layers_that_the_model_does_not_have_is_refused(tmp_path):
    family = FAMILIES["gemma4_text"]
    config = family.config | {"layer_types": ["sliding_attention"] * 4}
    model = make(tmp_path / "model", replace(family, config=config))
    with pytest.raises(EngineFailed, match="layer_types has 'full_attention', and the model has no such layer"):
        load(model, write_assistant(model))


def test_assistant_is_refused_for_another_family(model, tmp_path):
    other = make(tmp_path / "other", FAMILIES["gemma3_text"])
    with pytest.raises(EngineFailed, match="its model_type is 'gemma3_text', expected one of gemma4_text"):
        load(other, written(model, tmp_path))


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (
            {"masked_embedding.token_ordering": mx.zeros(512, mx.int64)},
            "token_ordering has not each of the tokens 0 to",
        ),
        ({"model.norm.weight": mx.full(32, mx.nan)}, "32 of 32 values in model.norm.weight are not finite"),
        ({"pre_projection.weight": None}, "pre_projection.weight"),
        ({"model.layers.0.self_attn.k_proj.weight": mx.zeros((32, 32))}, "self_attn.k_proj.weight"),
    ],
)
def test_damaged_assistant_is_refused_with_the_name_of_the_tensor(spoilt, reason, model, tmp_path):
    head_dir = written(model, tmp_path)
    weights: Any = mx.load(str(head_dir / "model.safetensors"))
    mx.eval(weights)
    left = {name: one for name, one in (weights | spoilt).items() if one is not None}
    mx.save_safetensors(str(head_dir / "model.safetensors"), left, metadata={"format": "pt"})
    with pytest.raises(EngineFailed, match=reason):
        load(model, head_dir)
