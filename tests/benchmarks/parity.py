"""The engine's greedy answers against those of the library itself, for any checkpoint, or for the whole zoo.

    uv run python -m tests.benchmarks.parity mlx-community/Qwen3.5-4B-MLX-4bit --image picture.png
    uv run python -m tests.benchmarks.parity --zoo
    uv run python -m tests.benchmarks.parity --zoo --dtype bfloat16 --bits 4

Per prompt: how many tokens are equal, the first other one with its gap, and the largest difference of logprobs of the
five best tokens up to there; alone, and with all prompts at once. The library generates with mlx_vlm's `generate_step`
in the dtype that the engine computes in, before any patch of this project is installed but for those that correct its
results. What the dtype explains follows from the library alone: the same positions by `generate_step` and by one
forward over the whole sequence differ by rounding (engine/self_test/agreement.py has the rule). The status is 1 if any
difference is larger, or nothing could be compared.

--zoo writes a tiny random checkpoint of each family of tests/support/families/ to a temporary folder, and prints one
row for all prompts of a family; with --bits their weights are quantized. On a device that runs a family only in part,
the row has the error. An image needs a model whose images the engine takes, with an image processor of the
Qwen2-VL family.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_vlm.generate.ar import generate_step

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.media_config import MediaConfig
from engine.processing.checkpoint import image_processor_config, media_kinds, read_config, resolve_checkpoint
from engine.processing.images import ImagePreprocessor, normalize
from engine.processing.patch_normalization import PatchNormalization
from engine.protocol import MAX_TOP_LOGPROBS, EngineRequest, SamplingParams, TokenLogprobs
from engine.self_test.agreement import (
    UNIT_ROUNDOFF,
    Agreement,
    Answer,
    Rounding,
    agree,
    first_difference,
    size_of_logits,
    spread,
)
from engine.self_test.bench import PLAIN, SHORTENED_PRODUCTS, SHORTENED_UNIT, changed
from engine.self_test.core_run import CoreRun
from engine.self_test.outcome import Status
from engine.self_test.prompts import IMAGE_QUESTION, QUESTIONS, SelfTestMessage, prompts_of
from engine.worker import device_facts, loader
from engine.worker.model_runner import load_runner
from engine.worker.patches import embedding_scale, gemma2_masks, mistral_scale
from tests.benchmarks.measure import heading, table
from tests.support import zoo
from tests.support.families import FAMILIES

LONG_TOKENS = 600
COLUMNS = ("model", "prompt", "engine", "equal tokens", "first other", "gap", "logprobs differ by", "limit", "status")


@dataclass(frozen=True)
class Case:
    """A model with its prompts, and what the library gives for them."""

    name: str
    config: EngineConfig
    requests: tuple[EngineRequest, ...]
    answers: Mapping[str, Answer]
    rounding: Rounding


def library_case(name: str, config: EngineConfig, requests: Sequence[EngineRequest]) -> Case:
    """Let the library answer the requests."""
    opened = loader.open_model(config)
    module = opened.module
    module.eval()
    answers, measured, size = {}, 0.0, 1.0
    for request in requests:
        answer = library_answer(module, opened.path, request)
        whole = whole_forward(module, opened.path, request, answer.token_ids)
        answers[request.request_id] = answer
        measured, size = max(measured, spread(answer.logprobs, whole)), max(size, size_of_logits(whole))
    unit = UNIT_ROUNDOFF[opened.dtype]
    if device_facts.product_error() > SHORTENED_PRODUCTS:
        unit = max(unit, SHORTENED_UNIT)
    return Case(name, config, tuple(requests), answers, Rounding(opened.dtype, unit, measured, size))


def library_answer(module: Any, model_dir: Path, request: EngineRequest) -> Answer:
    """Return what mlx_vlm generates, up to a stop token."""
    zoo.empty_cache(module.language_model)
    pixels, kwargs = image_inputs(model_dir, request)
    ids = mx.array(request.token_ids[None].astype(np.int32))
    tokens, logprobs = [], []
    # in one chunk: for more of them the library names an argument as several families do not
    options: dict[str, Any] = {"max_tokens": request.sampling.max_tokens, "temperature": 0.0, "prefill_step_size": None}
    steps = generate_step(ids, module, pixels, None, **options, **kwargs)
    for token, values in steps:
        if int(token) in request.stop_token_ids:
            break
        tokens.append(int(token))
        logprobs.append(top_logprobs(np.array(values.astype(mx.float32)).reshape(-1), int(token)))
    return Answer(tuple(tokens), tuple(logprobs))


def whole_forward(
    module: Any, model_dir: Path, request: EngineRequest, token_ids: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    """Return the logprobs at each token of an answer, from one forward over prompt and answer."""
    cache = zoo.empty_cache(module.language_model)
    pixels, kwargs = image_inputs(model_dir, request)
    ids = mx.array(np.concatenate([request.token_ids, token_ids[:-1]]).astype(np.int32)[None])
    if pixels is None:
        logits = module.language_model(ids, cache=cache).logits
    else:
        logits = module(ids, pixels, None, cache, **kwargs).logits
    values = np.array(logits[0, len(request.token_ids) - 1 :].astype(mx.float32))
    return tuple(top_logprobs(row, token) for row, token in zip(values, token_ids, strict=True))


def image_inputs(model_dir: Path, request: EngineRequest) -> tuple[mx.array | None, dict[str, Any]]:
    """Return the pixels as the library's processor gives them, and the grids."""
    if not request.images:
        return None, {}
    normalization = PatchNormalization.of(image_processor_config(model_dir))
    pixels = np.concatenate([normalize(image.patches, normalization) for image in request.images])
    return mx.array(pixels), {"image_grid_thw": mx.array([image.grid_thw for image in request.images], mx.int32)}


