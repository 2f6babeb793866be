"""What `engramhc.ops` refuses, and in which words."""

import importlib.util

import engramhc
import numpy as np
import pytest
from engramhc import ops

HAS_TORCH = importlib.util.find_spec("torch") is not None
T, N, D = 3, 4, 64


@pytest.fixture(params=["numpy"] + ["torch"] * HAS_TORCH)
def framework(request):
    return request.param


def array(framework, *shape, dtype="float32"):
    made = np.ones(shape, dtype)
    if framework == "numpy":
        return made
    import torch

    return torch.from_numpy(made)


def post_arguments(framework, **changed):
    made = {
        "layer_output": array(framework, T, D),
        "residual": array(framework, T, N, D),
        "post": array(framework, T, N),
        "comb": array(framework, T, N, N),
    }
    return {**made, **changed}


def refused(error, text, function, *arguments, **keywords):
    with pytest.raises(error) as caught:
        function(*arguments, **keywords)
    assert str(caught.value) == text
    assert isinstance(caught.value, engramhc.Error)


SHAPES = [
    ("residual", (T, 9, D), "n in [1,8], got F32[3,9,64]"),
    ("residual", (T, N, D + 1), "F32[3,4,64], got F32[3,4,65]"),
    ("residual", (T, D), "A[T,n,d], got F32[3,64]"),
    ("post", (T, N - 1), "F32[3,4], got F32[3,3]"),
    ("post", (T + 1, N), "F32[3,4], got F32[4,4]"),
    ("comb", (T, N), "F32[3,4,4], got F32[3,4]; hint: comb is [input stream, output stream]"),
    ("comb", (T, N, N + 1), "F32[3,4,4], got F32[3,4,5]; hint: comb is [input stream, output stream]"),
]


@pytest.mark.parametrize(("name", "shape", "text"), SHAPES)
def test_shapes(framework, name, shape, text):
    arguments = post_arguments(framework, **{name: array(framework, *shape)})
    with pytest.raises(engramhc.ShapeError) as caught:
        ops.mhc_post_fwd(**arguments)
    assert str(caught.value).startswith(f"mhc_post_fwd: tensor '{name}': expected ")
    if not text.startswith("A["):  # which of the two ranks is wrong is not said
        assert str(caught.value).endswith(text)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["layer_output", "residual", "post", "comb"])
def test_double_precision(framework, name):
    arguments = post_arguments(framework)
    shape = ",".join(map(str, arguments[name].shape))
    arguments[name] = array(framework, *arguments[name].shape, dtype="float64")
    with pytest.raises(engramhc.DTypeError) as caught:
        ops.mhc_post_fwd(**arguments)
    types = "F32" if name in ("post", "comb") else "F32, F16 or BF16"
    assert str(caught.value) == (
        f"mhc_post_fwd: tensor '{name}': expected {types}, got F64[{shape}]; hint: convert to float32"
    )
    assert isinstance(caught.value, TypeError)


def test_types(framework):
    refused(
        engramhc.DTypeError,
        "mhc_post_fwd: tensor 'post': expected F32[3,4], got I32[3,4]",
        ops.mhc_post_fwd,
        **post_arguments(framework, post=array(framework, T, N, dtype="int32")),
    )
    refused(
        engramhc.DTypeError,
        "mhc_post_fwd: tensor 'post': expected F32, got I16[3,4]",
        ops.mhc_post_fwd,
        **post_arguments(framework, post=array(framework, T, N, dtype="int16")),
    )


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (1.0, "a float"),
        (7, "an integer"),
        (True, "True"),
        ("post", "a string"),
        ([1.0, 2.0], "a sequence"),
        (object(), "an object that is neither array nor number"),
    ],
)
def test_no_arrays(framework, value, got):
    refused(
        engramhc.DTypeError,
        f"mhc_post_fwd: tensor 'post': expected an array, got {got}",
        ops.mhc_post_fwd,
        **post_arguments(framework, post=value),
    )


def test_nothing_where_something_is_needed(framework):
    for name in ("layer_output", "residual", "post"):
        with pytest.raises(engramhc.DTypeError, match=f"mhc_post_fwd: tensor '{name}': expected .*, got none"):
            ops.mhc_post_fwd(**post_arguments(framework, **{name: None}))


def test_strides(framework):
    wide = array(framework, T, N, 2 * D)
    refused(
        engramhc.ShapeError,
        "mhc_post_fwd: tensor 'residual': expected stride 1 in the last dimension, got 2; "
        "hint: pass a contiguous copy",
        ops.mhc_post_fwd,
        **post_arguments(framework, residual=wide[..., ::2]),
    )
    arguments = post_arguments(framework, residual=wide[..., :D])  # rows apart are fine
    assert tuple(ops.mhc_post_fwd(**arguments).shape) == (T, N, D)


def test_memory_that_is_shared(framework):
    arguments = post_arguments(framework)
    refused(
        engramhc.AliasError,
        "mhc_post_fwd: tensor 'out': expected memory apart from 'residual' without 'inplace', "
        "got overlapping memory",
        ops.mhc_post_fwd,
        **arguments,
        out=arguments["residual"],
    )
    buffer = array(framework, T + 1, N, D)
    refused(
        engramhc.AliasError,
        "mhc_post_fwd: tensor 'out': expected memory apart from 'residual' or exactly the same view, "
        "got overlapping memory",
        ops.mhc_post_fwd,
        **{**arguments, "residual": buffer[:T]},
        out=buffer[1:],
    )


def test_outputs_of_the_wrong_kind(framework):
    arguments = post_arguments(framework)
    refused(
        engramhc.ShapeError,
        "mhc_post_fwd: tensor 'out': expected F32[3,4,64], got F32[3,4,63]",
        ops.mhc_post_fwd,
        **arguments,
        out=array(framework, T, N, D - 1),
    )
    refused(
        engramhc.DTypeError,
        "mhc_post_fwd: tensor 'out': expected F32[3,4,64], got F16[3,4,64]",
        ops.mhc_post_fwd,
        **arguments,
        out=array(framework, T, N, D, dtype="float16"),
    )


def test_nothing_is_written_by_a_refused_call(framework):
    out = array(framework, T, N, D) * 7
    with pytest.raises(engramhc.ShapeError):
        ops.mhc_post_fwd(**post_arguments(framework, comb=array(framework, T, N)), out=out)
    assert bool((out == 7).all())


def test_read_only_arrays():
    frozen = np.ones((T, N), np.float32)
    frozen.flags.writeable = False
    refused(
        engramhc.DTypeError,
        "mhc_post_fwd: tensor 'post': expected a writable array, got a read-only one; hint: pass a copy",
        ops.mhc_post_fwd,
        **post_arguments("numpy", post=frozen),
    )


def test_arrays_that_dlpack_cannot_describe():
    with pytest.raises(engramhc.DTypeError, match="mhc_post_fwd: DLPack only supports native byte order"):
        ops.mhc_post_fwd(**post_arguments("numpy", post=np.ones((T, N), ">f4")))
    refused(
        engramhc.DTypeError,
        "mhc_post_fwd: tensor 'post': expected an array of numbers, got NumPy's <U1",
        ops.mhc_post_fwd,
        **post_arguments("numpy", post=np.full((T, N), "a")),
    )


def test_memory_that_is_no_device_of_ours():
    torch = pytest.importorskip("torch")
    refused(
        engramhc.DeviceError,
        "mhc_post_fwd: tensor 'post': expected memory on cpu or cuda, got meta",
        ops.mhc_post_fwd,
        **post_arguments("torch", post=torch.ones(T, N, device="meta")),
    )


def test_mixed_devices():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    arguments = post_arguments("torch")
    for name in arguments:
        mixed = {**arguments, name: arguments[name].cuda()}
        with pytest.raises(engramhc.DeviceError, match="mhc_post_fwd: tensor '.*': expected memory on "):
            ops.mhc_post_fwd(**mixed)


def test_attributes(framework):
    logits = array(framework, T, N, N)
    cases = [
        ({"repeat": 0, "eps": 1e-6}, "attribute 'repeat': expected in [1,64], got 0"),
        ({"repeat": 2, "eps": -1.0}, "attribute 'eps': expected a finite number >= 0, got -1"),
        ({"repeat": 2, "eps": float("nan")}, "attribute 'eps': expected a finite number >= 0, got nan"),
        ({"repeat": 2.5, "eps": 1e-6}, "attribute 'repeat': expected an integer, got 2.5"),
        (
            {"repeat": 2, "eps": 1e-6, "convention": "rows"},
            "attribute 'convention': expected one of deepseek/megatron/log, got 'rows'",
        ),
        ({"repeat": "x", "eps": 1e-6}, "attribute 'repeat': expected an integer, got 'x'"),
    ]
    for attributes, text in cases:
        refused(engramhc.ArgumentError, f"sinkhorn_fwd: {text}", ops.sinkhorn_fwd, logits, **attributes)


