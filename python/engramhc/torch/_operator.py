"""An operator as torch sees it: eager autograd, and `torch.ops.ehc.<name>` for everything that traces.

Eager calls go straight to the library. Under torch.compile, in a dispatch mode or a functorch
transform the same call goes through the dispatcher, where it has a fake kernel and an autograd
formula. Both run the same `new`, `compute` and `backward`, so their bits are the same.
"""

from __future__ import annotations

from typing import Callable

import torch

from engramhc._arrays import dtype_of
from engramhc.errors import DTypeError, Error, ShapeError, UnsupportedError

from . import _call, _parameters
from ._parameters import fits

LIBRARY = torch.library.Library("ehc", "DEF")
KEPT_FROM = 4096  # elements of the first input; with fewer, making again is cheaper than memory
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TAGS = (torch.Tag.pt2_compliant_tag,)


_stack_depth = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


def traces(tensor) -> bool:
    """Whether a call must go through the dispatcher, or is not one on a tensor at all."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in _PLAIN
        or _stack_depth() > 0
        or _transform() is not None
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


def _layout(tensor):
    """Type and sizes of a traced tensor, None for a size without a value."""
    if tensor is None:
        return None
    sizes = (s if isinstance(s, int) else s.node.hint for s in tensor.shape)
    return (dtype_of(tensor), *sizes)


def _nothing(*arguments) -> tuple:
    return ()


class Operator:
    """One differentiable function.

    inputs      names of tensors, in order; "?" behind one that may be None, "..." before one with
                leading dimensions T (all of these lose and regain a leading dimension together)
    attributes  "name:type" with the types of a torch schema
    outputs     names of the tensors that callers get
    hidden      names of outputs that only a backward needs
    saved       names of the outputs that it needs too
    weights     inputs whose gradients are fp32, added to `main_grad` where there is one
    accumulates inputs whose gradient the operator `backward` can add to another
    constant    inputs without a gradient
    forward_only  inputs and attributes that the operator `backward` does not have
    inplace     attributes that follow the others where the output is an input
    lead        rank of the first input without leading dimensions
    names       of tensors and attributes in the Python signature, where they differ
    new         (*inputs, *attributes) -> the outputs, uninitialised, in order
    keep        (*inputs, *attributes) -> the hidden ones likewise
    compute     (t, a, out) fills the outputs, all by name; or the name of an operator of the library
                whose inputs, attributes and outputs with the hidden ones are in the same order
    backward    (g, t, a, targets) -> gradients by input name; or the name of an operator. g holds the
                gradients of outputs (None: zeros), t inputs, hidden and saved together
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: str,
        outputs: str,
        new: Callable,
        keep: Callable = _nothing,
        compute: str | Callable,
        backward: str | Callable | None = None,
        attributes: str = "",
        hidden: str = "",
        saved: str = "",
        weights: str = "",
        constant: str = "",
        forward_only: str = "",
        accumulates: str = "",
        inplace: tuple = (),
        lead: int = 0,
        names: dict[str, str] | None = None,
    ):
        self.name = name
        words = inputs.split()
        self.inputs = tuple(word.strip(".?") for word in words)
        self.optional = frozenset(word.strip(".?") for word in words if word.endswith("?"))
        self.leading = tuple(word.startswith("...") for word in words)
        self.lead, self.inplace = lead, inplace
        self.outputs = tuple(outputs.split())
        self.hidden = tuple(hidden.split())
        self.saved = tuple(saved.split())
        self.is_single = len(self.outputs) == 1
        self.weights = frozenset(weights.split())
        self.weight_names = tuple(name for name in self.inputs if name in self.weights)
        self.weight_positions = tuple(map(self.inputs.index, self.weight_names))
        self.constant = frozenset(constant.split())
        self.types = dict(word.split(":") for word in attributes.split())
        self.forward_only = frozenset(forward_only.split())
        self.accumulates = frozenset(accumulates.split())
        self.names = names or {}
        self.new, self.keep = new, keep
        self.forward = compute if isinstance(compute, str) else None
        self.compute = compute
        if isinstance(backward, str):
            backward = self._backward_of(backward)
        self.backward = backward
        self.differentiable = tuple(n for n in self.inputs if n not in self.constant)
        self.kept_names = self.inputs + self.hidden + self.saved
        self.also = tuple(self.outputs.index(name) for name in self.saved)
        self.absent = (None,) * len(self.hidden)
        self.absent_also = (None,) * len(self.saved)
        self._define()

    # --- calls ----------------------------------------------------------------------------------

    def __call__(self, tensors, values=(), into=None, out=None, kept=None):
        """The outputs: one tensor, or a tuple of several.

        `values` are the attributes in order. `into` is a GradAccumulator; `out` takes the only output,
        in place where it is an input. A list `kept` gets the hidden outputs of a recorded call.
        """
        first = tensors[0]
        if traces(first):
            return self._trace(tensors, values, into, out)
        if self.lead and first.dim() == self.lead:
            return self._lifted(tensors, values, into, out, kept)
        try:
            if self.backward is not None and records(tensors):
                if out is not None:
                    raise UnsupportedError(
                        f"{self.name}: argument 'out': expected no gradients to be recorded, got an "
                        "input that requires them"
                    )
                return _record(self, values, into, kept, *tensors)
            if out is not None:
                if self.inplace and any(out is tensor for tensor in tensors):
                    values = (*values, *self.inplace)
                self.fill(tensors, values, (out,), self.absent)
                return out
            made = self.empty(self.new, tensors, values)
            self.fill(tensors, values, made, self.absent)
            return made[0] if self.is_single else made
        except Error as error:
            raise self.renamed(error) from None

    def _lifted(self, tensors, values, into, out, kept):
        """The same with one token more in front of what has leading dimensions."""
        lifted = tuple(
            t.unsqueeze(0) if leads and isinstance(t, torch.Tensor) else t
            for t, leads in zip(tensors, self.leading)
        )
        results = self(lifted, values, into, None if out is None else out.unsqueeze(0), kept)
        if kept:
            kept[:] = [hidden.squeeze(0) for hidden in kept]
        if out is not None:
            return out
        return results.squeeze(0) if self.is_single else tuple(r.squeeze(0) for r in results)

    def _trace(self, tensors, values, into, out):
        if not isinstance(tensors[0], torch.Tensor):
            self.refuse(tensors, values, None)
        if self.lead and tensors[0].dim() == self.lead:
            tensors = tuple(
                t.unsqueeze(0) if leads and t is not None else t
                for t, leads in zip(tensors, self.leading)
            )
            results = self._trace(tensors, values, into, None)
            results = results.squeeze(0) if self.is_single else tuple(r.squeeze(0) for r in results)
            return results if out is None else out.copy_(results)
        if into is not None:
            raise UnsupportedError(f"{self.name}: expected no grad_acc under torch.compile, got one")
        save = (records(tensors),) if self.hidden else ()
        results = self.overload(*tensors, *values, *save)
        if not self.is_single:
            return tuple(results[: len(self.outputs)])
        result = results[0] if self.hidden else results
        return result if out is None else out.copy_(result)

    def empty(self, function, tensors, values) -> tuple:
        """What `new` or `keep` makes. Where it cannot, the library says what is wrong."""
        try:
            return function(*tensors, *values)
        except (IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            self.refuse(tensors, values, error)

    def fill(self, tensors, values, made, kept) -> None:
        """Computes the outputs and, where they are there, the hidden ones."""
        if self.forward is not None:
            if self.hidden:
                values = (*values, kept is not self.absent)
            _call.fill(self.forward, tensors, values, made + kept)
            return
        out = dict(zip(self.outputs + self.hidden, made + kept))
        self.compute(dict(zip(self.inputs, tensors)), dict(zip(self.types, values)), out)

    def refuse(self, tensors, values, error):
        for name, tensor in zip(self.inputs, tensors):
            if not isinstance(tensor, torch.Tensor) and (tensor is not None or name not in self.optional):
                got = "none" if tensor is None else type(tensor).__name__
                name = self.names.get(name, name)
                raise DTypeError(
                    f"{self.name}: tensor '{name}': expected a torch.Tensor, got {got}"
                ) from error
        if self.forward is not None:
            try:
                _call.infer(self.forward, tensors, values)
            except Error as refusal:
                raise self.renamed(refusal) from error
        if isinstance(error, (IndexError, AttributeError)):
            shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(self.inputs, tensors) if t is not None)
            raise ShapeError(f"{self.name}: expected tensors of more dimensions, got {shapes}") from error
        raise error

    def renamed(self, error):
        """The same error with the names of the Python signature."""
        return _call.renamed(error, self.name, self.names)

    # --- backward ---------------------------------------------------------------------------------

    def _backward_of(self, op):
        drop, weights = self.forward_only, self.weights
        adds = weights | self.accumulates
        differentiated = tuple(n for n in self.inputs if n not in self.constant)

        def backward(g, t, a, targets):
            inputs = {f"grad_{name}": gradient for name, gradient in g.items()}
            outputs = {}
            for name in differentiated:
                tensor = t[name]
                if tensor is None:
                    continue
                target = targets.get(name)
                if target is not None and name in adds and fits(target, tensor, name in weights):
                    inputs[f"grad_{name}_acc"] = outputs[f"grad_{name}"] = target
                elif name in weights:
                    outputs[f"grad_{name}"] = torch.empty(
                        tensor.shape, dtype=wide(tensor), device=tensor.device
                    )
                else:
                    outputs[f"grad_{name}"] = like(tensor)
            inputs.update((n, x) for n, x in t.items() if n not in drop)
            _call.run(op, inputs, outputs, a)
            return {n: outputs.get(f"grad_{n}") for n in differentiated}

        return backward

    def gradients(self, grads, t, a, targets=_parameters.NONE):
        """Gradients of the differentiable inputs in their own types, from those of the outputs."""
        if all(gradient is None for gradient in grads):
            return {n: None if t[n] is None else torch.zeros_like(t[n]) for n in self.differentiable}
        got = self.backward(dict(zip(self.outputs, grads)), t, a, targets)
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
            torch.library.register_autograd(
                f"ehc::{self.name}", self._without_backward, setup_context=_no_context, lib=LIBRARY
            )
            return
        upstream = [f"Tensor? grad_{name}" for name in self.outputs]
        kept = [f"Tensor? {name}" for name in self.hidden + self.saved]
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
            f"ehc::{self.name}_backward", self._twice, setup_context=_no_context, lib=LIBRARY
        )

    def _op(self, name, arguments, count, kernel, fake):
        result = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        LIBRARY.define(f"{name}({', '.join(arguments)}) -> {result}", tags=_TAGS)
        LIBRARY.impl(name, kernel, "CPU")
        LIBRARY.impl(name, kernel, "CUDA")
        torch.library.register_fake(f"ehc::{name}", fake, lib=LIBRARY)
        torch.library.register_vmap(f"ehc::{name}", _no_vmap(name), lib=LIBRARY)

    def _split(self, arguments):
        """Inputs, attributes, and whether to save."""
        count, end = len(self.inputs), len(self.inputs) + len(self.types)
        return arguments[:count], arguments[count:end], bool(self.hidden) and arguments[end]

    def _traced(self, *arguments):
        tensors, values, save = self._split(arguments)
        try:
            made = self.empty(self.new, tensors, values)
            kept = self._apart(tensors, values) if save else self.absent
            self.fill(tensors, values, made, kept)
        except Error as error:
            raise self.renamed(error) from None
        return self._row(tensors, made, kept)

    def _fake(self, *arguments):
        tensors, values, save = self._split(arguments)
        self._check_traced(tensors, values)
        made = self.empty(self.new, tensors, values)
        kept = self._apart(tensors, values) if save else self.absent
        return self._row(tensors, made, kept)

    def _check_traced(self, tensors, values):
        """Lets the library check types and shapes before anything runs, sizes as they are this time."""
        if self.forward is None:
            return
        layouts = tuple(map(_layout, tensors))
        if any(None in layout for layout in layouts if layout is not None):
            return  # a size that nobody knows yet
        try:
            _call.infer(self.forward, layouts, values)
        except Error as error:
            raise self.renamed(error) from None

    def _apart(self, tensors, values):
        """The hidden outputs, each in memory of its own, as operators of torch have to."""
        return tuple(map(like, self.empty(self.keep, tensors, values)))

    @staticmethod
    def _row(tensors, made, kept):
        """The outputs in order; an empty tensor stands for one that was not asked for."""
        row = made + tuple(tensors[0].new_empty([0]) if k is None else k for k in kept)
        return row if len(row) > 1 else row[0]

    def _context(self, ctx, inputs, output):
        tensors, values, save = self._split(inputs)
        ctx.values, ctx.count = values, len(inputs)
        made = output if isinstance(output, tuple) else (output,)
        visible, kept = made[: len(self.outputs)], made[len(self.outputs) :]
        ctx.set_materialize_grads(False)
        if not save:
            kept = self.absent
        is_kept = save or not self.hidden
        also = (visible[position] if is_kept else None for position in self.also)
        ctx.save_for_backward(*tensors, *kept, *also)

    def _without_backward(self, ctx, *grads):
        raise UnsupportedError(f"{self.name}: expected no gradients to be asked for, got a backward")

    def _autograd(self, ctx, *grads):
        got = self.backward_overload(*grads[: len(self.outputs)], *ctx.saved_tensors, *ctx.values)
        got = dict(zip(self.differentiable, got if isinstance(got, tuple) else (got,)))
        saved = dict(zip(self.inputs, ctx.saved_tensors))
        row = [got[n] if n in got and saved[n] is not None else None for n in self.inputs]
        return (*row, *[None] * (ctx.count - len(row)))

    def _twice(self, ctx, *grads):
        raise _no_twice(self.name)

    def _split_backward(self, arguments):
        names = self.outputs + self.inputs + self.hidden + self.saved
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
    def forward(ctx, operator, values, into, keep, *tensors):
        made = operator.empty(operator.new, tensors, values)
        if keep is None and operator.hidden and tensors[0].numel() < KEPT_FROM:
            kept, also = operator.absent, operator.absent_also
        else:
            kept = operator.empty(operator.keep, tensors, values)
            also = [made[position] for position in operator.also]
        operator.fill(tensors, values, made, kept)
        if keep is not None:
            keep.extend(kept)
        ctx.operator, ctx.values, ctx.into = operator, values, into
        ctx.parameters = [tensors[position] for position in operator.weight_positions]
        ctx.save_for_backward(*tensors, *kept, *also)
        ctx.set_materialize_grads(False)
        return made[0] if operator.is_single else made

    @staticmethod
    def backward(ctx, *grads):
        operator = ctx.operator
        t = dict(zip(operator.kept_names, ctx.saved_tensors))
        a = dict(zip(operator.types, ctx.values))
        with torch.no_grad():
            parameters = dict(zip(operator.weight_names, ctx.parameters))
            targets = _parameters.targets(parameters)
            also = targets if ctx.into is None else ctx.into.added_to(targets)
            try:
                got = operator.gradients(grads, t, a, also)
            except Error as error:
                raise operator.renamed(error) from None
            if targets:
                _parameters.hand_over(parameters, targets, got)
            if ctx.into is not None:
                ctx.into.take(got)
        row = [
            got.get(name) if wanted else None
            for name, wanted in zip(operator.inputs, ctx.needs_input_grad[4:])
        ]
        return (None, None, None, None, *(once(operator.name, row) if torch.is_grad_enabled() else row))


# Function.apply without its support of functorch, in whose transforms no call comes here.
_record = super(torch.autograd.Function, _Recorded).apply


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


def _no_context(ctx, inputs, output):
    pass
