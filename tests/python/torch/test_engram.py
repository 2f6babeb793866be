"""Engram: addressing, modules and the optimizer of tables."""

import copy

import engramhc
import engramhc.torch as ehc
import numpy as np
import pytest
import torch
from engramhc import ops, reference
from engramhc.tables import HashLayout, Table
from support import same
from torch import nn

D, N, HD, HEADS = 12, 2, 4, 2


class Map:
    """A token map: ids of the tokenizer to fewer ids."""

    def __init__(self, vocab=50, size=20):
        self.table = (np.arange(vocab) * 7 % size).astype(np.int32)
        self.size = size

    def table_for(self, ids):
        return torch.from_numpy(self.table).to(ids.device)


def layout(vocab=20):
    return HashLayout.demo(vocab, layer_ids=(1, 3), sizes=(31, 37), heads=HEADS, pad_id=2)


def config(kind="demo", **changes):
    made = getattr(ehc.EngramConfig, kind)(Map(), D, N, layout=layout())
    return engramhc.presets.dataclasses.replace(made, **changes) if changes else made


def table(layer=1, dtype=torch.float32):
    torch.manual_seed(0)
    rows = layout().rows[layout().position(layer)]
    return ehc.EngramTable(rows, HD, dtype=dtype)


def shaken(module):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


IDS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))


# --- addressing -----------------------------------------------------------------------------------


def test_window_of_batches_and_pieces():
    ids = torch.randint(0, 9, (2, 7), dtype=torch.int32)
    whole = ehc.engram_window(ids, max_ngram=3, pad_id=1, blocking="slot")
    assert whole.shape == (2, 7, 3)
    for row in range(2):
        alone = ehc.engram_window(ids[row].long(), max_ngram=3, pad_id=1, blocking="slot")
        same(whole[row], alone)
    first = ids[:, :4]
    rest = ehc.engram_window(ids[:, 4:], max_ngram=3, pad_id=1, blocking="slot", history=first[:, -2:].long())
    same(whole[:, 4:], rest)


def test_hash_and_both_layouts():
    columns = layout().torch()
    window = torch.randint(0, 20, (2, 5, 3), dtype=torch.int32)
    mask = torch.rand(2, 5) > 0.7
    rows = ehc.engram_hash(window, *columns, mask)
    assert rows.shape == (2, 2, 5, 4) and rows.dtype is torch.int32
    same(ehc.engram_hash(window, *columns, mask, layout="tlc"), rows.permute(1, 2, 0, 3).contiguous())
    same(ehc.engram_hash(window, *columns, mask, out_dtype=torch.int64), rows.long())
    inputs = {
        "window": window.reshape(-1, 3).numpy(),
        **dict(zip(("multipliers", "vocab_sizes", "offsets"), layout().numpy())),
        "image_token_mask": mask.reshape(-1).numpy(),
    }
    expected = reference.run("engram.hash", inputs)["indices"].data
    np.testing.assert_array_equal(rows.reshape(2, -1, 4).numpy(), expected)


def test_hash_of_token_ids_is_its_parts():
    token_map, hashes = Map(), layout()
    rows = ehc.engram_hash_ids(IDS, token_map, hashes)
    compressed = torch.from_numpy(token_map.table)[IDS]
    window = ehc.engram_window(
        compressed, max_ngram=3, pad_id=hashes.compressed_pad(token_map), blocking=hashes.blocking
    )
    same(rows, ehc.engram_hash(window, *hashes.torch()))
    same(ehc.engram_hash_ids(IDS, token_map, hashes, layer=3), rows[1])
    with pytest.raises(engramhc.Error, match="layer"):
        ehc.engram_hash_ids(IDS, token_map, hashes, layer=2)


def test_integer_functions_compile():
    torch._dynamo.reset()
    columns = layout().torch()

    def rows(ids):
        window = ehc.engram_window(ids, max_ngram=3, pad_id=1, blocking="farther")
        return ehc.engram_hash(window, *columns)

    ids = torch.randint(0, 20, (2, 5), dtype=torch.int32)
    same(torch.compile(rows, backend="aot_eager", fullgraph=True)(ids), rows(ids))
    flat = ids.flatten()
    window = ehc.engram_window(flat, max_ngram=3, pad_id=1, blocking="slot")
    torch.library.opcheck(torch.ops.ehc.engram_window.default, (flat, None, None, None, 3, 1, -1, "slot"))
    torch.library.opcheck(torch.ops.ehc.engram_hash.default, (window, *columns, None, "I32", "LTC"))
    compress = torch.ops.ehc.engram_compress.default
    torch.library.opcheck(compress, (flat, torch.arange(20, dtype=torch.int32), True))


# --- convolution with a state -----------------------------------------------------------------------


