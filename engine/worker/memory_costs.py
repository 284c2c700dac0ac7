"""Measures the memory costs of rows, prompts and images: exact where a snapshot tells, else from probes.

The intermediate results of a forward depend on the device's kernels: whether attention stores its scores, how many
layers are computed at once. A few forwards at start record peaks of memory, from which the parts that grow with the
chunk and with the prompt before it are solved.
"""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from engine.core.memory.costs import MemoryCosts
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts, ModelRunner
from engine.protocol import MAX_TOP_LOGPROBS, EngineRequest, SamplingParams
from engine.worker import devices
from engine.worker.drafting import most_draft_tokens
from engine.worker.kv_layer import SLOTS_STEP
from engine.worker.patches import attention_cpu
from engine.worker.quantized_kv import KVFormat
from engine.worker.snapshot import StateSnapshot
from engine.worker.vision import VisionEncoder
from engine.worker.vision_tower import Grid
from engine.worker.window_layer import ring_bytes, slot_bytes

MARGIN, CHUNK_MARGIN = 1.15, 1.7
"""Safety factors on measurements of decoding and of prefill, whose chunks may be much larger than the probes. Exact
values need none."""

PROBE_TOKENS, CUDA_PROBE_TOKENS = 192, 960
"""With the tokens decoded after them they fit into one multiple of SLOTS_STEP, and so do three times as many."""
CUDA_PROBES, CUDA_CHUNK_MARGIN = 3, 1.3
"""On CUDA a peak depends on how far the host is ahead of the device, for a large model by gigabytes: as bytes per token
and per pair of 192 tokens that allowed chunks of 26 tokens. So chunks of the usual size are probed, several times, and
need a smaller margin."""
NUM_STEPS = 3
SHORT_TOKENS = 16
GREEDY = SamplingParams(2**20)
RANKED = SamplingParams(2**20, top_p=0.9, min_p=0.01)  # top_p alone sorts the whole vocabulary
SHAPED = SamplingParams(
    2**20, presence_penalty=1, frequency_penalty=1, repetition_penalty=1.1, logit_bias=((0, 1.0),), min_tokens=2**20,
    logprobs=MAX_TOP_LOGPROBS,
)  # fmt: skip
GPU_PAGE_BYTES, CPU_PAGE_BYTES = 2**14, 2**12
"""Pages of MLX's allocators, whatever those of the system are."""
SCORE_BYTES = 5  # a float, and a mask
UNPACKED_SLOTS = 1024
"""Slots of the probe for dequantizing a layer."""
LATE_BYTES = 2**18  # constants that are allocated on first use


def measure(
    runner: ModelRunner,
    snapshot: StateSnapshot,
    vision: VisionEncoder | None,
    drafts: Sequence[Drafts],
    num_heads: int,
    head_layers: int,
    pending_tokens: int,
    hidden_bytes: int,
    kv_formats: Sequence[KVFormat] = (),
    expanded_bytes: int = 0,
) -> MemoryCosts:
    """Measure the costs of a warm runner without rows. The largest probe takes 2 * PROBE_TOKENS tokens.

    Args:
        runner: The runner.
        snapshot: A snapshot of any prompt.
        vision: The vision encoder, None for a text model.
        drafts: The ways to draft.
        head_layers: Attention layers of the models that draft, which come last.
        pending_tokens: The most tokens of a row whose hidden states wait for heads.
        hidden_bytes: Of the hidden states of one such token, of all heads; 0 without a head.
        num_heads: Query heads of an attention layer, whose scores in a step are too small to be measured.
        kv_formats: Of the layers whose keys and values are quantized.
        expanded_bytes: Of the largest weights that are expanded for more rows than the probes' steps have.
    """
    gc.collect()  # what is freed between two probes would count as the difference between them
    mx.synchronize()
    mx.clear_cache()
    max_drafts = most_draft_tokens(drafts)
    scores = MARGIN * num_heads * (max_drafts + 1) * SCORE_BYTES
    base, blocks = mx.get_active_memory() + LATE_BYTES, attention_cpu.max_queries()
    costs = replace(
        _exact(snapshot, max_drafts, head_layers, pending_tokens, hidden_bytes),
        base_bytes=base,
        slot_step_bytes=scores,
        max_queries=blocks,
    )
    if kv_formats:
        costs = replace(costs, unpacked_bytes=_of_unpacking(max(kv_formats, key=lambda one: one.token_bytes)))
    costs = _with_forwards(runner, costs, drafts, expanded_bytes)
    return costs if vision is None else replace(costs, **_of_images(vision))


