"""An operator as torch sees it: eager autograd, and `torch.ops.ehc.<name>` for everything that traces.

Eager calls go straight to the library. Under torch.compile, in a dispatch mode or a functorch
transform the same call goes through the dispatcher, where it has a fake kernel and an autograd
formula. Both run the same `new`, `compute` and `backward`, so their bits are the same.
"""

from __future__ import annotations

from typing import Callable

import torch

from engramhc.errors import DTypeError, Error, UnsupportedError

from . import _call, _parameters

LIBRARY = torch.library.Library("ehc", "DEF")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TAGS = (torch.Tag.pt2_compliant_tag,)


def traces(tensor) -> bool:
    """Whether a call must go through the dispatcher."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (type(tensor) not in _PLAIN and isinstance(tensor, torch.Tensor))
    )


def records(tensors) -> bool:
    """Whether autograd will want a backward of a call with these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def wide(tensor) -> torch.dtype:
    """Type of coefficients and of gradients of parameters: fp32, or fp64 beside fp64 activations."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def like(tensor) -> torch.Tensor:
    """An uninitialised contiguous tensor of the same shape and type."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class Operator:
    """One differentiable function.

    inputs      names of tensors, in order; "?" behind one that may be None, "..." before one with
                leading dimensions T (all of these lose and regain a leading dimension together)
    attributes  "name:type" with the types of a torch schema
    outputs     names of the tensors that callers get
    saved       names of outputs that only a backward needs; visible ones may be among them
    weights     inputs whose gradients are fp32, added to `main_grad` where there is one
    accumulates inputs whose gradient the operator `backward` can add to another
    constant    inputs without a gradient
    forward_only  inputs and attributes that the operator `backward` does not have
    lead        rank of the first input without leading dimensions
    names       of tensors and attributes in the Python signature, where they differ
    new         (t, a) -> the outputs, uninitialised, by name
    keep        (t, a) -> the saved that are not outputs, likewise
    compute     (t, a, out) fills them; the name of an operator of the library runs that
    backward    (g, t, a, targets) -> gradients by input name; the name of an operator runs that.
                g holds the gradients of outputs (None: zeros), t inputs and saved together
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: str,
        outputs: str,
        new: Callable,
        keep: Callable | None = None,
        compute: str | Callable,
        backward: str | Callable | None = None,
        attributes: str = "",
        saved: str = "",
        weights: str = "",
        constant: str = "",
        forward_only: str = "",
        accumulates: str = "",
        lead: int = 0,
        names: dict[str, str] | None = None,
    ):
        self.name = name
        words = inputs.split()
        self.inputs = tuple(word.strip(".?") for word in words)
        self.optional = frozenset(word.strip(".?") for word in words if word.endswith("?"))
        self.leading = tuple(word.startswith("...") for word in words)
        self.lead = lead
        self.outputs = tuple(outputs.split())
        self.saved = tuple(saved.split())
        self.hidden = tuple(n for n in self.saved if n not in self.outputs)
        self.weights = frozenset(weights.split())
        self.constant = frozenset(constant.split())
        self.types = dict(word.split(":") for word in attributes.split())
        self.forward_only = frozenset(forward_only.split())
        self.accumulates = frozenset(accumulates.split())
        self.names = names or {}
        self.new, self.keep = new, keep
        self.compute = compute if callable(compute) else self._forward_of(compute)
        self.checked_by = None if callable(compute) else compute
        if isinstance(backward, str):
            backward = self._backward_of(backward)
        self.backward = backward
        self.differentiable = tuple(n for n in self.inputs if n not in self.constant)
        self._define()

    # --- calls ----------------------------------------------------------------------------------

    def __call__(self, *tensors, into=None, out=None, **attributes):
        """The outputs: one tensor, or a tuple of several.

        `into` is a GradAccumulator; `out` takes the only output, in place where it is an input.
        """
        first = tensors[0]
        if self.lead and isinstance(first, torch.Tensor) and first.dim() == self.lead:
            lifted = [
                t.unsqueeze(0) if leads and t is not None else t
                for t, leads in zip(tensors, self.leading)
            ]
            results = self._call(lifted, attributes, into, None if out is None else out.unsqueeze(0))
            if out is not None:
                return out
            if len(self.outputs) == 1:
                return results.squeeze(0)
            return tuple(result.squeeze(0) for result in results)
        return self._call(tensors, attributes, into, out)

    def _call(self, tensors, attributes, into, out):
        if traces(tensors[0]):
            return self._trace(tensors, attributes, into, out)
        try:
            if self.backward is not None and records(tensors):
                if out is not None:
                    raise UnsupportedError(
                        f"{self.name}: argument 'out': expected no gradients to be recorded, got an "
                        "input that requires them"
                    )
                return _Recorded.apply(self, attributes, into, *tensors)
            t = dict(zip(self.inputs, tensors))
            if out is not None:
                self.compute(t, attributes, {self.outputs[0]: out})
                return out
            return self.visible(self.made(t, attributes, False))
        except Error as error:
            raise self.renamed(error) from None

    def _trace(self, tensors, attributes, into, out):
        if into is not None:
            raise UnsupportedError(f"{self.name}: expected no grad_acc under torch.compile, got one")
        save = (records(tensors),) if self.hidden else ()
        results = self.overload(*tensors, *(attributes[n] for n in self.types), *save)
        if len(self.outputs) > 1:
            return tuple(results[: len(self.outputs)])
        result = results[0] if self.hidden else results
        return result if out is None else out.copy_(result)

    def visible(self, out):
        if len(self.outputs) == 1:
            return out[self.outputs[0]]
        return tuple([out[name] for name in self.outputs])

    def made(self, t, a, save) -> dict[str, torch.Tensor]:
        """All outputs by name, computed."""
        try:
            out = self.empty(t, a, save)
        except (IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            self.refuse(t, a, error)
        self.compute(t, a, out)
        return out

    def empty(self, t, a, save) -> dict[str, torch.Tensor]:
        """All outputs by name, uninitialised."""
        out = self.new(t, a)
        if save and self.keep is not None:
            out.update(self.keep(t, a))
        return out

    def refuse(self, t, a, error):
        """Lets the library say what is wrong with arguments that no output can be made for."""
        for name, tensor in t.items():
            if not isinstance(tensor, torch.Tensor) and (tensor is not None or name not in self.optional):
                got = "none" if tensor is None else type(tensor).__name__
                raise DTypeError(
                    f"{self.name}: tensor '{name}': expected a torch.Tensor, got {got}"
                ) from error
        if self.checked_by is not None:
            _call.run(self.checked_by, t, {}, a)
        raise error

    def renamed(self, error):
        """The same error with the names of the Python signature."""
        return _call.renamed(error, self.name, self.names)

    # --- default forward and backward -------------------------------------------------------------

    def _forward_of(self, op):
        hidden = self.hidden

        def compute(t, a, out):
            if hidden:
                a = {**a, "save": hidden[0] in out}
            _call.run(op, t, out, a)

        return compute

    def _backward_of(self, op):
        drop, weights = self.forward_only, self.weights
        adds = weights | self.accumulates

        def backward(g, t, a, targets):
            inputs = {f"grad_{name}": gradient for name, gradient in g.items()}
            outputs = {}
            for name in self.inputs:
                tensor = t[name]
                if name in self.constant:
                    continue
                if tensor is None:
                    continue
                target = targets.get(name)
                if target is not None and name in adds and _parameters.fits(target, tensor, name in weights):
                    inputs[f"grad_{name}_acc"] = outputs[f"grad_{name}"] = target
                elif name in self.weights:
                    outputs[f"grad_{name}"] = torch.empty(
                        tensor.shape, dtype=wide(tensor), device=tensor.device
                    )
                else:
                    outputs[f"grad_{name}"] = like(tensor)
            inputs.update((n, x) for n, x in t.items() if n not in drop)
            _call.run(op, inputs, outputs, {n: v for n, v in a.items() if n not in drop})
            return {n: outputs.get(f"grad_{n}") for n in self.differentiable}

        return backward

    def gradients(self, grads, t, a, targets=_parameters.NONE):
        """Gradients of the differentiable inputs in their own types, from those of the outputs."""
        given = dict(zip(self.outputs, grads))
        if all(gradient is None for gradient in grads):
            return {n: None if t[n] is None else torch.zeros_like(t[n]) for n in self.differentiable}
        got = self.backward(given, t, a, targets)
        for name in self.weights:
            gradient = got.get(name)
            if gradient is not None and gradient.dtype is not t[name].dtype and name not in targets:
                got[name] = gradient.to(t[name].dtype)
        return got

    # --- torch.ops.ehc ----------------------------------------------------------------------------

    def _define(self):
        tensors = [
            f"Tensor{'?' if name in self.optional else ''} {name}" for name in self.inputs
        ]
        scalars = [f"{kind} {name}" for name, kind in self.types.items()]
        flag = ["bool save"] if self.hidden else []
        made = self.outputs + self.hidden
        self._op(self.name, tensors + scalars + flag, len(made), self._traced, self._fake)
        self.overload = getattr(torch.ops.ehc, self.name).default
        if self.backward is None:
            return
        upstream = [f"Tensor? grad_{name}" for name in self.outputs]
        kept = [f"Tensor? {name}" for name in self.saved]
        self._op(
            f"{self.name}_backward",
            upstream + tensors + kept + scalars,
            len(self.differentiable),
            self._traced_backward,
            self._fake_backward,
        )
        self.backward_overload = getattr(torch.ops.ehc, f"{self.name}_backward").default
        torch.library.register_autograd(
            f"ehc::{self.name}", self._autograd, setup_context=self._context, lib=LIBRARY
        )
        torch.library.register_autograd(
            f"ehc::{self.name}_backward", self._twice, setup_context=_nothing, lib=LIBRARY
        )

    def _op(self, name, arguments, count, kernel, fake):
        result = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        LIBRARY.define(f"{name}({', '.join(arguments)}) -> {result}", tags=_TAGS)
        LIBRARY.impl(name, kernel, "CPU")
        LIBRARY.impl(name, kernel, "CUDA")
        torch.library.register_fake(f"ehc::{name}", fake, lib=LIBRARY)
        torch.library.register_vmap(f"ehc::{name}", _no_vmap(name), lib=LIBRARY)

    def _split(self, arguments):
        """Inputs and attributes by name, and whether to save."""
        count = len(self.inputs)
        t = dict(zip(self.inputs, arguments[:count]))
        a = dict(zip(self.types, arguments[count:]))
        return t, a, bool(self.hidden) and arguments[count + len(self.types)]

    def _traced(self, *arguments):
        t, a, save = self._split(arguments)
        try:
            return self._row(t, self.made(t, a, save))
        except Error as error:
            raise self.renamed(error) from None

    def _fake(self, *arguments):
        t, a, save = self._split(arguments)
        return self._row(t, self.empty(t, a, save))

    def _row(self, t, out):
        """The outputs in order; an empty tensor stands for one that was not asked for."""
        first = t[self.inputs[0]]
        row = tuple(
            out[n] if n in out else first.new_empty([0]) for n in self.outputs + self.hidden
        )
        return row if len(row) > 1 else row[0]

    def _context(self, ctx, inputs, output):
        t, a, save = self._split(inputs)
        ctx.attributes = a
        ctx.count = len(inputs)
        made = dict(zip(self.outputs + self.hidden, output if isinstance(output, tuple) else (output,)))
        ctx.set_materialize_grads(False)
        kept = (made[n] if save or not self.hidden else None for n in self.saved)
        ctx.save_for_backward(*t.values(), *kept)

    def _autograd(self, ctx, *grads):
        values = [ctx.attributes[n] for n in self.types]
        got = self.backward_overload(*grads[: len(self.outputs)], *ctx.saved_tensors, *values)
        got = dict(zip(self.differentiable, got if isinstance(got, tuple) else (got,)))
        saved = dict(zip(self.inputs, ctx.saved_tensors))
        row = [got[n] if n in got and saved[n] is not None else None for n in self.inputs]
        return (*row, *[None] * (ctx.count - len(row)))

    def _twice(self, ctx, *grads):
        raise _no_twice(self.name)

    def _split_backward(self, arguments):
        names = (*self.outputs, *self.inputs, *self.saved)
        g = arguments[: len(self.outputs)]
        t = dict(zip(names[len(g) :], arguments[len(g) :]))
        return g, t, dict(zip(self.types, arguments[len(names) :]))

    def _traced_backward(self, *arguments):
        g, t, a = self._split_backward(arguments)
        got = self.gradients(g, t, a)
        first = t[self.inputs[0]]
        row = tuple(
            first.new_empty([0]) if got.get(n) is None else got[n].contiguous()
            for n in self.differentiable
        )
        return row if len(row) > 1 else row[0]

    def _fake_backward(self, *arguments):
        _, t, _ = self._split_backward(arguments)
        first = t[self.inputs[0]]
        row = tuple(
            first.new_empty([0]) if t[n] is None else like(t[n]) for n in self.differentiable
        )
        return row if len(row) > 1 else row[0]


class _Recorded(torch.autograd.Function):
    """An operator in eager mode, recorded by autograd."""

    @staticmethod
    def forward(ctx, operator, attributes, into, *tensors):
        t = dict(zip(operator.inputs, tensors))
        out = operator.made(t, attributes, True)
        ctx.operator, ctx.attributes, ctx.into = operator, attributes, into
        ctx.parameters = _parameters.of(operator, t)
        ctx.save_for_backward(*tensors, *[out[name] for name in operator.saved])
        ctx.set_materialize_grads(False)
        return operator.visible(out)

    @staticmethod
    def backward(ctx, *grads):
        operator = ctx.operator
        t = dict(zip(operator.inputs + operator.saved, ctx.saved_tensors))
        with torch.no_grad():
            targets = _parameters.targets(ctx.parameters)
            also = targets if ctx.into is None else ctx.into.added_to(targets)
            try:
                got = operator.gradients(grads, t, ctx.attributes, also)
            except Error as error:
                raise operator.renamed(error) from None
            if targets:
                _parameters.hand_over(ctx.parameters, targets, got)
            if ctx.into is not None:
                ctx.into.take(got)
        row = [
            got.get(name) if wanted else None
            for name, wanted in zip(operator.inputs, ctx.needs_input_grad[3:])
        ]
        return (None, None, None, *(once(operator.name, row) if torch.is_grad_enabled() else row))


class _Once(torch.autograd.Function):
    """Passes gradients on under create_graph, and refuses to be differentiated itself."""

    @staticmethod
    def forward(ctx, name, *gradients):
        ctx.name = name
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx, *grads):
        raise _no_twice(ctx.name)


def once(name, gradients):
    there = [g.requires_grad_() for g in gradients if g is not None]
    if not there:
        return gradients
    passed = iter(_Once.apply(name, *there))
    return [None if g is None else next(passed) for g in gradients]


def _no_twice(name):
    return UnsupportedError(f"{name}: expected to be differentiated once, got a double backward")


def _no_vmap(name):
    def refuse(info, dims, *arguments):
        raise UnsupportedError(
            f"{name}: expected no vmap, got one; hint: leading dimensions are free, pass them all at once"
        )

    return refuse


def _nothing(ctx, inputs, output):
    pass