def top_logprobs(values: np.ndarray, token_id: int) -> TokenLogprobs:
    """Return the best of the logprobs or logits [vocab] of one position."""
    logprobs = values.astype(np.float64) - values.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    best = np.argsort(-logprobs, kind="stable")[:MAX_TOP_LOGPROBS]
    return TokenLogprobs(float(logprobs[token_id]), tuple((int(i), float(logprobs[i])) for i in best))


def rows_of(case: Case, per_prompt: bool) -> list[list[str]]:
    """Let the engine answer, alone and all requests at once, and compare.

    Args:
        case: The model, its prompts, and the library's answers.
        per_prompt: Whether each prompt has a row of its own; else one has all.
    """
    try:
        arms = in_thread(lambda: engine_answers(case))
    except Exception as error:  # the other models are still compared
        return [failed_row(case.name, "-", error, Status.FAIL)]
    groups = {name: [name] for name in case.answers} if per_prompt else {"all": list(case.answers)}
    return [row(case, name, group, arm, arms[arm]) for name, group in groups.items() for arm in arms]


def engine_answers(case: Case) -> dict[str, dict[str, Answer]]:
    runner = load_runner(case.config, lambda progress: None)
    try:
        config = changed(case.config, **PLAIN)
        alone: dict[str, Answer] = {}
        for request in case.requests:
            alone |= CoreRun(config, runner).run({0: [request]})
        return {"alone": alone, "batch": CoreRun(config, runner).run({0: case.requests})}
    finally:
        runner.close()


