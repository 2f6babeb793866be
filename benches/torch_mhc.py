"""The operators of mHC as PyTorch writes them, for compare_torch.py."""

import torch

from comparison import STREAMS, backward, forward

EPS, REPEAT, POST_MULT = 1e-6, 20, 2.0
MIXES = STREAMS * (STREAMS + 2)
LAYERS = 10  # of a block that is recomputed
MAPS = 64  # of the Sinkhorn cases, for every token of the others

# --- PyTorch -------------------------------------------------------------------------------------


def torch_expand(hidden):
    return hidden.unsqueeze(1).expand(-1, STREAMS, -1).contiguous()


def torch_pre_apply(residual, pre):
    return (pre.unsqueeze(-1) * residual.float()).sum(1).to(residual.dtype)


def torch_post(layer_output, residual, post, comb):
    mixed = torch.einsum("tio,tid->tod", comb, residual.float())
    return (post.unsqueeze(-1) * layer_output.float().unsqueeze(1) + mixed).to(residual.dtype)


def torch_sinkhorn(comb_logits):
    y = torch.softmax(comb_logits, -1) + EPS
    y = y / (y.sum(-2, keepdim=True) + EPS)
    for _ in range(REPEAT - 1):
        y = y / (y.sum(-1, keepdim=True) + EPS)
        y = y / (y.sum(-2, keepdim=True) + EPS)
    return y


def torch_prenorm_gemm(residual, fn):
    x = residual.float().flatten(1)
    return x @ fn.T, x.square().sum(-1)


def torch_big_fuse(mul, sqr, scale, base, residual):
    columns = residual.shape[1] * residual.shape[2]
    mixes = mul * torch.rsqrt(sqr / columns + EPS).unsqueeze(-1)
    scales = scale.repeat_interleave(torch.tensor([STREAMS, STREAMS, STREAMS**2]), output_size=MIXES)
    u = mixes * scales + base
    pre = torch.sigmoid(u[:, :STREAMS]) + EPS
    post = POST_MULT * torch.sigmoid(u[:, STREAMS : 2 * STREAMS])
    comb = torch_sinkhorn(u[:, 2 * STREAMS :].unflatten(1, (STREAMS, STREAMS)))
    return post, comb, torch_pre_apply(residual, pre)


def torch_recompute(residual, pre, layer_output, post, comb):
    rows = []
    for layer in range(LAYERS):
        rows.append(torch_pre_apply(residual, pre[layer]))
        residual = torch_post(layer_output[layer], residual, post[layer], comb[layer])
        rows.append(residual)
    return tuple(rows)


# --- inputs --------------------------------------------------------------------------------------


def streams(tokens, width):
    return torch.randn(tokens, STREAMS, width).bfloat16()


def coefficients(*shape):
    return torch.rand(*shape) / STREAMS


def exit_inputs(tokens, width):
    return {
        "layer_output": torch.randn(tokens, width).bfloat16(),
        "residual": streams(tokens, width),
        "post": coefficients(tokens, STREAMS),
        "comb": coefficients(tokens, STREAMS, STREAMS),
    }


# --- comparisons ---------------------------------------------------------------------------------


def simple_forward(library, name, function, data, attributes, bytes_moved):
    ours, outputs = library.prepare(name, data, attributes)
    return forward(function, data, ours, outputs, bytes_moved)


def simple_backward(library, name, function, data, upstream, more, attributes, bytes_moved):
    """`more`: the inputs that the backward reads."""
    ours, outputs = library.prepare(name, {**upstream, **more}, attributes)
    gradients = {x: outputs[f"grad_{x}"] for x in data}
    return backward(function, data, list(upstream.values()), ours, gradients, bytes_moved)


def expand_fwd(library, tokens, width):
    data = {"hidden": torch.randn(tokens, width).bfloat16()}
    moved = 2 * (1 + STREAMS) * width * tokens
    return simple_forward(library, "mhc.expand_fwd", torch_expand, data, {"n": STREAMS}, moved)


def expand_bwd(library, tokens, width):
    data = {"hidden": torch.randn(tokens, width).bfloat16()}
    upstream = {"grad_residual": streams(tokens, width)}
    moved = 2 * (1 + STREAMS) * width * tokens
    return simple_backward(library, "mhc.expand_bwd", torch_expand, data, upstream, {}, {}, moved)


def pre_apply_inputs(tokens, width):
    return {"residual": streams(tokens, width), "pre": coefficients(tokens, STREAMS)}


def pre_apply_fwd(library, tokens, width):
    data = pre_apply_inputs(tokens, width)
    moved = ((2 * STREAMS + 2) * width + 4 * STREAMS) * tokens
    return simple_forward(library, "mhc.pre_apply_fwd", torch_pre_apply, data, {}, moved)


def pre_apply_bwd(library, tokens, width):
    data = pre_apply_inputs(tokens, width)
    upstream = {"grad_layer_input": torch.randn(tokens, width).bfloat16()}
    moved = ((4 * STREAMS + 2) * width + 8 * STREAMS) * tokens
    return simple_backward(
        library, "mhc.pre_apply_bwd", torch_pre_apply, data, upstream, data, {}, moved
    )


def post_fwd(library, tokens, width):
    data = exit_inputs(tokens, width)
    moved = ((4 * STREAMS + 2) * width + 4 * STREAMS * (STREAMS + 1)) * tokens
    return simple_forward(library, "mhc.post_fwd", torch_post, data, {}, moved)


def post_bwd(library, tokens, width):
    data = exit_inputs(tokens, width)
    upstream = {"grad_new_residual": streams(tokens, width)}
    moved = ((6 * STREAMS + 4) * width + 8 * STREAMS * (STREAMS + 1)) * tokens
    return simple_backward(library, "mhc.post_bwd", torch_post, data, upstream, data, {}, moved)


def big_fuse(library, tokens, width):
    columns = STREAMS * width
    data = {
        "mul": torch.randn(tokens, MIXES) * columns**0.5,
        "sqr": columns * (0.5 + torch.rand(tokens)),
        "scale": torch.ones(3),
        "base": torch.randn(MIXES),
        "residual": streams(tokens, width),
    }
    named = {x: t for x, t in data.items() if x not in ("mul", "sqr")}
    named |= {f"{x}_partial": data[x].unsqueeze(0) for x in ("mul", "sqr")}
    rules = {"norm_eps": EPS, "pre_eps": EPS, "post_mult": POST_MULT, "repeat": REPEAT}
    ours, made = library.prepare("mhc.pre_big_fuse", named, {**rules, "sinkhorn_eps": EPS})
    outputs = {x: made[x] for x in ("post", "comb", "layer_input")}
    small = 4 * (MIXES + 1) + 4 * STREAMS * (STREAMS + 1)
    moved = ((2 * STREAMS + 2) * width + small) * tokens
    return forward(torch_big_fuse, data, ours, outputs, moved)


def recompute(library, tokens, width):
    tokens = tokens // 4 or 1
    data = {"residual": streams(tokens, width)}
    data |= {"pre": [coefficients(tokens, STREAMS) for _ in range(LAYERS)]}
    layers = [exit_inputs(tokens, width) for _ in range(LAYERS)]
    for name in ("layer_output", "post", "comb"):
        data[name] = [layer[name] for layer in layers]
    named = {"residual": data["residual"]}
    for name, tensors in data.items():
        if isinstance(tensors, list):
            named |= {f"{name}.{layer}": t for layer, t in enumerate(tensors)}
    ours, made = library.prepare("mhc.multilayer_recompute", named, {}, list_length=LAYERS)
    names = [f"{x}.{layer}" for layer in range(LAYERS) for x in ("layer_input", "new_residual")]
    moved = 2 * STREAMS * width + LAYERS * (
        4 * STREAMS + 2 * width + (2 + 2 * STREAMS) * width + 4 * STREAMS * (STREAMS + 1)
    )
    return forward(torch_recompute, data, ours, {x: made[x] for x in names}, moved * tokens)


def prenorm_gemm(library, tokens, width):
    data = {
        "residual": streams(tokens, width),
        "fn": torch.randn(MIXES, STREAMS * width) * (STREAMS * width) ** -0.5,
    }
    ours, made = library.prepare("mhc.prenorm_gemm", data, {"splits": 1})
    outputs = {x: made[f"{x}_partial"][0] for x in ("mul", "sqr")}
    moved = (2 * STREAMS * width + 4 * (MIXES + 1)) * tokens
    return forward(torch_prenorm_gemm, data, ours, outputs, moved)


def sinkhorn_inputs(tokens):
    return {"comb_logits": torch.randn(MAPS * tokens, STREAMS, STREAMS)}


SINKHORN = {"repeat": REPEAT, "eps": EPS}


def sinkhorn_fwd(library, tokens, _width):
    data = sinkhorn_inputs(tokens)
    moved = 8 * STREAMS**2 * MAPS * tokens
    return simple_forward(library, "mhc.sinkhorn_fwd", torch_sinkhorn, data, SINKHORN, moved)


def sinkhorn_bwd(library, tokens, _width):
    data = sinkhorn_inputs(tokens)
    upstream = {"grad_comb": torch.randn_like(data["comb_logits"])}
    moved = 12 * STREAMS**2 * MAPS * tokens
    return simple_backward(
        library, "mhc.sinkhorn_bwd", torch_sinkhorn, data, upstream, data, SINKHORN, moved
    )


COMPARISONS = {
    "mhc.expand_fwd": expand_fwd,
    "mhc.expand_bwd": expand_bwd,
    "mhc.pre_apply_fwd": pre_apply_fwd,
    "mhc.pre_apply_bwd": pre_apply_bwd,
    "mhc.post_fwd": post_fwd,
    "mhc.post_bwd": post_bwd,
    "mhc.pre_big_fuse": big_fuse,
    "mhc.multilayer_recompute": recompute,
    "mhc.prenorm_gemm": prenorm_gemm,
    "mhc.sinkhorn_fwd": sinkhorn_fwd,
    "mhc.sinkhorn_bwd": sinkhorn_bwd,
}