def _exact(
    snapshot: StateSnapshot, max_drafts: int, head_layers: int, pending_tokens: int, hidden_bytes: int
) -> MemoryCosts:
    layers = snapshot.segment.keys_values
    slots = [slot_bytes(layer) / ratio for layer, ratio in zip(layers, snapshot.ratios, strict=True)]
    pairs = list(zip(snapshot.windows, snapshot.states, strict=True))
    windows, window_slots, states = ring_bytes([(window, slot_bytes(state)) for window, state in pairs if window])
    states += [sum(array.nbytes for array in state) for window, state in pairs if not window]
    num_arrays = 2 * len(layers) + sum(map(len, snapshot.states)) + 1
    head = int(sum(slots[len(slots) - head_layers :]))
    shares = [max(sizes) / sum(sizes) for sizes in (slots, states, windows) if sum(sizes)]
    return MemoryCosts(
        token_bytes=math.ceil(sum(slots)),
        state_bytes=sum(states),
        window_bytes=sum(windows),
        window_slots=window_slots,
        layer_share=max(shares, default=0.0),
        snapshot_slack=buffer_slack() * num_arrays,
        max_snapshots=_max_arrays() // num_arrays,
        slots_step=SLOTS_STEP,
        overshoot=2 * (max_drafts + 1) + 1,
        pending_bytes=hidden_bytes * 3 // 2 + head,  # rewritten in each step
        pending_tokens=pending_tokens if hidden_bytes else 0,
    )


def _max_arrays() -> int:
    """Return how many arrays snapshots may have: half of the buffers that Metal allows a process, elsewhere any number.

    Beyond its `resource_limit`, 499000 on all Macs so far, MLX 0.32.4 raises "[metal::malloc] Resource limit exceeded".
    """
    limit = mx.device_info().get("resource_limit")
    return limit // 2 if isinstance(limit, int) and limit > 0 else 2**31


def buffer_slack() -> int:
    """Return the most bytes by which MLX's allocator may make the buffer of an array larger than the array.

    It reuses a free buffer that is less than two pages larger; on a GPU it also rounds sizes up to whole pages
    (mlx/backend/common/buffer_cache.h, mlx/backend/{cuda,metal}/allocator.cpp).
    """
    return 3 * GPU_PAGE_BYTES if devices.on_gpu() else 2 * CPU_PAGE_BYTES


