"""A sublayer of mHC on NumPy arrays, beside the float64 reference.

    python examples/python/numpy_only.py
"""

import numpy as np
from engramhc import ops, reference

T, N, D = 16, 4, 64
RULES = {"pre_eps": 1e-6, "post_mult": 2.0, "repeat": 20, "sinkhorn_eps": 1e-6}


def layer(x):
    return np.tanh(x)


def main():
    rng = np.random.default_rng(0)
    residual = rng.standard_normal((T, N, D), np.float32)
    fn = 0.02 * rng.standard_normal((N * N + 2 * N, N * D), np.float32)
    scale, base = np.ones(3, np.float32), np.zeros(N * N + 2 * N, np.float32)

    x, (post, comb) = ops.mhc_pre(residual, fn, scale, base, preset="train")
    new = ops.mhc_post_fwd(layer(x), residual, post, comb)

    inputs = {"residual": residual, "fn": fn, "scale": scale, "base": base}
    mixes = reference.run("mhc.pre_fwd", inputs, {"norm_eps": 1e-6, **RULES})
    inputs = {
        "layer_output": layer(mixes["layer_input"].data),
        "residual": residual,
        "post": mixes["post"].data,
        "comb": mixes["comb"].data,
    }
    exact = reference.run("mhc.post_fwd", inputs)["new_residual"].data
    print(f"sums of comb: rows {comb.sum(2).min():.6f} to {comb.sum(2).max():.6f}")
    print(f"largest difference from the reference: {np.abs(new - exact).max():.1e}")


if __name__ == "__main__":
    main()
