"""Trains the demo model and its draft, stage by stage.

    uv run python -m tests.demo_model.train OUT --workers 12

Each stage writes its weights to OUT, and a stage whose weights are there is not run again. The stages before the last
are made for a GPU; `--stages` chooses some of them.
"""

import argparse
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import mlx.optimizers as optim

from tests.demo_model.batches import Batch, draw_batch
from tests.demo_model.export import export_checkpoint
from tests.demo_model.model import ModelConfig, TrainableModel
from tests.demo_model.optimizer import make_optimizer
from tests.demo_model.stages import FINAL_STAGES, STAGES, Stage

MAX_GRADIENT_NORM = 1.0
BATCHES_AHEAD = 3
"""Per worker."""
LOG_INTERVAL = 50

log = logging.getLogger("demo_model")


def train(model: TrainableModel, stage: Stage, batches: Iterable[Batch]) -> Iterator[float]:
    """Take a step for each batch; yield its loss."""
    optimizer = make_optimizer()
    optimizer.init(model.trainable_parameters())
    loss_and_gradients = nn.value_and_grad(model, lambda batch: model.loss(batch, stage.mtp_weights))
    for index, batch in enumerate(batches):
        optimizer.learning_rate = stage.rate(index)
        loss, gradients = loss_and_gradients(batch)
        if batch.images is None:
            gradients.pop("visual", None)  # no step: the momentum would move the tower
        gradients, _ = optim.clip_grad_norm(gradients, MAX_GRADIENT_NORM)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        yield loss.item()


def stage_batch(stage: Stage, index: int) -> Batch:
    """Return the batch of the stage's step number `index`."""
    return draw_batch(
        stage.mix_at(index),
        stage.seed,
        stage.first_step + index,
        stage.row_tokens(index),
        stage.batch_tokens,
        stage.prompt_weight,
        stage.foreign_names,
    )


def stage_batches(stage: Stage, num_workers: int = 0) -> Iterator[Batch]:
    """Yield the batches of a stage, drawn by so many processes, or on this thread."""
    if num_workers == 0:
        yield from (stage_batch(stage, index) for index in range(stage.steps))
        return
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        ahead = deque()
        for index in range(stage.steps):
            ahead.append(pool.submit(stage_batch, stage, index))
            if len(ahead) > BATCHES_AHEAD * num_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def run_stage(stage: Stage, out: Path, num_workers: int) -> None:
    """Train a stage from the weights of the stage before it, and write its own."""
    model = TrainableModel(for_device(stage.model), stage.seed)
    if stage.starts_from is not None:
        model.load_weights(str(weights_file(out, stage.starts_from)))
    for index, loss in enumerate(train(model, stage, stage_batches(stage, num_workers))):
        if index % LOG_INTERVAL == 0 or index == stage.steps - 1:
            log.info("%s: step %d of %d, loss %.3f", stage.name, index + 1, stage.steps, loss)
    model.save_weights(str(weights_file(out, stage.name)))
    if stage.name in FINAL_STAGES:
        export_checkpoint(model, out / FINAL_STAGES[stage.name])


def for_device(config: ModelConfig) -> ModelConfig:
    """Return the config with products in bfloat16 where there is a GPU."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return config
    return replace(config, layers=replace(config.layers, product_dtype="bfloat16"))


def weights_file(out: Path, stage_name: str) -> Path:
    """Return where the weights of a stage are written."""
    return out / f"{stage_name.replace(' ', '-')}.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for weights and checkpoints")
    parser.add_argument("--stages", nargs="+", choices=[stage.name for stage in STAGES], help="default: all")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw batches")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        if args.stages is None or stage.name in args.stages:
            if weights_file(args.out, stage.name).exists():
                log.info("%s: done before", stage.name)
            else:
                run_stage(stage, args.out, args.workers)


if __name__ == "__main__":
    main()