def _with_forwards(
    runner: ModelRunner, costs: MemoryCosts, drafts: Sequence[Drafts], expanded_bytes: int
) -> MemoryCosts:
    """Probe with prompts of n and 3n tokens, the second in chunks of 2n and n, and with steps of one and both rows."""
    on_cuda = devices.device_kind() == "cuda"
    n, margin = (CUDA_PROBE_TOKENS, CUDA_CHUNK_MARGIN) if on_cuda else (PROBE_TOKENS, CHUNK_MARGIN)
    one, two = _row("one", n), _row("two", 3 * n)
    short, long = costs.prompt(n), costs.prompt(3 * n)
    unpacked = int(n * costs.unpacked_bytes)
    try:
        first = _peak(lambda: runner.prefill([one], n)) - costs.base_bytes - short - unpacked
        alone = _decoding(runner, drafts) - costs.base_bytes - short - unpacked
        wide = _peak(lambda: runner.prefill([two], 2 * n)) - costs.base_bytes - short - long - 2 * unpacked
        late = _peak(lambda: runner.prefill([two], n)) - costs.base_bytes - 2 * long - 3 * unpacked  # the first grows
        both = _decoding(runner, drafts) - costs.base_bytes - 2 * long - 6 * unpacked
    finally:
        runner.drop([one.id, two.id])
    ranked, shaped = (_asking(runner, costs, drafts, sampling) for sampling in (RANKED, SHAPED))
    row = max(both - alone, alone // 2, 0)
    if devices.on_gpu():  # while it computes, the host allocates the next states of all layers; probes end before that
        row = max(row, costs.state_bytes)
    pair = max(late - first, 0) / (2 * n * n)
    if on_cuda:
        again = [_chunk_peaks(runner, costs, n) for _ in range(CUDA_PROBES - 1)]
        firsts, wides, lates = (sorted(peaks) for peaks in zip((first, wide, late), *again, strict=True))
        pair = max(lates[0] - firsts[-1], 0) / (2 * n * n)  # what the noise does not explain
        first, wide = firsts[-1], wides[-1]
    token = max(wide - first - (min(2 * n, costs.max_queries) * 2 * n - n * n) * pair, first / 2, 0) / n
    chunk = max(first - n * token - n * n * pair, 0)
    # Steps of many rows expand weights as chunks do, and those of the output layer for all rows (quantized_cuda.py).
    wide_step = chunk + expanded_bytes if expanded_bytes else 0
    return replace(
        costs,
        base_bytes=costs.base_bytes + int(MARGIN * max(alone - row, wide_step)),
        row_step_bytes=int(MARGIN * row),
        ranked_bytes=int(MARGIN * max(ranked - both, 0)) // 2,
        shaped_bytes=int(MARGIN * max(shaped - both, 0)) // 2,
        chunk_bytes=int(margin * chunk),
        token_step_bytes=margin * token,
        pair_bytes=margin * pair,
    )


def _chunk_peaks(runner: ModelRunner, costs: MemoryCosts, n: int) -> tuple[int, int, int]:
    """Return the bytes of a first chunk of n tokens, of one of 2n, and of one of n behind 2n others."""
    one, two = _row("one", n), _row("two", 3 * n)
    short, long, unpacked = costs.prompt(n), costs.prompt(3 * n), int(n * costs.unpacked_bytes)
    try:
        first = _peak(lambda: runner.prefill([one], n)) - costs.base_bytes - short - unpacked
        runner.drop([one.id])
        wide = _peak(lambda: runner.prefill([two], 2 * n)) - costs.base_bytes - long - 2 * unpacked
        late = _peak(lambda: runner.prefill([two], n)) - costs.base_bytes - long - 3 * unpacked
    finally:
        runner.drop([one.id, two.id])
    return first, wide, late


def _of_unpacking(kv_format: KVFormat) -> float:
    """Return the bytes of dequantizing one layer's keys and values, per slot of a row."""
    packed = kv_format.zeros(UNPACKED_SLOTS)
    mx.eval(packed)
    before = mx.get_active_memory()
    return MARGIN * (_peak(lambda: mx.eval(kv_format.unpack(*packed))) - before) / UNPACKED_SLOTS


def _asking(runner: ModelRunner, costs: MemoryCosts, drafts: Sequence[Drafts], sampling: SamplingParams) -> int:
    """Return the bytes of decode steps of two rows with these sampling parameters."""
    rows = [_row(name, SHORT_TOKENS, sampling) for name in ("one", "two")]
    try:
        for row in rows:
            runner.prefill([row], SHORT_TOKENS)
        unpacked = int(2 * SHORT_TOKENS * costs.unpacked_bytes)
        return _decoding(runner, drafts) - costs.base_bytes - 2 * costs.prompt(SHORT_TOKENS) - unpacked
    finally:
        runner.drop([row.id for row in rows])


def _row(name: str, num_tokens: int, sampling: SamplingParams = GREEDY) -> Row:
    return Row(EngineRequest(name, np.zeros(num_tokens, np.int32), sampling, (1,)))


def _decoding(runner: ModelRunner, drafts: Sequence[Drafts]) -> int:
    """Return the peak of plain steps, and of those with the most drafts of each model and of all proposers.

    A model that drafts computes and stores more than a selective proposer does with as many tokens.
    """
    ordered = sorted(drafts, key=lambda one: (one.num_tokens, not one.is_selective))
    most = {one.proposer: one for one in ordered if not one.is_selective or one is ordered[-1]}
    return max(_peak(lambda one=one: _steps(runner, one)) for one in (PLAIN, *most.values()))


def _steps(runner: ModelRunner, drafts: Drafts) -> None:
    for _ in range(NUM_STEPS):
        runner.decode(replace(drafts, is_forced=True))


def _peak(work: Callable[[], object]) -> int:
    """Return the peak bytes in use during the work."""
    mx.clear_cache()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory()


def _peak_of_image(vision: VisionEncoder, grid: Grid) -> int:
    """Return the peak bytes of one image beyond what is in use before.

    Each probe has its own level: if memory of other work were freed between two of them, a common one would make the
    larger image look as cheap as the smaller one.
    """
    mx.synchronize()  # what earlier probes leave is freed only then
    before = mx.get_active_memory()
    return _peak(lambda: vision.probe(grid)) - before


def _of_images(vision: VisionEncoder) -> dict[str, float]:
    """Return the vision tower's costs for N patches: a + b N + c N^2, as attention may store its scores.

    A tower whose images have one size costs the same for each, a. On a CPU a peak depends on how far the device is
    behind, and a smaller image may have the higher one: no patch costs less than its hidden states, and no image
    less than its measured peak.
    """
    grids = vision.probe_grids
    num_patches, num_tokens, kept = vision.probe(grids[0])
    waiting = vision.probe_pieces(grids[0]) / num_patches
    peaks = [_peak_of_image(vision, grid) for grid in grids]
    fixed, patch, pair = float(max(*peaks, kept)), 0.0, 0.0
    if len(grids) > 1:
        (n1, n2, n3), (p1, p2, p3) = ([math.prod(grid) for grid in grids], peaks)
        pair = max(((p3 - p2) / (n3 - n2) - (p2 - p1) / (n2 - n1)) / (n3 - n1), 0.0)
        patch = max((p3 - p2) / (n3 - n2) - pair * (n3 + n2), max(waiting, kept / num_patches))
        fixed = max(0.0, *(p - n * (patch + pair * n) for n, p in ((n1, p1), (n2, p2), (n3, p3))))
    return {
        "image_bytes": int(MARGIN * fixed),
        "patch_bytes": MARGIN * patch,
        "patch_pair_bytes": MARGIN * pair,
        "image_token_bytes": -(-2 * kept // num_tokens),  # one by one, then all of a request in one array
        "image_patch_bytes": math.ceil(waiting),
    }