def test_token_by_token_gives_the_bits_of_one_pass():
    v, weight, norm = torch.randn(2, 6, N, D), torch.randn(N, D, 3), torch.rand(N, D)
    whole = ehc.engram_short_conv(v, weight, norm, eps=1e-5, dilation=2)
    state = torch.zeros(2, 4, N, D)
    for t in range(6):
        step = ehc.engram_short_conv(v[:, t : t + 1], weight, norm, eps=1e-5, dilation=2, state=state)
        same(step, whole[:, t : t + 1])
    with pytest.raises(engramhc.UnsupportedError, match="state"):
        ehc.engram_short_conv(v.requires_grad_(), weight, norm, eps=1e-5, dilation=2, state=state)


def test_sequences_of_a_batch_do_not_meet():
    v, weight, norm = torch.randn(3, 5, N, D), torch.randn(N, D, 3), torch.rand(N, D)
    whole = ehc.engram_short_conv(v, weight, norm, eps=1e-5, dilation=1)
    packed = ehc.engram_short_conv(
        v.flatten(0, 1), weight, norm, eps=1e-5, dilation=1, cu_seqlens=torch.tensor([0, 5, 10, 15])
    )
    same(whole.flatten(0, 1), packed)
    same(whole[1], ehc.engram_short_conv(v[1], weight, norm, eps=1e-5, dilation=1))


