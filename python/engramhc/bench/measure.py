"""Runs the cases and gathers results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch._functorch.config

from . import timing
from .cases import CASES, Case
from .peers import PEERS

OURS = "engramhc"


class Result(NamedTuple):
    """One variant of one operator and direction."""

    operator: str
    direction: str  # "forward" or "backward"
    variant: str
    best: float  # seconds
    median: float
    bytes_moved: int
    share: float  # of the copy rate of the same run
    ratio: float  # of this time to ours: above 1 we are faster
    difference: float | None  # squares of differences from the eager formula, over squares


def run(
    operators: Iterable[str] = (),
    *,
    device: str = "cpu",
    tokens: int = 4096,
    width: int = 4096,
    repeats: int = 7,
    compile: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[list[Result], list[str]]:
    """Results, and remarks about what could not be measured."""
    where = torch.device(device)
    torch._functorch.config.donated_buffer = False  # or a compiled backward could run only once
    torch.manual_seed(0)
    remarks: dict[str, None] = {}
    with timing.measuring(where):
        results = _run(
            list(operators) or list(CASES), where, tokens, width, repeats, compile, progress, remarks
        )
    return results, list(remarks)


def _run(
    operators: list[str],
    where: torch.device,
    tokens: int,
    width: int,
    repeats: int,
    compile: bool,
    progress: Callable[[str], None],
    remarks: dict[str, None],
) -> list[Result]:
    ceiling = timing.copy_rate(where, repeats)
    results = []
    for name in operators:
        case = CASES[name]
        for direction in ("forward", "backward") if case.backward_values else ("forward",):
            progress(f"{name} {direction}")
            inputs = case.make(tokens, width, where)
            functions, values = _variants(name, case, direction, inputs, compile, remarks)
            times = timing.in_turns(functions, where, repeats)
            count = case.forward_values if direction == "forward" else case.backward_values
            moved = count(tokens, width)
            for variant, time in times.items():
                results.append(
                    Result(
                        name,
                        direction,
                        variant,
                        time.best,
                        time.median,
                        moved,
                        moved / time.best / ceiling,
                        time.best / times[OURS].best,
                        values.get(variant),
                    )
                )
    return results


def _variants(
    name: str, case: Case, direction: str, inputs: dict, compile: bool, remarks: dict[str, None]
) -> tuple[dict[str, Callable], dict[str, float]]:
    """Functions of no arguments that work, and how far each is from the eager formula."""
    makers: dict[str, Callable] = {
        OURS: lambda x: (lambda: case.ours(*x.values()), list(x.values())),
        "torch eager": lambda x: (lambda: case.theirs(*x.values()), list(x.values())),
    }
    if compile:
        torch.compiler.reset()
        graph = torch.compile(case.theirs)
        makers["torch.compile"] = lambda x: (lambda: graph(*x.values()), list(x.values()))
    for peer in PEERS:
        try:
            adapter = peer.adapter(name)
        except Exception as error:
            remarks[f"{peer.name} ({peer.package}): {type(error).__name__}: {error}"] = None
            continue
        if adapter is not None:
            makers[peer.name] = adapter

    functions, results = {}, {}
    for variant, maker in makers.items():
        try:
            function = _direction(maker, inputs, direction)
            if function is None:
                continue
            results[variant] = function()
        except Exception as error:  # theirs; ours must work
            if variant == OURS:
                raise
            text = str(error).strip().splitlines()
            remarks[f"{variant}, {name} {direction}: {type(error).__name__}: {text[0] if text else ''}"] = (
                None
            )
            continue
        functions[variant] = function
    expected = results.get("torch eager")
    differences = {v: _difference(r, expected) for v, r in results.items()} if direction == "forward" else {}
    if direction == "backward":
        differences = {v: _difference(results[v], expected) for v in (OURS, "torch.compile") if v in results}
    return functions, {v: d for v, d in differences.items() if d is not None}


def _direction(maker: Callable, inputs: dict, direction: str) -> Callable | None:
    if direction == "forward":
        function, _ = maker(inputs)

        def forward():
            with torch.no_grad():
                return function()

        return forward
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    function, wanted = maker(leaves)
    if not wanted:
        return None  # a peer without autograd
    outputs = _as_tuple(function())  # the graph, whose backward alone is measured
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in outputs]
    return lambda: torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)


def _as_tuple(results) -> tuple:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _difference(got, expected) -> float | None:
    if expected is None:
        return None
    worst = 0.0
    for a, b in zip(_as_tuple(got), _as_tuple(expected)):
        a, b = a.double(), b.double()
        size = (a.square() + b.square()).sum().item()
        worst = max(worst, (a - b).square().sum().item() / size if size else 0.0)
    return worst
