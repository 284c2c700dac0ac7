"""DFlash drafters: their blocks are those of the library's drafter, and what is not computed is refused by name."""

import json
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache

from engine.config import EngineConfig, MTPConfig
from engine.core.row import Row
from engine.core.runner import PromptChunk
from engine.errors import EngineFailed
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import loader, proposers
from engine.worker.drafter import MAX_PENDING, Drafter, PendingHiddenStates
from engine.worker.drafting_head import DraftingHead
from engine.worker.kv_cache import BatchCache
from engine.worker.language_model import LanguageModel
from engine.worker.model_runner import load_runner
from engine.worker.proposer import Target
from engine.worker.recurrent_layer import BatchRecurrentLayer
from tests.support.cold_runner import load_cold
from tests.support.dflash import BLOCK_SIZE, LAYERS_READ, WINDOW, LibraryDrafter, write_dflash
from tests.support.families import FAMILIES
from tests.support.zoo import VOCAB_SIZE, make, prompt

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
KINDS: dict[str, dict[str, Any]] = {
    "a window beside full attention": {},
    "causal, with sinks": {"dflash_config": {"causal": True, "attention_sink_bias": True}},
    "sinks": {"dflash_config": {"attention_sink_bias": True}},
    "yarn": {"rope_scaling": YARN},
    "llama3, in rope_parameters": {
        "rope_parameters": {"rope_theta": 5000.0, "original_max_position_embeddings": 32} | LLAMA3
    },
    "one layer read": {"dflash_config": {"target_layer_ids": [1]}, "layer_types": None},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("dflash") / "model", FAMILIES["qwen3"])


def load(model: Path, head_dir: Path, **options: Any) -> loader.LoadedModel:
    config = EngineConfig.model_validate({"model": str(model), "mtp_head": str(head_dir)} | options)
    return loader.load(config, lambda progress: None)


def written(model: Path, tmp_path: Path, **changes: Any) -> Path:
    return write_dflash(model, **changes).rename(tmp_path / "drafter")


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_rows_of_different_lengths_are_those_of_the_library_over_several_rounds(kind, model, tmp_path):
    """Each round adds other numbers of tokens to the rows, so that some drafts are rejected and overwritten."""
    head_dir = written(model, tmp_path, **KINDS[kind])
    loaded = load(model, head_dir)
    lm = loaded.module.language_model
    library = LibraryDrafter(head_dir, lm)
    head: Any = loaded.proposers["mtp"].module
    language_model = LanguageModel(lm, reads=[head.layer_outputs])
    drafting = DraftingHead(head, language_model)
    starts, newest = [3 * WINDOW, 5], [[17, 40], [90, 7]]
    read = [mx.random.normal((1, 60, head.width), key=mx.random.key(i)) for i in range(2)]

    def drafter_of(i: int) -> Drafter:
        cache = drafting.make_cache()
        drafting.prime(mx.zeros((1, starts[i] - 1), mx.int32), read[i][:, : starts[i] - 1], cache)
        pending = PendingHiddenStates.of(newest[i][0], read[i][:, starts[i] - 1 : starts[i]])
        return Drafter.of(drafting, cache, pending, BatchCache.of([]))

    drafter, lengths = drafter_of(0), list(starts)
    drafter.join([drafter_of(1)._cache.row(0, starts[1] - 1)], [drafter_of(1).pending])
    for num_drafts, added in ((BLOCK_SIZE - 1, (1, 4)), (3, (4, 1)), (1, (2, 2)), (BLOCK_SIZE - 1, (1, 1))):
        found: Any = drafter.draft(
            num_drafts, mx.array(lengths, mx.int32), max(lengths), lambda states, i: drafting.logits(states).argmax(-1)
        ).tolist()
        for i, length in enumerate(lengths):
            token = newest[i][(length - starts[i]) % 2]
            assert found[i] == library.drafts(token, read[i][:, :length], num_drafts), (kind, num_drafts, i)
        width = max(added)
        spans = [read[i][:, length : length + width] for i, length in enumerate(lengths)]
        tokens = [
            [newest[i][(length + j - starts[i]) % 2] for j in range(1, width + 1)] for i, length in enumerate(lengths)
        ]
        count = mx.array(list(added), mx.int32)
        drafter.pending = PendingHiddenStates(mx.array(tokens, mx.int32), mx.concatenate(spans), count, width)
        lengths = [length + more for length, more in zip(lengths, added, strict=True)]


