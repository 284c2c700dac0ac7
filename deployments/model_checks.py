"""Checks of a model before a replica loads it, and of options that have no effect with it.

Without them Serve would start a failing replica three times before it gives up.
"""

from pathlib import Path

from deployments.args import AppArgs
from engine.config import DraftModelConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import (
    draft_of,
    is_local,
    media_kinds,
    read_config,
    refuse_code,
    resolve_checkpoint,
    vocab_size,
)
from engine.processing.context import choose_context
from engine.processing.encoders import known_code
from engine.processing.weight_file import check_weights

IMAGE_OPTIONS = ("vision_cache_mb", "image_memory_mb")
"""Options of the engine that have an effect only with images."""


def check_model(args: AppArgs) -> None:
    """Check the model's files and the options that depend on them.

    Downloads the configuration of a hub repository, but not its weights. Raises EngineFailed.
    """
    model_dir = _check_files(args.engine.model, args.engine.revision)
    config = read_config(model_dir)
    choose_context(args.engine, config)
    vocab_size(config)
    if not media_kinds(model_dir, config):
        _check_text_only(args)
    if "system_policy" in args.http.changed():
        _check_system_policy(args, model_dir)
    if args.engine.draft_model is not None:
        _check_draft(args.engine.draft_model, model_dir)


def _check_files(model: str, revision: str | None) -> Path:
    """Return the model's directory; check its weights if they are on this machine."""
    model_dir = resolve_checkpoint(model, revision, weights=False)
    refuse_code(model_dir, known_code(model_dir))
    if is_local(model):
        check_weights(model_dir)
    return model_dir


def _check_text_only(args: AppArgs) -> None:
    without = [f"media.{name}" for name in args.media.changed()]
    without += [f"engine.{name}" for name in args.engine.changed() if name in IMAGE_OPTIONS]
    if without:
        raise EngineFailed(
            f"{', '.join(without)}: has no effect, as the model {args.engine.model!r} accepts only text. Remove it."
        )


def _check_system_policy(args: AppArgs, model_dir: Path) -> None:
    from engine.processing.tokenizer import ChatTokenizer  # imports transformers

    if ChatTokenizer(model_dir).keeps_late_system:
        raise EngineFailed(
            f"http.system_policy: {args.http.system_policy!r} has no effect: the chat template of the model "
            f"{args.engine.model!r} accepts system messages at any position and keeps them there. Remove it."
        )


def _check_draft(draft: DraftModelConfig, model_dir: Path) -> None:
    from engine.processing.tokenizer_match import why_different  # imports tokenizers

    try:
        difference = why_different(model_dir, _check_files(draft_of(draft.model), draft.revision))
    except EngineFailed as error:
        raise EngineFailed(f"engine.draft_model {draft.model!r}: {error}") from error
    if difference is not None:
        raise EngineFailed(f"engine.draft_model {draft.model!r} has another tokenizer than the model: {difference}")
