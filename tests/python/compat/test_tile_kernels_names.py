"""Every module and name that code written for `tile_kernels` 1.x and 2.x imports, and installation."""

import importlib
import inspect
import subprocess
import sys
import types

import pytest

pytest.importorskip("torch")

from engramhc import compat  # noqa: E402

NAMES = {
    "": "config utils engram mhc modeling torch testing rand get_num_sms get_device_num_sms set_num_sms get_device"
    " is_ascend get_pdl set_pdl get_deterministic_algorithms use_deterministic_algorithms get_num_vec_cores"
    " get_num_ai_cores get_num_cube_cores get_token_alignment set_token_alignment reset_runtime_config",
    "engram": "fused_weight engram_gate_fwd engram_gate_bwd grad_w_reduce engram_hash engram_sinkhorn_finalize"
    " engram_sinkhorn_momentum_update engram_sinkhorn_step engram_sinkhorn_step_reduce",
    "engram.engram_fused_weight_kernel": "fused_weight",
    "engram.engram_gate_kernel": "engram_gate_fwd engram_gate_bwd",
    "engram.engram_gate_fwd_kernel": "engram_gate_fwd",
    "engram.engram_gate_bwd_kernel": "engram_gate_bwd",
    "engram.engram_grad_w_reduce_kernel": "grad_w_reduce",
    "engram.engram_hash_kernel": "engram_hash",
    "engram.engram_sinkhorn_kernel": "engram_sinkhorn_step engram_sinkhorn_finalize",
    "mhc": "expand_to_mhc_fwd expand_to_mhc_bwd mhc_head_compute_mix_fwd mhc_head_compute_mix_bwd"
    " mhc_multilayer_recompute mhc_fn_normw_merge_fwd mhc_fn_normw_merge_bwd mhc_reduce_partials_and_rmsnorm_fwd"
    " mhc_reduce_partials_and_rmsnorm_bwd mhc_post_fwd mhc_post_bwd mhc_pre_apply_mix_fwd mhc_pre_apply_mix_bwd"
    " mhc_pre_big_fuse_fwd mhc_pre_split_mixes_fwd mhc_pre_split_mixes_bwd mhc_sinkhorn_fwd mhc_sinkhorn_bwd",
    "mhc.expand_kernel": "expand_to_mhc_fwd expand_to_mhc_bwd",
    "mhc.head_compute_mix_kernel": "mhc_head_compute_mix_fwd mhc_head_compute_mix_bwd",
    "mhc.multilayer_recompute_kernel": "mhc_multilayer_recompute",
    "mhc.norm_fn_kernel": "round_to_tf32 mhc_fn_normw_merge_fwd mhc_reduce_partials_and_rmsnorm_bwd",
    "mhc.post_kernel": "mhc_post_fwd mhc_post_bwd",
    "mhc.pre_apply_mix_kernel": "mhc_pre_apply_mix_fwd mhc_pre_apply_mix_bwd",
    "mhc.pre_big_fuse_kernel": "mhc_pre_big_fuse_fwd",
    "mhc.pre_split_mixes_kernel": "mhc_pre_split_mixes_fwd mhc_pre_split_mixes_bwd",
    "mhc.sinkhorn_kernel": "mhc_sinkhorn_fwd mhc_sinkhorn_bwd",
    "modeling": "engram mhc",
    "modeling.engram": "EngramGateFn engram_gate",
    "modeling.engram.engram_gate": "EngramGateFn engram_gate",
    "modeling.mhc": "expand_from_embedding mhc_pre mhc_head",
    "modeling.mhc.functional": "expand_from_embedding mhc_pre mhc_head",
    "modeling.mhc.ops": "expand_to_mhc mhc_head_compute_mix mhc_multilayer_recompute mhc_pre_norm_fn mhc_post"
    " mhc_post_fwd mhc_post_bwd mhc_pre_apply_mix mhc_pre_big_fuse mhc_pre_split_mixes sinkhorn_normalize",
    "modeling.mhc.ops.expand": "expand_to_mhc",
    "modeling.mhc.ops.head_compute_mix": "mhc_head_compute_mix",
    "modeling.mhc.ops.multilayer_recompute": "mhc_multilayer_recompute",
    "modeling.mhc.ops.norm_fn": "mhc_pre_norm_fn",
    "modeling.mhc.ops.post": "mhc_post",
    "modeling.mhc.ops.pre_apply_mix": "mhc_pre_apply_mix",
    "modeling.mhc.ops.pre_big_fuse": "mhc_pre_big_fuse",
    "modeling.mhc.ops.pre_split_mixes": "mhc_pre_split_mixes",
    "modeling.mhc.ops.sinkhorn": "sinkhorn_normalize",
    "config": "get_num_sms set_num_sms get_device_num_sms get_max_smem_per_sm get_device is_ascend",
    "utils": "ceil_div align is_power_of_two next_power_of_two dtype_to_str str_to_dtype",
    "rand": "randn randn_like set_seed",
    "torch": "make_offsets engram_hash_ref engram_gate_ref expand_to_mhc_ref sinkhorn_normalize_ref"
    " mhc_head_compute_mix_ref mhc_pre_split_mixes_ref mhc_pre_apply_mix_ref mhc_post_ref mhc_pre_norm_fn_ref"
    " mhc_pre_norm_fn_partials_ref engram_sinkhorn_momentum_update_ref engram_sinkhorn_step_ref"
    " engram_sinkhorn_finalize_ref",
    "torch.mhc": "expand_to_mhc_ref sinkhorn_normalize_ref mhc_post_ref",
    "torch.engram": "make_offsets engram_hash_ref engram_gate_ref",
    "testing": "numeric bench generator",
    "testing.numeric": "assert_equal calc_diff check_bias count_bytes",
    "testing.bench": "make_param_id make_param_key dtype_to_str",
    "testing.generator": "generate_num_tokens generate_hidden_sizes generate_num_sms get_test_level is_precompile"
    " generate_samples",
}


@pytest.fixture
def installed():
    compat.install()
    yield importlib.import_module("tile_kernels")
    compat.uninstall()
    assert "tile_kernels" not in sys.modules


@pytest.mark.parametrize("module", NAMES)
def test_names(installed, module):
    path = f"tile_kernels.{module}".rstrip(".")
    importlib.import_module(path)
    found = sys.modules[path]
    for name in NAMES[module].split():
        assert hasattr(found, name), name
    ours = importlib.import_module(f"engramhc.compat.{path}")
    assert ours is found or module == "modeling.engram.engram_gate"


def test_imports_as_users_write_them(installed):
    namespace = {}
    exec(
        "import tile_kernels\n"
        "from tile_kernels.config import get_num_sms\n"
        "from tile_kernels.engram import engram_gate_fwd, fused_weight\n"
        "from tile_kernels.modeling.engram import engram_gate\n"
        "from tile_kernels.modeling.mhc.functional import mhc_pre\n"
        "from tile_kernels.modeling.mhc.ops.post import mhc_post\n"
        "from tile_kernels.mhc.post_kernel import mhc_post_bwd\n"
        "from tile_kernels.torch.engram import engram_gate_ref\n"
        "from tile_kernels.testing.numeric import calc_diff\n",
        namespace,
    )
    assert callable(namespace["engram_gate"])
    assert namespace["mhc_post"] is namespace["tile_kernels"].modeling.mhc.ops.mhc_post


@pytest.mark.parametrize("name", ["moe", "quant", "transpose", "transform"])
def test_what_is_not_offered_says_so(installed, name):
    with pytest.raises(AttributeError, match=f"tile_kernels.{name}: not offered"):
        getattr(installed, name)


def test_a_foreign_package_is_left_alone_unless_forced(monkeypatch):
    foreign = types.ModuleType("tile_kernels")
    monkeypatch.setitem(sys.modules, "tile_kernels", foreign)
    with pytest.raises(ImportError, match="expected no module 'tile_kernels'"):
        compat.install()
    compat.uninstall()
    assert sys.modules["tile_kernels"] is foreign
    compat.install(force=True)
    assert sys.modules["tile_kernels"] is not foreign
    compat.uninstall()


def test_installation_is_repeatable(installed):
    compat.install()
    assert sys.modules["tile_kernels"] is installed
    with pytest.raises(ValueError, match="'precision': expected fp32 or tf32"):
        compat.install(precision="bf16")


def test_install_imports_nothing_before_it_is_called():
    code = (
        "import sys, engramhc.compat; assert 'torch' not in sys.modules and 'tile_kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_positions_are_those_of_tile_kernels(installed):
    for function, names in [
        (
            installed.modeling.mhc.ops.mhc_pre_big_fuse,
            "residual fn mhc_scale mhc_base rms_eps mhc_pre_eps"
            " mhc_sinkhorn_eps mhc_post_mult_value sinkhorn_repeat n_splits",
        ),
        (installed.modeling.mhc.ops.mhc_post, "x residual post_layer_mix comb_res_mix out"),
        (
            installed.modeling.mhc.ops.mhc_pre_norm_fn,
            "residual mhc_fn mhc_norm_weight mhc_norm_eps fuse_grad_acc n_splits",
        ),
        (
            installed.mhc.mhc_pre_big_fuse_fwd,
            "gemm_out_mul gemm_out_sqrsum mhc_scale mhc_base residual post_mix comb_mix"
            " layer_input rms_eps mhc_pre_eps mhc_sinkhorn_eps mhc_post_mult_value sinkhorn_repeat n_splits",
        ),
        (
            installed.mhc.mhc_pre_split_mixes_bwd,
            "pre_layer_mix_grad post_layer_mix_grad comb_res_mix_grad input_mixes"
            " post_layer_mix mhc_scale mhc_base input_mixes_grad mhc_scale_grad mhc_base_grad mhc_post_mult_value",
        ),
        (
            installed.mhc.mhc_head_compute_mix_bwd,
            "output_mix_grad input_mix mhc_scale mhc_base input_mix_grad"
            " mhc_scale_grad_partial mhc_base_grad_partial num_sms token_block_size",
        ),
    ]:
        assert list(inspect.signature(function).parameters) == names.split(), function
