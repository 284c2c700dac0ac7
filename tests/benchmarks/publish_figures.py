"""The figures that publish_bench computes from the times at which tokens were emitted and arrived."""

from collections.abc import Mapping, Sequence

from tests.benchmarks.measure import CpuTrace


def latencies_ms(emitted: Mapping[int, Sequence[float]], arrived: Mapping[str, Sequence[float]]) -> list[float]:
    """From the end of the step that made a token to the read that brought it, for every token of every stream."""
    return [
        (there - here) * 1e3
        for seed, times in emitted.items()
        for here, there in zip(times, arrived[str(seed)], strict=True)
    ]


def engine_cost(
    engine: CpuTrace, emitted: Mapping[int, Sequence[float]], idle: float, step_us: float
) -> dict[str, float]:
    """Per token, over the time in which all streams run: no request begins or ends in it."""
    begin, end = max(times[0] for times in emitted.values()), min(times[-1] for times in emitted.values())
    num_items = sum(begin < at <= end for times in emitted.values() for at in times)
    gross_s = engine.between(begin, end)
    own_s = idle * (end - begin) + step_us * 1e-6 * num_items / len(emitted)
    return {
        "items": num_items,
        "gross_us": gross_s / num_items * 1e6,
        "net_us": (gross_s - own_s) / num_items * 1e6,
        "engine_cores": gross_s / (end - begin),
    }
