"""Times of functions of no arguments, taken in turns so that a busy moment hits all of them."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Time(NamedTuple):
    """Seconds of one call."""

    best: float
    median: float


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def measuring(device: torch.device) -> contextlib.AbstractContextManager:
    """Everything that is measured is made and run inside: a backward runs on the stream of its forward,
    and a graph captures one stream."""
    return torch.cuda.stream(_side_stream()) if device.type == "cuda" else contextlib.nullcontext()


def in_turns(functions: dict[str, Callable], device: torch.device, repeats: int) -> dict[str, Time]:
    """On CUDA the time between events around several calls, or replays of a graph of them."""
    timers = {name: _timer(function, device) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: Time(min(t), statistics.median(t)) for name, t in times.items()}


def copy_rate(device: torch.device, repeats: int) -> float:
    """Bytes read and written a second by a copy far larger than the caches."""
    size = 1 << (30 if device.type == "cuda" else 27)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    times = in_turns({"copy": lambda: target.copy_(source)}, device, repeats)
    return 2 * size / times["copy"].best


def _timer(function: Callable, device: torch.device) -> Callable[[], float]:
    function()  # compiles, warms up
    if device.type != "cuda":
        return lambda: _wall_time(function)
    calls = 10
    run = _graph_of(function, calls) or (lambda: [function() for _ in range(calls)])
    return lambda: _event_time(run) / calls


def _wall_time(function: Callable) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _event_time(function: Callable) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def _graph_of(function: Callable, calls: int) -> Callable | None:
    """Replays `calls` calls; None where the function cannot be captured."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            kept = [function() for _ in range(calls)]
    except Exception:  # whatever a peer's code does not allow
        torch.cuda.synchronize()
        return None
    graph.kept = kept  # or its memory would be used again by the next graph
    return graph.replay