def in_thread(work: Any) -> Any:
    """A runner that is closed leaves its thread without MLX's streams."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def row(case: Case, name: str, group: Sequence[str], arm: str, answers: Mapping[str, Answer]) -> list[str]:
    found: Agreement = agree({one: case.answers[one] for one in group}, answers)
    others = {one: first_difference(case.answers[one], answers[one]) for one in group}
    places = [str(other.position) for other in others.values() if other is not None]
    outcome = found.outcome(name, case.rounding)
    equal = f"{found.num_compared} of {found.num_tokens}"
    place, gap = ", ".join(places) or "-", f"{found.gap:.1e}" if places else "-"
    shift = "; ".join([f"{found.shift:.1e}", *found.errors])
    return [case.name, name, arm, equal, place, gap, shift, f"{case.rounding.limit:.1e}", outcome.status]


def greedy(name: str, token_ids: Any, max_tokens: int, stops: tuple[int, ...] = ()) -> EngineRequest:
    sampling = SamplingParams(max_tokens, temperature=0.0, logprobs=MAX_TOP_LOGPROBS)
    return EngineRequest(name, np.array(token_ids, np.int32), sampling, stops)


def checkpoint_requests(config: EngineConfig, images: Sequence[Path], max_tokens: int) -> list[EngineRequest]:
    """Return chats by the checkpoint's template, a long prompt, and a question about each image.

    If the model sees images, there is a drawn one, too.
    """
    model_dir = resolve_checkpoint(config.model, config.revision, weights=True)
    prompts = prompts_of(model_dir)
    stops = prompts.stop_token_ids
    asked = [(text[:24], prompts.chat([SelfTestMessage("user", text)]).token_ids) for text in QUESTIONS]
    asked += [("long prompt", np.concatenate([prompts.long(LONG_TOKENS), asked[0][1]]))]
    requests = [greedy(name, ids, max_tokens, stops) for name, ids in asked]
    sees_images = "image" in media_kinds(model_dir, read_config(model_dir))
    shown = {"blue circle": prompts.image()} if sees_images else {}
    for path in images:
        shown[path.name] = ImagePreprocessor(model_dir).read(path.read_bytes(), MediaConfig().max_pixels)
    for name, image in shown.items():
        ids = prompts.chat([SelfTestMessage("user", IMAGE_QUESTION)], [image]).token_ids
        requests.append(replace(greedy(name, ids, max_tokens, stops), images=(image,)))
    return requests


def zoo_cases(
    names: Iterable[str], folder: Path, config: EngineConfig, bits: int | None = None
) -> Iterable[Case | list[str]]:
    """Write the checkpoints, with the turns of tests/support/zoo.py as prompts.

    Args:
        names: Families of the zoo.
        folder: Where their checkpoints go.
        config: The engine's configuration but for the model.
        bits: Quantize weights of float32 families with so many bits, in groups of 32.

    Returns:
        Each family's case; the row of a family that the library itself cannot compute, or that the engine refuses.
    """
    for name in names:
        family = FAMILIES[name]
        if bits is not None and family.quantization is None:
            family = replace(family, quantization={"group_size": 32, "bits": bits})
        try:
            path = zoo.make(folder / name.replace(" ", "_"), family)
            turns = zoo.conversation(zoo.load(path))
            requests = [greedy(turn, one.token_ids, len(one.answer.tokens)) for turn, one in turns.items()]
            yield library_case(name, changed(config, model=str(path)), requests)
        except Exception as error:  # the other families are still compared
            status = Status.FAIL if isinstance(error, EngineFailed) else Status.SKIP
            yield failed_row(name, "library", error, status)


def failed_row(name: str, arm: str, error: Exception, status: Status) -> list[str]:
    first_line = str(error).partition("\n")[0]
    return [name, "-", arm, "-", "-", "-", f"{type(error).__name__}: {first_line}", "-", status]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="'demo', a local directory, or a hub repository")
    parser.add_argument("--image", action="append", default=[], type=Path, help="also ask about this image")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--zoo", action="store_true", help="all families of the zoo")
    parser.add_argument("--only", help="with --zoo: these families, separated by commas")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="with --zoo: quantize the weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    if args.zoo == (args.model is not None):
        parser.error("give either a model or --zoo")
    if args.bits and not args.zoo:
        parser.error("--bits is for --zoo: a checkpoint is compared as it is")
    if args.zoo and args.image:
        parser.error("--image needs a model: the zoo's checkpoints have no image processor")
    args.only = args.only.split(",") if args.only else list(FAMILIES)
    if unknown := set(args.only) - set(FAMILIES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    return args


def main() -> int:
    args = arguments()
    config = EngineConfig.model_validate({"device": args.device, "dtype": args.dtype})
    embedding_scale.install()
    gemma2_masks.install()
    mistral_scale.install()
    with tempfile.TemporaryDirectory(prefix="orchard-parity-") as folder:
        try:
            if args.zoo:
                cases = list(zoo_cases(args.only, Path(folder), config, args.bits))
            else:
                config = changed(config, model=args.model)
                requests = checkpoint_requests(config, args.image, args.max_tokens)
                cases = [library_case(Path(args.model).name, config, requests)]
        except EngineFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        of_cases = [[case] if isinstance(case, list) else rows_of(case, per_prompt=not args.zoo) for case in cases]
    rows = [row for of_case in of_cases for row in of_case]
    dtypes = {case.rounding.dtype for case in cases if isinstance(case, Case)}
    print(heading(f"parity on {mx.default_device()}, {', '.join(sorted(dtypes)) or 'nothing compared'}"))
    print(table(COLUMNS, rows))
    counts = {status: sum(row[-1] == status for row in rows) for status in Status}
    print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    return int(counts[Status.FAIL] > 0 or not dtypes)


if __name__ == "__main__":
    sys.exit(main())
