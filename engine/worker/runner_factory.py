"""Makes the runner of a model: an encoder has another one than a model that generates text."""

from collections.abc import Callable

from engine.config import EngineConfig
from engine.core.runner import ModelRunner
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.encoders import is_encoder_checkpoint
from engine.worker import encoder_runner, model_runner


def make_runner(config: EngineConfig, progress: Callable[[float], None]) -> ModelRunner:
    """Load the model on the calling thread, which must be the one that will call the runner.

    Args:
        config: The engine's configuration.
        progress: See AsyncEngine's RunnerFactory.

    Raises:
        EngineFailed: The model cannot be loaded, or an engine in another process has the GPU.
    """
    if is_encoder_checkpoint(resolve_checkpoint(config.model, config.revision, weights=False)):
        return encoder_runner.load_runner(config, progress)
    return model_runner.load_runner(config, progress)
