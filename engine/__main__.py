"""python -m engine: one prompt, or a chat, in the terminal. Needs no server and no Ray."""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig, RopeScaling
from engine.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, OrchardError
from engine.media_config import MediaConfig
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.cross_encoder import read_reranker
from engine.processing.images import ImagePreprocessor
from engine.processing.pooling import EmbeddingModel
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, FinishReason, ImagePatches, SamplingParams
from engine.self_test.bench import FULL, QUICK
from engine.self_test.self_test import SelfTest
from engine.worker.model_report import check_before_start, check_each, report


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        "python -m engine", description="Answer one prompt, or start a chat if none is given."
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        help="'-' reads it from the standard input; default: start a chat, one line per turn, until end of input",
    )
    parser.add_argument("--image", action="append", default=[], type=Path, help="an image for the (first) prompt")
    _add_model_options(parser)
    _add_answer_options(parser)
    _add_check_options(parser)
    parser.add_argument("--verbose", action="store_true", help="log what the engine does")
    options = parser.parse_args(argv)
    _check_combination(parser, options)
    _check_bounds(parser, options)
    return options


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="'demo', a local directory, or a hub repository")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: the GPU if there is one"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the weights; default: float32 on the CPU, bfloat16 on a GPU",
    )
    parser.add_argument(
        "--rope-scaling", metavar="TYPE:FACTOR", type=_rope_scaling, help="such as yarn:4, to go beyond the context"
    )


def _add_answer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, help="default: the rest of the model's context")
    parser.add_argument("--temperature", type=float, help="default: the model's own; 0 is greedy")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="text that ends the answer")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--think", action="store_true", help="enable thinking if the model supports it")


def _add_check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check", action="store_true", help="report whether the model can be served here, without reading its weights"
    )
    parser.add_argument(
        "--engine",
        metavar="JSON",
        type=_engine_config,
        help="with --check: the section `engine` of a configuration, instead of --model and other options; prints only "
        "why the model cannot be served, and downloads no weights",
    )
    parser.add_argument(
        "--weight-bytes",
        type=int,
        metavar="N",
        help="with --engine: size of a hub repository's weights, to be compared",
    )
    parser.add_argument(
        "--check-each",
        action="store_true",
        help="report on the models that the standard input names, one a line, as one JSON line for each",
    )
    parser.add_argument(
        "--self-test", action="store_true", help="check the engine on this machine, and report in plain text"
    )
    parser.add_argument("--quick", action="store_true", help="with --self-test: short answers, speeds mean little")
    parser.add_argument("--draft-model", help="with --check: a draft model for sparse prefill, to be compared")