# --- modules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["demo", "paper"])
def test_module_is_its_functions(kind):
    module = shaken(ehc.Engram(config(kind), table()))
    x = torch.randn(2, 9, N, D)
    rows = module.table(module.rows_of(IDS))
    kv = module.wkv(rows).view(2, 9, N + 1, D)
    expected = ehc.engram_layer(
        x, kv, module.q_weight, module.k_weight, module.conv_weight, module.conv_norm_weight,
        eps=config(kind).eps, clamp=1e-6, conv_eps=1e-5, dilation=3,
    )  # fmt: skip
    same(module(x, IDS).detach(), expected.detach())
    same(module(x, rows=rows).detach(), expected.detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(module(x, IDS).detach(), expected.detach())
    with pytest.raises(TypeError, match="either"):
        module(x)
    with pytest.raises(engramhc.ShapeError, match="rows"):
        module(x, rows=rows[:1])


def test_names_in_the_state_dict():
    names = set(ehc.Engram(config("demo"), table()).state_dict())
    assert names == {
        "wkv.weight", "wkv.bias", "q_weight", "k_weight", "conv_weight", "conv_norm_weight", "table.weight",
    }  # fmt: skip
    bare = {"conv_width": 0, "bias": False}
    assert set(ehc.Engram(config(**bare), torch.randn(200, HD)).state_dict()) == {"wkv.weight", "q_weight", "k_weight"}
    module = shaken(ehc.Engram(config(), table()))
    other = ehc.Engram(config(), table())
    other.load_state_dict(module.state_dict())
    x = torch.randn(2, 9, N, D)
    same(other(x, IDS).detach(), module(x, IDS).detach())


def test_deepseek_preset():
    fields = {
        "hidden_size": D, "hc_mult": N, "rms_norm_eps": 1e-20, "engram_layer_ids": [1], "engram_vocab_size": 30,
        "engram_n_heads": HEADS, "engram_max_ngram_size": 4, "engram_compressed_vocab_size": 20,
        "engram_pad_token_id": 2,
    }  # fmt: skip
    made = ehc.EngramConfig.deepseek_v41({"text_config": fields}, Map())
    assert (made.d, made.n, made.eps, made.bias, made.conv_width) == (D, N, 1e-20, False, 0)
    rows = made.layout.rows[0]
    module = ehc.Engram(made, ehc.EngramTable(rows, HD), layer=1)
    assert module.wkv.weight.shape == ((N + 1) * D, 6 * HD)
    x = torch.randn(2, 9, N, D)
    assert module(x, IDS).shape == x.shape


def test_image_tokens_pass_through():
    module = shaken(ehc.Engram(config(), table()))
    x, mask = torch.randn(2, 9, N, D), torch.rand(2, 9) > 0.5
    out = module(x, IDS, image_token_mask=mask)
    same(out[mask].detach(), x[mask])


def test_decoding_gives_the_bits_of_one_pass():
    module = shaken(ehc.Engram(config(), table()))
    x = torch.randn(2, 9, N, D)
    with torch.no_grad():
        whole = module(x, IDS)
        state = module.new_state(2)
        history = torch.full((2, 2), -1, dtype=torch.int32)
        compressed = torch.from_numpy(Map().table)[IDS].to(torch.int32)
        for t in range(9):
            step = module(x[:, t : t + 1], IDS[:, t : t + 1], state=state, history=history)
            torch.testing.assert_close(step, whole[:, t : t + 1], rtol=1e-6, atol=1e-6)
            history = torch.cat([history[:, 1:], compressed[:, t : t + 1]], 1)


def test_tables_of_the_package_and_tensors():
    weights = table().weight.detach().bfloat16()
    stored = Table.create(weights.shape[0], HD, format="bf16", placement="host")
    with stored:
        stored.store(0, weights)
        idx = torch.randint(-1, weights.shape[0], (3, 4), dtype=torch.int32)
        same(ehc.lookup(stored, idx), ehc.lookup(weights, idx))
        same(ehc.prefetch(stored, idx).wait(), ehc.lookup(weights, idx))
        module = ehc.Engram(config(), stored)
        twin = ehc.Engram(config(), weights)
        twin.load_state_dict(module.state_dict())
        x = torch.randn(2, 9, N, D)
        same(module(x, IDS).detach(), twin(x, IDS).detach())


def test_gradients_reach_the_rows_that_were_asked_for():
    module = shaken(ehc.Engram(config(), table()))
    module(torch.randn(2, 9, N, D), IDS).square().sum().backward()
    asked = set(module.rows_of(IDS).flatten().tolist())
    gradient = module.table.weight.grad.coalesce()
    assert set(gradient.indices()[0].tolist()) == asked
    assert all(p.grad is not None and p.grad.to_dense().any() for p in module.parameters())


# --- optimizer --------------------------------------------------------------------------------------


def gradients(rows=40, steps=4):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(rows, HD, generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_the_operator(dtype):
    parameter = nn.Parameter(torch.randn(40, HD).to(dtype))
    weight, momentum = parameter.detach().clone(), torch.zeros_like(parameter)
    optimizer = ehc.EngramSinkhorn([parameter], 0.1)
    for gradient in gradients():
        parameter.grad = gradient.to(dtype)
        optimizer.step()
        weight, momentum = ops.sinkhorn_opt_full(weight, gradient.to(dtype), momentum, lr=0.1, eps=1e-20)
        same(parameter.detach(), weight)
        same(optimizer.state[parameter]["momentum"], momentum.detach())


def test_sparse_dense_and_main_grad_are_the_same_step():
    found = []
    for kind in ("dense", "sparse", "main"):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(40, HD))
        optimizer = ehc.EngramSinkhorn([parameter], 0.1, momentum_dtype=torch.float32)
        gradient = torch.zeros(40, HD)
        gradient[[3, 7]] = torch.randn(2, HD)
        if kind == "main":
            parameter.main_grad = gradient
        else:
            parameter.grad = gradient.to_sparse(1) if kind == "sparse" else gradient
        optimizer.step()
        found.append(parameter.detach())
    same(found[0], found[1])
    same(found[0], found[2])


def test_rows_without_gradient_keep_their_weights():
    parameter = nn.Parameter(torch.randn(40, HD))
    before = parameter.detach().clone()
    parameter.grad = torch.zeros(40, HD)
    parameter.grad[[3, 7], 1:] = torch.randn(2, HD - 1)
    ehc.EngramSinkhorn([parameter], 0.1).step()
    changed = (parameter.detach() != before).any(1)
    assert changed.nonzero().flatten().tolist() == [3, 7]
    same(parameter.detach()[:, 0], before[:, 0])  # a column of zeros
    assert torch.isfinite(parameter).all()


@pytest.mark.parametrize("momentum_dtype", [None, torch.float32])
def test_state_dict_round_trip_is_bitwise(momentum_dtype):
    def fresh():
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(40, HD).bfloat16())
        return parameter, ehc.EngramSinkhorn([parameter], 0.1, momentum_dtype=momentum_dtype)

    one, optimizer = fresh()
    two, other = fresh()
    steps = gradients()
    for gradient in steps[:2]:
        one.grad = gradient.bfloat16()
        optimizer.step()
    with torch.no_grad():
        two.copy_(one)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    same(other.state[two]["momentum"], optimizer.state[one]["momentum"])
    for gradient in steps[2:]:
        one.grad = two.grad = gradient.bfloat16()
        optimizer.step()
        other.step()
    same(one.detach(), two.detach())


def test_refused_parameters():
    with pytest.raises(engramhc.ShapeError, match="params"):
        ehc.EngramSinkhorn([nn.Parameter(torch.zeros(3))], 0.1)
    with pytest.raises(engramhc.DTypeError, match="params"):
        ehc.EngramSinkhorn([nn.Parameter(torch.zeros(3, 4).half())], 0.1)
    parameter = nn.Parameter(torch.zeros(3, 4))
    parameter.grad = torch.ones(3, 4)
    with pytest.raises(engramhc.ArgumentError, match="EngramSinkhorn: attribute 'steps'"):
        ehc.EngramSinkhorn([parameter], 0.1, steps=0).step()