def test_prompts_in_one_forward_leave_the_drafter_the_keys_and_values_that_each_has_alone(model, tmp_path):
    runner = load_cold(EngineConfig(model=str(model), mtp_head=str(written(model, tmp_path))))
    chunks = {"long": (40, (17, 4)), "short": (23, (9, 12))}  # tokens of a prompt, and of the first two chunks

    def row_of(name: str) -> Row:
        ids = np.array(prompt(chunks[name][0], seed=chunks[name][0]), np.int32)
        return Row(EngineRequest(name, ids, SamplingParams(4, temperature=0.0), ()))

    def left_by(rows: list[Row]) -> list[np.ndarray]:
        prompts = [runner._prompts[row.id] for row in rows]
        layers = [layer for one in prompts for cache in one.head_caches for layer in cache]
        assert [layer.offset for layer in layers] == [20] * len(layers), "the newest hidden state waits for its token"
        found = [np.array(array[..., :20, :]) for layer in layers for array in layer.state]
        runner.drop([row.id for row in rows])
        return found + [np.array(one.hidden) for one in prompts]

    alone = []
    for name, (_, sizes) in chunks.items():
        row = row_of(name)
        for size in sizes:
            runner.prefill([row], size)
        alone.append(left_by([row]))
    rows = [row_of(name) for name in chunks]
    for i in range(2):
        runner.prefill_burst([PromptChunk(row, chunks[row.spec.request_id][1][i]) for row in rows])
    together = left_by(rows)
    expected = [*alone[0][:-1], *alone[1][:-1], alone[0][-1], alone[1][-1]]
    assert len(together) == len(expected) == 10
    for one, other in zip(together, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        (16, {}, [1, 3, 7, 15]),
        (8, {}, [1, 3, 7]),
        (6, {}, [1, 3, 5]),
        (2, {}, [1]),
        (16, {"mtp": {"max_draft_tokens": 5}}, [1, 3, 5]),
    ],
)
def test_numbers_of_drafts_end_below_the_longest_block(size, options, expected, model, tmp_path):
    assert offered(model, written(model, tmp_path, block_size=size), options) == expected


@pytest.mark.parametrize(("mtp", "expected"), [("auto", [1, 3]), ({"max_draft_tokens": 7}, [1, 3, 7])])
def test_targets_that_keep_a_state_per_verified_token_get_few_drafts_unless_more_are_asked_for(
    mtp, expected, tmp_path, monkeypatch
):
    model = make(tmp_path / "model", FAMILIES["qwen3_5"])
    monkeypatch.setattr(BatchRecurrentLayer, "is_factored", False)
    assert offered(model, write_dflash(model), {"mtp": mtp}) == expected


def offered(model: Path, head_dir: Path, options: dict[str, Any]) -> list[int]:
    """Return the numbers of drafts that a drafter offers."""
    loaded = load(model, head_dir, **options)
    assert loaded.proposers["mtp"].module is not None
    lm, layer_outputs = loaded.module.language_model, loaded.proposers["mtp"].module.layer_outputs
    language_model = LanguageModel(lm, reads=[layer_outputs])
    target, head = Target(language_model, VOCAB_SIZE, VOCAB_SIZE), loaded.proposers["mtp"].module
    config = EngineConfig.model_validate({"prompt_lookup": "off"} | options)
    drafts, _ = proposers.offered(config, loaded.proposers, target, {"mtp": DraftingHead(head, language_model)})
    assert all(one.proposer == "mtp" for one in drafts)
    return [one.num_tokens for one in drafts]