def _check_combination(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.draft_model is not None and not options.check:
        parser.error("--draft-model has an effect only with --check")
    if options.engine is not None and not options.check:
        parser.error("--engine has an effect only with --check")
    if options.weight_bytes is not None and options.engine is None:
        parser.error("--weight-bytes has an effect only with --engine")
    if options.quick and not options.self_test:
        parser.error("--quick has an effect only with --self-test")
    if options.self_test and (options.check or options.prompt is not None or options.image):
        parser.error("--self-test takes no prompt, --image or --check")


def _check_bounds(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    limits = {"max_tokens": (1, 2**31), "temperature": (0, 2), "top_p": (1e-9, 1), "top_k": (0, 2**31), "min_p": (0, 1)}
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be between {low} and {high}")


def _engine_config(text: str) -> EngineConfig:
    try:
        return EngineConfig.model_validate_json(text)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rope_scaling(text: str) -> RopeScaling:
    kind, _, factor = text.partition(":")
    try:
        return RopeScaling.model_validate({"type": kind, "factor": factor})
    except ValidationError as error:
        reasons = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        raise argparse.ArgumentTypeError(f"{text!r}: {reasons}") from None


class Chat:
    """A conversation with the engine: its messages and images."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        model_dir = resolve_checkpoint(options.model, None, weights=True)
        if EmbeddingModel.read(model_dir) is not None:
            raise EngineFailed(f"{options.model} is an embedding model and generates no text; serve it for embeddings")
        if read_reranker(model_dir) is not None:
            raise EngineFailed(f"{options.model} is a reranker and generates no text; serve it for /v1/rerank")
        self._tokenizer = ChatTokenizer(model_dir)
        self._messages: list[dict[str, Any]] = []
        if options.system:
            self._messages.append({"role": "system", "content": options.system})
        self._images = _read_images(options.image, model_dir)
        self._engine = AsyncEngine(config_of(options))
        self._turn = 0

    async def wait_ready(self) -> None:
        await self._engine.wait_ready()

    async def ask(self, text: str) -> None:
        """Print the answer as it is generated, and append it to the conversation."""
        parts = [{"type": "image"} for _ in self._images] if self._turn == 0 else []
        self._messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text})
        self._turn += 1
        detokenizer = self._tokenizer.detokenizer(tuple(self._options.stop))
        answer = ""
        async for chunk in self._engine.generate(self._request()):
            if chunk.finish_reason is FinishReason.ERROR:
                raise EngineFailed(chunk.error or "the engine failed")
            answer += _show(detokenizer.push(chunk.token_ids))
            if detokenizer.stopped:
                break
        answer += _show(detokenizer.finish())
        print()
        self._messages.append({"role": "assistant", "content": answer})

    async def close(self) -> None:
        await self._engine.shutdown()

    def _request(self) -> EngineRequest:
        prompt = self._tokenizer.chat_prompt(
            self._messages,
            template_kwargs={"enable_thinking": self._options.think},
            placeholders=self._tokenizer.placeholders(self._images),
        )
        limit = self._engine.status().max_context_tokens
        room = limit - len(prompt.token_ids)
        if room < 1:
            raise ContextLengthExceeded(len(prompt.token_ids), 1, limit)
        chosen = {name: getattr(self._options, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        defaults = self._tokenizer.generation_defaults
        sampling = {name: getattr(defaults, name) if value is None else value for name, value in chosen.items()}
        return EngineRequest(
            request_id=f"turn-{self._turn}",
            token_ids=prompt.token_ids,
            sampling=SamplingParams(self._options.max_tokens or room, seed=self._options.seed % 2**64, **sampling),
            stop_token_ids=self._tokenizer.stop_token_ids,
            images=self._images,
            boundaries=prompt.boundaries,
        )


def _read_images(paths: Sequence[Path], model_dir: Path) -> tuple[ImagePatches, ...]:
    if not paths:
        return ()
    preprocessor, max_pixels = ImagePreprocessor(model_dir), MediaConfig().max_pixels
    images = []
    for path in paths:
        try:
            images.append(preprocessor.read(path.read_bytes(), max_pixels))
        except (OSError, InvalidRequest) as error:
            raise InvalidRequest(f"{path}: {error}", "--image") from None
    return tuple(images)


def _show(text: str) -> str:
    print(text, end="", flush=True)
    return text


def config_of(options: argparse.Namespace) -> EngineConfig:
    """Return the engine's configuration."""
    chosen = {"model": options.model, "device": options.device, "dtype": options.dtype}
    return EngineConfig(**chosen, rope_scaling=options.rope_scaling)


def run_self_test(options: argparse.Namespace) -> int:
    """Print the report of the self-test as it comes; return 1 if a check failed, else 0."""
    test = SelfTest(config_of(options), QUICK if options.quick else FULL)
    for line in test.lines():
        print(line, flush=True)
    return test.exit_status


async def run(options: argparse.Namespace) -> None:
    """Answer the prompt of the command line, or messages from the terminal until the input ends."""
    chat = Chat(options)
    try:
        await chat.wait_ready()
        if options.prompt is not None:
            await chat.ask(sys.stdin.read() if options.prompt == "-" else options.prompt)
            return
        print("Type a message; end with Ctrl-D.")
        while line := await _read_line():
            await chat.ask(line.strip())
    finally:
        await chat.close()


async def _read_line() -> str:
    """Return the next non-blank line, '' at the end of the input. Ctrl-C interrupts waiting for a terminal."""
    line = "\n"
    while line.isspace():
        print("> ", end="", flush=True)
        if sys.stdin.isatty():
            await _until_readable(sys.stdin.fileno())
        line = sys.stdin.readline()
    return line


async def _until_readable(file: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(file, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 1 after an error, 130 after Ctrl-C, 141 if the reader of the output closes it (`| head`).
    """
    options = arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.ERROR)
    logging.getLogger("orchard.engine").setLevel(logging.INFO if options.verbose else logging.CRITICAL)
    try:
        status = _run_command(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout at its end
        return 128 + signal.SIGPIPE
    except OrchardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run_command(options: argparse.Namespace) -> int:
    if options.engine is not None:
        check_before_start(options.engine, options.weight_bytes)
        return 0
    if options.check_each:
        for found in check_each(line.rstrip("\n") for line in sys.stdin):
            print(json.dumps(found), flush=True)
        return 0
    if options.check:
        for line in report(config_of(options), options.draft_model):
            print(line, flush=True)
        return 0
    if options.self_test:
        return run_self_test(options)
    asyncio.run(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
