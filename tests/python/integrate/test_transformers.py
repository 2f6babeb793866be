"""Whole models of the `transformers` package with its hyper-connections and with ours: logits,
gradients and greedy decoding. Tiny random models on the CPU."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24.0")

from engramhc.integrate.transformers import restore, swap_hyper_connections  # noqa: E402


def deepseek_v4():
    config = transformers.DeepseekV4Config(
        vocab_size=97,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        sliding_window=8,
        partial_rotary_factor=0.5,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        eos_token_id=None,
    )
    return transformers.DeepseekV4ForCausalLM(config), 7


def glm5_next():
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

    config = Glm5NextTextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=32,
        v_head_dim=16,
        qk_nope_head_dim=16,
        index_topk=4,
        index_head_dim=16,
        index_n_heads=2,
        index_kpool=2,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=["linear_attention", "indexed_attention", "indexed_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        indexer_types=["full", "full", "shared"],
        pad_token_id=0,
    )
    return Glm5NextTextModel(config), 6


def hy_v4():
    config = transformers.HYV4Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        index_topk=4,
        index_head_dim=32,
        index_n_heads=2,
        hc_magnitude=1.5,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.HYV4ForCausalLM(config), 7


def made(build):
    """A model whose hyper-connections do something: their own initialisation is nearly constant."""
    torch.manual_seed(5)
    model, count = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_hc." in name or "hc_head" in name:
                parameter.normal_(0.0, 0.3 if parameter.dim() > 1 else 0.7)
    return model.eval(), count


def outputs(model, ids):
    result = model(input_ids=ids, use_cache=False)
    return result.logits if "logits" in result else result.last_hidden_state


def gradients(model, ids):
    model.zero_grad()
    (outputs(model, ids) * torch.linspace(-1, 1, 97 if hasattr(model, "lm_head") else 64)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


FAMILIES = pytest.mark.parametrize("build", [deepseek_v4, glm5_next, hy_v4])


@FAMILIES
def test_logits_and_gradients(build):
    model, count = made(build)
    ids = torch.randint(1, 97, (2, 11))
    expected, expected_gradients = outputs(model, ids).detach(), gradients(model, ids)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    assert swap_hyper_connections(model) == count
    logits, found = outputs(model, ids).detach(), gradients(model, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert set(found) == set(expected_gradients)
    assert any("_hc.fn" in name for name in found)
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():  # some are cancellations to almost nothing
        allowed = 2e-4 * gradient.abs().max() + 1e-6 * largest
        assert (found[name] - gradient).abs().max() < allowed, name
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())

    restore(model)
    assert torch.equal(outputs(model, ids), expected)
    assert swap_hyper_connections(model) == count


@FAMILIES
def test_the_operators_are_ours(build, monkeypatch):
    """Every hyper-connection, head and post step goes through EngramHC."""
    from engramhc.integrate import transformers as adapter

    calls = []
    for name in ("mhc_pre", "mhc_pre_norm_fn", "mhc_post", "mhc_head"):
        function = getattr(adapter, name)
        counted = lambda *a, _name=name, _function=function, **k: calls.append(_name) or _function(*a, **k)  # noqa: E731
        monkeypatch.setattr(adapter, name, counted)
    model, count = made(build)
    swap_hyper_connections(model)
    outputs(model, torch.randint(1, 97, (1, 5)))
    assert calls.count("mhc_post") == 6
    assert len(calls) - 6 == count


@FAMILIES
def test_gradient_checkpointing(build):
    model, _ = made(build)
    ids = torch.randint(1, 97, (1, 7))
    swap_hyper_connections(model)
    expected = gradients(model, ids)
    model.train()
    model.gradient_checkpointing_enable()
    found = gradients(model, ids)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@FAMILIES
def test_bfloat16(build):
    """Theirs rounds comb and post to bf16, ours does not: close, not equal."""
    model, _ = made(build)
    model = model.to(torch.bfloat16)
    ids = torch.randint(1, 97, (1, 9))
    expected = outputs(model, ids).float()
    swap_hyper_connections(model)
    got = outputs(model, ids)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() < 0.05 * expected.norm()


def greedy(model, ids, steps=12):
    """Tokens one by one with a cache; the head of a text model alone is its embedding."""
    if hasattr(model, "lm_head"):
        return model.generate(ids, max_new_tokens=steps, do_sample=False, use_cache=True, pad_token_id=0)
    cache, last = None, ids
    for _ in range(steps):
        with torch.no_grad():
            result = model(input_ids=last, cache=cache, use_cache=True)
        cache = result.cache
        last = (result.last_hidden_state[:, -1] @ model.embed_tokens.weight.T).argmax(-1, keepdim=True)
        ids = torch.cat([ids, last], 1)
    return ids


@FAMILIES
def test_greedy_decoding(build):
    model, _ = made(build)
    ids = torch.randint(1, 97, (2, 6))
    expected = greedy(model, ids)
    assert expected.unique().numel() > 4  # not one token again and again
    swap_hyper_connections(model)
    assert torch.equal(greedy(model, ids), expected)


def test_other_models_are_left_alone():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    assert swap_hyper_connections(model) == 0
    restore(model)