def test_fixed_number_of_drafts_that_a_block_does_not_have_is_refused(model, tmp_path):
    head_dir = written(model, tmp_path, dflash_config={"runtime_block_size": 4})
    expected = r"mtp.max_draft_tokens is 4, but the longest block .* has 4 tokens, .* use at most 3"
    with pytest.raises(EngineFailed, match=expected):
        load(model, head_dir, mtp=MTPConfig(max_draft_tokens=4))
    assert load(model, head_dir, mtp=MTPConfig(max_draft_tokens=3)).proposers["mtp"].status == "ready"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, r"architectures is \['DFlash2DraftModel'\]"),
        ({"model_type": "laguna"}, "model_type is 'laguna', expected qwen3 or qwen3_dflash"),
        ({"markov_rank": 64}, "markov_rank is 64, expected 0"),
        ({"dflash_config": {"projector_type": "dspark"}}, "projector_type is 'dspark', expected 'dflash'"),
        ({"dflash_config": {"attention_mode": "mla"}}, "dflash_config has attention_mode 'mla', which is not known"),
        ({"dflash_config": {"draft_window_size": 64}}, "draft_window_size is 64, expected 0"),
        ({"dflash_config": {"mask_token_id": None}}, "config.json has no mask_token_id"),
        ({"dflash_config": {"mask_token_id": 512}}, "mask_token_id is 512, expected a token id below vocab_size, 512"),
        ({"dflash_config": {"target_layer_ids": [0, 3]}}, r"reads the layers \[0, 3\], and the model has 3"),
        ({"num_target_layers": 36}, "does not fit the model: num_target_layers is 36, expected 3"),
        ({"vocab_size": 100}, "does not fit the model: vocab_size is 100, expected 512"),
        ({"rope_theta": None}, "config.json has no rope_theta"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope', expected one of default, linear"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}}, "rope_scaling is .* beside rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, expected None"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act 'gelu'"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* for each of 2 layers"),
        ({"sliding_window": None}, "sliding_window is None beside sliding_attention layers"),
        ({"block_size": 1}, "block_size is 1, expected an integer of at least 2"),
        ({"auto_map": {"AutoModel": "evil.DFlashDraftModel"}}, "'auto_map' names Python code"),
        ({"model_file": "dflash.py"}, "'model_file' names Python code"),
    ],
)
def test_drafter_that_asks_for_something_else_is_refused_with_the_value(changes, reason, model, tmp_path):
    head_dir = written(model, tmp_path)
    config = json.loads((head_dir / "config.json").read_text())
    config |= changes | {"dflash_config": config["dflash_config"] | changes.get("dflash_config", {})}
    (head_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFailed, match=reason):
        load(model, head_dir)


def test_drafter_that_names_the_published_module_is_loaded_without_it(model, tmp_path):
    head_dir = written(model, tmp_path, auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    (head_dir / "dflash.py").write_text("raise SystemExit('code of a checkpoint has run')")
    assert load(model, head_dir).proposers["mtp"].status == "ready"


def test_warm_up_times_each_number_of_drafts_and_memory_counts_the_keys_and_values_of_the_drafter(model, tmp_path):
    config = EngineConfig(model=str(model), mtp_head=str(written(model, tmp_path)), prompt_lookup="off")
    runner = load_runner(config, lambda progress: None)
    assert {step.drafts.num_tokens for step in runner.step_times} == {0, 1, 3, 7}
    layers, arrays, heads, head_dim, value_bytes = 3 + 2, 2, 2, 16, 4
    assert runner.costs.token_bytes == layers * arrays * heads * head_dim * value_bytes
    assert runner.costs.pending_tokens == MAX_PENDING and runner.costs.overshoot > 2 * BLOCK_SIZE


def test_drafter_with_an_embedding_of_its_own_is_refused(model, tmp_path):
    head_dir = written(model, tmp_path)
    weights: Any = mx.load(str(head_dir / "model.safetensors"))
    mx.eval(weights)
    own = {"embed_tokens.weight": mx.zeros((512, 64))}
    mx.save_safetensors(str(head_dir / "model.safetensors"), weights | own, metadata={"format": "pt"})
    with pytest.raises(EngineFailed, match=r"has embed_tokens.weight, expected none"):
        load(model, head_dir)


def test_drafter_is_refused_for_a_family_that_it_cannot_draft_for(tmp_path):
    model = make(tmp_path / "model", FAMILIES["gemma3_text"])
    with pytest.raises(EngineFailed, match=r"its model_type is 'gemma3_text', expected one of llama, gpt_oss, qwen3"):
        load(model, write_dflash(model))


def test_drafter_reads_the_layers_that_its_config_names(model, tmp_path):
    loaded = load(model, written(model, tmp_path))
    head: Any = loaded.proposers["mtp"].module
    assert head.width == len(LAYERS_READ) * 64 and head.block_size == BLOCK_SIZE
    assert all(type(layer) is KVCache for layer in head.make_cache())
