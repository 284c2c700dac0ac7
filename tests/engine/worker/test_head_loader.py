"""Where MTP heads come from, that all forms of one head are the same head, and which heads are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest
from mlx_vlm.convert import convert
from mlx_vlm.split_mtp import split_mtp
from pydantic import ValidationError

from engine.config import EngineConfig, MTPConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import DEMO_MODEL
from engine.worker import devices, loader

FIXED = MTPConfig(max_draft_tokens=2)


def load(model: Path, **config) -> loader.LoadedModel:
    return loader.load(EngineConfig(model=str(model), **config), lambda progress: None)


def head_weights(model: loader.LoadedModel) -> dict[str, mx.array]:
    assert model.proposers["mtp"].module is not None, model.proposers["mtp"].status
    return dict(loader.weights_of(model.proposers["mtp"].module))


def identical(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and mx.array_equal(a[k], b[k]) for k in a)


def rewrite(model_dir: Path, change: Callable[[dict[str, mx.array]], object], form: str = "mlx") -> Path:
    """Changes the tensors of a checkpoint in place."""
    file = model_dir / "model.safetensors"
    weights: dict[str, mx.array] = dict(mx.load(str(file)))  # type: ignore[arg-type]
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(file), weights, metadata={"format": form})
    return model_dir


def configure(model_dir: Path, **values) -> None:
    file = model_dir / "config.json"
    config = json.loads(file.read_text())
    (config["text_config"] if not values.keys() & {"model_type", "auto_map"} else config).update(values)
    file.write_text(json.dumps(config))


def shift_norms(weights: dict[str, mx.array], by: float = 1.0) -> None:
    for name, w in weights.items():
        if w.ndim == 1 and (name.startswith("mtp.") or "fc.weight" in weights):
            weights[name] = w + by


def without_head(weights: dict[str, mx.array]) -> None:
    for name in [name for name in weights if name.startswith("mtp.")]:
        del weights[name]


@pytest.fixture
def raw(tiny_model, tmp_path) -> Path:
    """A raw tiny checkpoint with mtp.* tensors."""
    return shutil.copytree(tiny_model(), tmp_path / "model")


@pytest.fixture
def bare(raw) -> Path:
    """The same without them, its head beside it in a directory that split_mtp wrote."""
    split_mtp(str(raw), f"{raw}-mtp")
    return rewrite(raw, without_head, "pt")


@pytest.fixture
def split(bare) -> Path:
    return bare.parent / f"{bare.name}-mtp"


def test_the_demo_head_is_bit_identical_raw_split_converted_and_split_again(tmp_path):
    expected = head_weights(load(DEMO_MODEL))
    convert(str(DEMO_MODEL), str(tmp_path / "converted"), mtp=True)
    assert identical(head_weights(load(tmp_path / "converted")), expected)
    split_mtp(str(DEMO_MODEL), str(tmp_path / "split"))
    assert identical(head_weights(load(DEMO_MODEL, mtp_head=str(tmp_path / "split"))), expected)
    kept = shutil.copytree(DEMO_MODEL, tmp_path / "kept")  # as of a conversion that keeps mtp.* and shifts the norms
    rewrite(kept, shift_norms)
    assert identical(head_weights(load(kept)), expected)
    split_mtp(str(kept), str(tmp_path / "again"))
    assert identical(head_weights(load(DEMO_MODEL, mtp_head=str(tmp_path / "again"))), expected)


def test_norms_of_a_raw_head_are_shifted_once_and_matrices_not_at_all(raw):
    stored: dict[str, mx.array] = dict(mx.load(str(raw / "model.safetensors")))  # type: ignore[arg-type]
    for name, w in head_weights(load(raw)).items():
        assert mx.array_equal(w, stored[f"mtp.{name}"] + (1.0 if w.ndim == 1 else 0.0)), name


def test_a_head_in_the_checkpoint_takes_precedence_over_one_beside_it(raw):
    split_mtp(str(raw), f"{raw}-mtp")
    rewrite(raw.parent / "model-mtp", lambda w: w.update({"fc.weight": 2 * w["fc.weight"]}))
    stored: dict[str, mx.array] = dict(mx.load(str(raw / "model.safetensors")))  # type: ignore[arg-type]
    assert mx.array_equal(head_weights(load(raw))["fc.weight"], stored["mtp.fc.weight"])


def test_mtp_head_may_be_the_raw_checkpoint_that_a_quantized_model_came_from(raw, tmp_path):
    convert(str(raw), str(tmp_path / "q8"), quantize=True, q_bits=8, q_group_size=32)
    assert load(tmp_path / "q8").proposers["mtp"].status == f"no mtp.* tensors in {tmp_path / 'q8'}"
    model = load(tmp_path / "q8", mtp_head=str(raw))
    assert model.proposers["mtp"].status == "ready" and identical(head_weights(model), head_weights(load(raw)))


def test_a_quantized_model_takes_the_quantized_head_that_was_converted_with_it(raw, tmp_path):
    convert(str(raw), str(tmp_path / "q4"), quantize=True, q_bits=4, q_group_size=32, mtp=True)
    model = load(tmp_path / "q4", expand_quantized_weights="off")
    weights = head_weights(model)
    assert weights["fc.weight"].dtype == mx.uint32 and weights["fc.scales"].dtype == mx.float32
    dense = head_weights(load(raw))
    fc = mx.dequantize(weights["fc.weight"], weights["fc.scales"], weights["fc.biases"], group_size=32, bits=4)
    assert mx.abs(fc - dense["fc.weight"]).max().item() < mx.abs(dense["fc.weight"]).max().item() / 8  # type: ignore
    assert mx.array_equal(weights["norm.weight"], dense["norm.weight"])


def test_a_quantized_head_is_expanded_on_a_cpu(raw, tmp_path):
    split_mtp(str(raw), str(tmp_path / "head"), q_bits=8)
    weights = head_weights(load(raw, mtp_head=str(tmp_path / "head")))
    assert "fc.scales" not in weights and {w.dtype for w in weights.values()} == {mx.float32}


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_heads_of_every_quantization_load_and_compute(raw, tmp_path, mode):
    split_mtp(str(raw), str(tmp_path / "head"), q_mode=mode)
    model = load(raw, mtp_head=str(tmp_path / "head"), expand_quantized_weights="off")
    assert "fc.scales" in head_weights(model) and model.proposers["mtp"].module is not None
    hidden = mx.random.normal((1, 3, 64), key=mx.random.key(0))
    out = model.proposers["mtp"].module._forward_hidden(hidden, hidden, None, mx.arange(3)[None])
    assert out.shape == (1, 3, 64) and mx.isfinite(out).all().item()


@pytest.mark.parametrize("quantize", [False, True])
def test_the_head_has_the_dtype_that_is_configured(raw, tmp_path, quantize):
    split_mtp(str(raw), str(tmp_path / "head"), q_bits=8 if quantize else None)
    model = load(raw, mtp_head=str(tmp_path / "head"), dtype="bfloat16", expand_quantized_weights="off")
    dtypes = {w.dtype for w in head_weights(model).values()}
    assert dtypes == ({mx.bfloat16, mx.uint32} if quantize else {mx.bfloat16})


def test_a_dense_head_computes_in_the_dtype_of_its_quantized_model_where_that_is_kept(raw, tmp_path, monkeypatch):
    convert(str(raw), str(tmp_path / "q8"), quantize=True, q_bits=8, q_group_size=32, dtype="float16")
    monkeypatch.setattr(devices, "on_gpu", lambda: True)
    model = load(tmp_path / "q8", mtp_head=str(raw))
    assert model.dtype == "float16" and {w.dtype for w in head_weights(model).values()} == {mx.float16}


def test_a_quantized_head_keeps_its_dtype_where_quantized_models_do(raw, tmp_path, monkeypatch):
    split_mtp(str(raw), str(tmp_path / "head"), q_bits=8)
    monkeypatch.setattr(devices, "on_gpu", lambda: True)
    model = load(raw, mtp_head=str(tmp_path / "head"))
    assert model.dtype == "bfloat16" and {w.dtype for w in head_weights(model).values()} == {mx.float32, mx.uint32}


def test_weight_bytes_include_the_head_and_the_head_does_not_include_its_target(raw):
    model, without = load(raw), load(raw, mtp="off")
    num_head_bytes = sum(w.nbytes for w in head_weights(model).values())
    assert model.num_weight_bytes == without.num_weight_bytes + num_head_bytes
    assert model.proposers["mtp"].module is not None and not model.proposers["mtp"].module.training
    model.proposers["mtp"].module.bind(model.module.language_model)
    assert sum(w.nbytes for w in head_weights(model).values()) == num_head_bytes


def test_a_model_without_a_head_is_loaded_and_its_status_names_the_reason(bare, split):
    assert load(bare).proposers["mtp"].status == "ready"
    shutil.rmtree(split)
    model = load(bare)
    assert model.proposers["mtp"].module is None and model.proposers["mtp"].status == f"no mtp.* tensors in {bare}"


def test_a_directory_that_split_mtp_did_not_write_is_not_taken_for_a_head(raw, bare, split):
    configure(split, model_type="qwen3_5")
    model = load(bare)
    assert model.proposers["mtp"].module is None
    assert model.proposers["mtp"].status.endswith(f"{split} has model_type 'qwen3_5', expected 'qwen3_5_mtp'")


def test_a_model_of_a_family_without_heads_reports_it_in_its_status():
    model = load(DEMO_MODEL / "draft")
    assert (
        model.proposers["mtp"].module is None
        and model.proposers["mtp"].status == "MTP heads of model_type qwen3 are not supported"
    )


def test_mtp_off_loads_no_head_not_even_a_broken_one(bare, split):
    (split / "model.safetensors").write_bytes(b"not weights")
    model = load(bare, mtp="off")
    assert model.proposers["mtp"].module is None and model.proposers["mtp"].status == "off in the configuration"


@pytest.mark.parametrize("config", [{"mtp": FIXED}, {"mtp_head": str(DEMO_MODEL)}])
def test_a_required_head_that_is_impossible_is_an_error(config):
    with pytest.raises(EngineFailed, match=r"mtp.* is configured.*MTP heads of model_type qwen3 are not supported"):
        load(DEMO_MODEL / "draft", **config)


def test_a_required_head_that_is_missing_is_an_error(bare, split):
    shutil.rmtree(split)
    with pytest.raises(EngineFailed, match=r"mtp is configured.*no mtp\.\* tensors"):
        load(bare, mtp=FIXED)
    with pytest.raises(EngineFailed, match=r"could not be loaded: No MTP tensors found"):
        load(bare, mtp_head=str(bare))
    with pytest.raises(EngineFailed, match=r"mtp_head: .*there is no directory.*-mtp"):
        load(bare, mtp_head=str(split))
    with pytest.raises(EngineFailed, match=r"model_type is 'qwen3', expected one of qwen3_5_mtp, qwen3_5"):
        load(bare, mtp_head=str(DEMO_MODEL / "draft"))


def test_a_configured_head_with_mtp_off_is_an_error(raw):
    with pytest.raises(ValidationError, match=r"mtp is off: mtp_head .* would have no effect"):
        load(raw, mtp="off", mtp_head=str(raw))


BROKEN = {
    "missing": (lambda w: w.pop("norm.weight"), r"Missing 1 parameters: norm\.weight"),
    "left over": (lambda w: w.update({"embed.weight": w["fc.weight"]}), r"not in model: embed\.weight"),
    "misnamed": (lambda w: w.update({"mtp.norm.weight": w.pop("norm.weight")}), r"not in model: mtp\.norm\.weight"),
    "another shape": (
        lambda w: w.update({"fc.weight": w["fc.weight"][:, :64]}),
        r"\(64, 128\).*\(64, 64\).*fc\.weight",
    ),
    "not finite": (lambda w: w["fc.weight"].__setitem__((0, 0), float("nan")), r"1 of 8192 values in fc\.weight"),
    "not shifted": (lambda w: shift_norms(w, -1.0), r"of \S+norm\S* are not positive, expected at most 25%"),
    "shifted twice": (shift_norms, r"100% of the gains in its norms are above 1, expected at most 99%"),
}


@pytest.mark.parametrize(("change", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_head_ends_with_the_reason(bare, split, change, reason):
    rewrite(split, change)
    with pytest.raises(EngineFailed, match=reason) as failed:
        load(bare)
    assert str(split) in str(failed.value) and "\n" not in str(failed.value)


@pytest.mark.parametrize("form", ["pt", "mlx"])
def test_a_file_that_promises_the_wrong_norms_is_refused(tmp_path, form):
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    rewrite(model, shift_norms if form == "pt" else lambda w: None, form)
    with pytest.raises(EngineFailed, match="above 1" if form == "pt" else "not positive"):
        load(model)


def test_missing_tensors_in_the_checkpoint_itself_are_refused(raw):
    rewrite(raw, lambda w: w.pop("mtp.layers.0.mlp.up_proj.weight"), "pt")
    with pytest.raises(EngineFailed, match=r"Missing 1 parameters: layers\.0\.mlp\.up_proj\.weight"):
        load(raw)


def test_a_quantized_head_without_its_scales_is_refused(bare, split, tmp_path):
    split_mtp(str(DEMO_MODEL), str(tmp_path / "head"), q_bits=4)
    rewrite(tmp_path / "head", lambda w: w.pop("fc.scales"))
    with pytest.raises(EngineFailed, match=r"fc\."):
        load(DEMO_MODEL, mtp_head=str(tmp_path / "head"))


ROPE = json.loads((DEMO_MODEL / "config.json").read_text())["text_config"]["rope_parameters"]
OTHERS = {
    "hidden size": ({"hidden_size": 512}, r"hidden_size is 512, expected 256"),
    "vocabulary": ({"vocab_size": 4095}, r"vocab_size is 4095, expected 4096"),
    "rope base": ({"rope_parameters": ROPE | {"rope_theta": 10000.0}}, r"rope_theta is 10000.0, expected 1000000.0"),
    "rope sections": ({"rope_parameters": ROPE | {"mrope_section": [8, 4, 4]}}, r"mrope_section is \[8, 4, 4\]"),
    "rope share": ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}, r"partial_rotary_factor is 0.25"),
}


@pytest.mark.parametrize(("values", "reason"), OTHERS.values(), ids=OTHERS)
def test_a_head_of_another_model_is_refused(tmp_path, values, reason):
    split_mtp(str(DEMO_MODEL), str(tmp_path / "head"))
    configure(tmp_path / "head", **values)
    with pytest.raises(EngineFailed, match=f"does not fit the model: .*{reason}"):
        load(DEMO_MODEL, mtp_head=str(tmp_path / "head"))


def test_fields_of_a_heads_config_are_checked_as_those_of_a_model(tmp_path):
    split_mtp(str(DEMO_MODEL), str(tmp_path / "head"))
    configure(tmp_path / "head", hidden_act="gelu")
    with pytest.raises(EngineFailed, match=r"MTP head in .* cannot be used: config.json has hidden_act 'gelu', but"):
        load(DEMO_MODEL, mtp_head=str(tmp_path / "head"))


def test_code_beside_a_head_is_refused_and_never_run(bare, split):
    configure(split, auto_map={"AutoModel": "evil.Model"})
    (split / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(EngineFailed, match=r"-mtp/config.json: 'auto_map' names Python code"):
        load(bare)


def test_unreadable_heads_end_with_the_reason(bare, split):
    (split / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(EngineFailed, match=r"the MTP head in .*-mtp could not be loaded"):
        load(bare)
    (split / "config.json").write_text("{}")
    with pytest.raises(EngineFailed, match=r"model_type is None"):
        load(bare, mtp_head=str(split))