def test_constants_are_never_guessed(framework):
    residual, fn = array(framework, T, N, D), array(framework, 24, N * D)
    scale, base = array(framework, 3), array(framework, 24)
    with pytest.raises(TypeError, match=r"mhc_pre\(\) needs the constant 'pre_eps': give it, or preset="):
        ops.mhc_pre(residual, fn, scale, base, rms_eps=1e-6, post_mult=2.0, sinkhorn_eps=1e-6, repeat=20)
    with pytest.raises(TypeError, match=r"mhc_pre\(\) got an unexpected keyword argument 'epsilon'"):
        ops.mhc_pre(residual, fn, scale, base, preset="train", epsilon=1.0)
    with pytest.raises(ValueError, match="preset: expected one of train, .*, got 'v9'"):
        ops.mhc_pre(residual, fn, scale, base, preset="v9")
    with pytest.raises(TypeError):  # of the signature
        ops.engram_gate_fwd(residual, array(framework, T, N + 1, D), array(framework, N, D), eps=1e-6)


def test_names_are_those_of_the_signature(framework):
    cases = [
        (ops.engram_gate_fwd, (array(framework, T, N, D), array(framework, T, N, D), array(framework, N, D)),
         {"eps": 1e-6, "clamp": 1e-6}, "engram_gate_fwd: tensor 'kv': expected F32[3,5,64], got F32[3,4,64]"),
        (ops.engram_gate_fwd, (array(framework, T, N, D), (array(framework, T, N, D), array(framework, T, N)),
                               array(framework, N, D)),
         {"eps": 1e-6, "clamp": 1e-6}, "engram_gate_fwd: tensor 'v': expected F32[3,64], got F32[3,4]"),
        (ops.engram_gather_fwd, (array(framework, 9, 8), array(framework, T, 2)), {},
         "engram_gather_fwd: tensor 'idx': expected I64/I32[T,C], got F32[3,2]"),
        (ops.expand_to_mhc_fwd, (array(framework, T, D), 9), {},
         "expand_to_mhc_fwd: attribute 'n': expected in [1,8], got 9"),
        (ops.mhc_head, (array(framework, T, N, D), array(framework, N, N * D), array(framework, 1), array(framework, N)),
         {"rms_eps": 0.0, "pre_eps": 0.0}, "mhc_head: attribute 'rms_eps': expected a finite number > 0, got 0"),
        (ops.mhc_multilayer_recompute,
         (array(framework, T, N, D), [array(framework, T, N)], [array(framework, T, D)], [array(framework, T, N)],
          [array(framework, T, N)]), {},
         "mhc_multilayer_recompute: tensor 'comb.0': expected F32[3,4,4], got F32[3,4]; "
         "hint: comb is [input stream, output stream]"),
    ]  # fmt: skip
    for function, arguments, keywords, text in cases:
        with pytest.raises(engramhc.Error) as caught:
            function(*arguments, **keywords)
        assert str(caught.value) == text


def test_beta_and_workspace(framework):
    fn, weight = array(framework, 24, 8), array(framework, 8)
    refused(
        engramhc.ArgumentError,
        "mhc_fn_normw_merge_bwd: attribute 'beta': expected 0 or 1, got 2",
        ops.mhc_fn_normw_merge_bwd, fn, weight, fn, beta=2,
    )  # fmt: skip
    residual, scale, base = array(framework, T, N, D), array(framework, 3), array(framework, 24)
    small = array(framework, 1, dtype="uint8")
    with pytest.raises(engramhc.ArgumentError, match="mhc_pre: workspace: expected at least .* bytes, got 1"):
        ops.mhc_pre(residual, array(framework, 24, N * D), scale, base, preset="train", workspace=small)
    with pytest.raises(engramhc.ArgumentError, match=r"mhc_post_fwd: .*expected U8\[bytes\]"):
        ops.mhc_post_fwd(**post_arguments(framework), workspace=array(framework, 8))


def test_implementations_that_are_not_there(framework):
    with engramhc.implementation("mhc.post_fwd", "cpu.none"):
        with pytest.raises(engramhc.UnsupportedError, match="mhc_post_fwd: implementation 'cpu.none': expected one of"):
            ops.mhc_post_fwd(**post_arguments(framework))
    ops.mhc_post_fwd(**post_arguments(framework))
    with pytest.raises(engramhc.ArgumentError, match="expected the name of an operator or a pattern, got 'mhc.pots'"):
        with engramhc.implementation("mhc.pots", "reference"):
            pass


def test_ids_that_have_no_place(framework):
    ids = array(framework, 3, dtype="int32") * 9
    with pytest.raises(engramhc.Error, match="engram_compress: tensor 'ids': expected .*, got 9"):
        ops.engram_compress(ids, array(framework, 4, dtype="int32"))
    assert [int(i) for i in ops.engram_compress(ids, array(framework, 4, dtype="int32"), check=False)] == [-1] * 3
