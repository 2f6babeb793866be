"""The optimizer of Engram tables: momentum, then an update whose rows and columns have equal norms."""

from __future__ import annotations

import torch

from engramhc.errors import DTypeError, Error, ShapeError

from . import _call


class EngramSinkhorn(torch.optim.Optimizer):
    """For tables [rows, hd] in fp32 or bf16, with dense or sparse gradients or a `main_grad`.

    Momentum is kept in the type of the parameter, or in `momentum_dtype`. Rows whose update is below
    `tau` times the mean, and columns of zeros, keep their weights. The formulas are those of
    engram.optimizer_step (docs/ops/engram.md).
    """

    def __init__(
        self,
        params,
        lr,
        *,
        beta=0.95,
        steps=5,
        tau=1e-3,
        gamma=0.18,
        nesterov=True,
        eps=1e-20,
        momentum_dtype=None,
    ):
        defaults = {
            "lr": lr,
            "beta": beta,
            "steps": steps,
            "tau": tau,
            "gamma": gamma,
            "nesterov": nesterov,
            "eps": eps,
            "momentum_dtype": momentum_dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() != 2:
                raise ShapeError(
                    f"EngramSinkhorn: argument 'params': expected tables [rows, hd], got {list(parameter.shape)}"
                )
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise DTypeError(
                    f"EngramSinkhorn: argument 'params': expected F32 or BF16, got {parameter.dtype}"
                )

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is not None:
                    self._update(parameter, gradient, group)
        return loss

    def _update(self, parameter, gradient, group):
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter, dtype=group["momentum_dtype"])
        momentum = state["momentum"]
        inputs = {"weight": parameter, "grad": gradient, "momentum": momentum}
        outputs = {"weight": parameter, "momentum": momentum}
        try:
            _call.run("engram.optimizer_step", inputs, outputs, {**group, "repeat": group["steps"]})
        except Error as error:
            raise _call.renamed(error, "EngramSinkhorn", {"repeat": "steps"}) from None

    def load_state_dict(self, state_dict):
        """Also of momenta whose type is not that of their parameter, which torch would convert."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        for name, parameter in zip(names, parameters):
            if name in state_dict["state"]:
                momentum = state_dict["state"][name]["momentum"]
                self.state[parameter]["momentum"] = momentum.to(parameter.device, copy=True)


def gradient_of(parameter):
    """The gradient to use: that in `main_grad` where there is one, dense."""
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient
