"""Constants of published mHC models: what an operator's arguments must be to compute what they do.

    ops.mhc_pre(residual, fn, scale, base, preset="train")
    ops.mhc_pre(residual, fn, scale, base, preset=dataclasses.replace(presets.train, repeat=10))
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

__all__ = [
    "MhcPreset", "deepseek_v4", "deepseek_v41", "find", "from_config", "glm5", "paper", "repo", "train",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MhcPreset:
    """Arguments of the mixes: RMS norm of the projection, split, Sinkhorn."""

    rms_eps: float = 1e-6
    post_mult: float = 2.0
    pre_eps: float = 1e-6
    sinkhorn_eps: float = 1e-6
    repeat: int = 20
    convention: str = "deepseek"  # or "megatron", "log"
    rms: str = "mean"  # 1 / sqrt(mean + eps); "norm": 1 / (|x| / sqrt(K) + eps), as in Megatron


train = MhcPreset()  # for new models
repo = MhcPreset(post_mult=1.0, repeat=10)  # of the public kernels' tests
# The mHC paper has no eps but that of its RMS norm: Sinkhorn in logarithms is finite without one.
paper = MhcPreset(rms_eps=1e-20, pre_eps=0.0, sinkhorn_eps=0.0, convention="log")
deepseek_v4 = MhcPreset()
deepseek_v41 = MhcPreset(rms_eps=1e-20)
glm5 = MhcPreset(rms_eps=1e-5)

_NAMED = {
    "train": train,
    "repo": repo,
    "paper": paper,
    "deepseek_v4": deepseek_v4,
    "deepseek_v41": deepseek_v41,
    "glm5": glm5,
}


def find(preset: str | MhcPreset) -> MhcPreset:
    """A preset by its name, or itself."""
    if isinstance(preset, str):
        if preset not in _NAMED:
            raise ValueError(f"preset: expected one of {', '.join(_NAMED)}, got '{preset}'")
        return _NAMED[preset]
    return preset


def from_config(config: Mapping[str, Any]) -> MhcPreset:
    """The preset of a model's config.json, read from `hc_eps` (of pre mixes and Sinkhorn),
    `hc_sinkhorn_iters` and `rms_norm_eps`, also below `text_config`."""
    fields = {**config, **config.get("text_config", {})}
    missing = [name for name in ("hc_eps", "hc_sinkhorn_iters", "rms_norm_eps") if name not in fields]
    if missing:
        raise ValueError(f"config: expected '{missing[0]}', got none")
    eps = float(fields["hc_eps"])
    return MhcPreset(
        rms_eps=float(fields["rms_norm_eps"]),
        post_mult=float(fields.get("hc_post_mult_value", 2.0)),
        pre_eps=eps,
        sinkhorn_eps=eps,
        repeat=int(fields["hc_sinkhorn_iters"]),
    )
