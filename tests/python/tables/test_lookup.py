"""Rows of tables against the reference: formats, files, placements, prefetch."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engramhc.errors import DTypeError, ShapeError, TableError, UnsupportedError
from engramhc.reference import run
from engramhc.reference.dtypes import Tensor, encode
from engramhc.reference.files import save
from engramhc.tables import Table

torch = pytest.importorskip("torch")

ROWS, DIM = 301, 96
TYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
PLACEMENTS = ["file", "host"]


def table_tensors(format, rows=ROWS, dim=DIM, seed=3):
    """Tensors of a table as they stand in files, and the keyword arguments of the reference."""
    g = np.random.default_rng(seed)
    if format == "fp8":
        weight = g.integers(0, 256, (rows, dim), dtype=np.uint8)
        weight[(weight & 0x7F) == 0x7F] = 0x38  # the reference knows one NaN alone
        scale = g.integers(0, 255, (rows, dim // 32), dtype=np.uint8)
        return {"weight": Tensor("F8_E4M3", weight), "scale": Tensor("F8_E8M0", scale)}
    return {"weight": encode(g.standard_normal((rows, dim)), TYPES[format])}


def checkpoint(path, tensors, layer=1):
    save(path, {f"model.layers.{layer}.engram.embed.{name}": t for name, t in tensors.items()})
    return path


def expected_rows(tensors, idx, dtype="BF16"):
    """By the reference, as integers of the bits."""
    if "scale" in tensors:
        inputs = {**tensors, "indices": Tensor("I64", idx)}
        out = run("engram.gather_dequant", inputs, {"group": 32, "out_dtype": dtype})
    else:
        out = run(
            "engram.gather_fwd",
            {"table": tensors["weight"], "indices": Tensor("I64", idx)},
            {"out_dtype": dtype},
        )
    return bits(out["embedding"].data)


def bits(rows):
    if isinstance(rows, torch.Tensor):
        rows = rows.view(torch.int32 if rows.dtype == torch.float32 else torch.int16).numpy()
    return rows.view({2: np.uint16, 4: np.uint32}[rows.dtype.itemsize])


def indices(*shape, rows=ROWS, seed=5):
    idx = np.random.default_rng(seed).integers(-1, rows, shape)
    idx.flat[0] = -1
    return idx


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32", "fp8"])
def test_every_format_and_type(tmp_path, format, dtype, placement):
    tensors = table_tensors(format)
    path = checkpoint(tmp_path / "a.safetensors", tensors)
    idx = indices(17, 6)
    with Table.open(path, layer=1, placement=placement) as table:
        assert (table.rows, table.dim, table.format) == (ROWS, DIM, format)
        assert table.nbytes == sum(t.data.nbytes for t in tensors.values())
        rows = table.lookup(torch.from_numpy(idx), dtype=TORCH[dtype])
        assert (rows.dtype, rows.shape) == (TORCH[dtype], (17, 6 * DIM))
        np.testing.assert_array_equal(bits(rows), expected_rows(tensors, idx, dtype))
        assert not rows[0, :DIM].any()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_indices_of_any_shape_and_framework(tmp_path, placement):
    tensors = table_tensors("fp8")
    path = checkpoint(tmp_path / "a.safetensors", tensors)
    idx = indices(2, 5, 4)
    with Table.open(path, placement=placement) as table:
        expected = expected_rows(tensors, idx.reshape(10, 4), "F32").reshape(2, 5, 4 * DIM)
        for given in (idx, idx.astype(np.int32), idx.tolist(), np.asfortranarray(idx)):
            np.testing.assert_array_equal(bits(table.lookup(given, dtype="fp32")), expected)
        turned = torch.from_numpy(idx).transpose(0, 1).contiguous().transpose(0, 1)
        np.testing.assert_array_equal(bits(table.lookup(turned, dtype="fp32")), expected)
        assert table.lookup(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4 * DIM)
        assert table.lookup(torch.zeros(3, 0, dtype=torch.int64)).shape == (3, 0)
        assert table.lookup(torch.tensor([3])).shape == (DIM,)


def test_an_index_over_several_files(tmp_path):
    """Two layers in two files, weight and scale apart."""
    first, second = table_tensors("fp8", seed=1), table_tensors("fp8", rows=40, seed=2)
    name = "layers.{}.engram.embed.{}"
    save(
        tmp_path / "1.safetensors",
        {name.format(1, "weight"): first["weight"], name.format(14, "scale"): second["scale"]},
    )
    save(
        tmp_path / "2.safetensors",
        {name.format(1, "scale"): first["scale"], name.format(14, "weight"): second["weight"]},
    )
    weight_map = {
        name.format(layer, part): f"{file}.safetensors"
        for layer, part, file in [(1, "weight", 1), (14, "scale", 1), (1, "scale", 2), (14, "weight", 2)]
    }
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for placement in PLACEMENTS:
        for layer, tensors, rows in ((1, first, ROWS), (14, second, 40)):
            with Table.open(index, layer=layer, placement=placement) as table:
                idx = indices(9, 3, rows=rows)
                np.testing.assert_array_equal(
                    bits(table.lookup(torch.from_numpy(idx))), expected_rows(tensors, idx)
                )
    with pytest.raises(TableError, match=r"index.json': expected one table, got tables of layers \[1, 14\]"):
        Table.open(index)
    with pytest.raises(TableError, match="expected a table of layer 7"):
        Table.open(index, layer=7)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_shards_of_one_table(tmp_path, placement, dtype):
    """As Qwen cuts it; the tenth shard comes after the ninth."""
    sizes = [5, 0, 30, 1, 7, 12, 3, 3, 3, 3, 40]
    shards = [table_tensors("bf16", rows=n, seed=i)["weight"] for i, n in enumerate(sizes)]
    path = tmp_path / "a.safetensors"
    save(path, {f"model.layers.2.ple.ngram_embedding.shard_{i}": shard for i, shard in enumerate(shards)})
    whole = {"weight": Tensor("BF16", np.concatenate([shard.data for shard in shards]))}
    with Table.open(path, layer=2, placement=placement) as table:
        assert table.rows == sum(sizes)
        idx = indices(50, 4, rows=table.rows)
        rows = table.lookup(torch.from_numpy(idx), dtype=TORCH[dtype])
        np.testing.assert_array_equal(bits(rows), expected_rows(whole, idx, dtype))
        with pytest.raises(TableError, match="tensor 'idx': expected -1 or a row below 107, got 107"):
            table.lookup([[107]], dtype="fp32")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_raw_rows(tmp_path, format, placement):
    tensors = table_tensors(format)
    parts = [t.data.view(np.uint8).reshape(ROWS, -1) for t in tensors.values()]
    path = tmp_path / "rows.bin"
    path.write_bytes(np.concatenate(parts, axis=1).tobytes())  # scales behind the row's weights
    idx = indices(20, 4)
    with Table.open(path, format=f"{format}[{DIM}]", placement=placement) as table:
        assert (table.rows, table.dim) == (ROWS, DIM)
        np.testing.assert_array_equal(bits(table.lookup(torch.from_numpy(idx))), expected_rows(tensors, idx))
    with pytest.raises(TableError, match="rows.bin': expected rows of 10 bytes"):
        Table.open(path, format="bf16[5]")


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32", "fp8"])
def test_create_and_store(format):
    values = np.random.default_rng(1).standard_normal((7, 64)).astype(np.float32)
    with Table.create(9, 64, format=format, placement="host") as table:
        assert not table.lookup([[0, 8]], dtype="fp32").any()
        table.store(2, values)
        table.store(0, torch.from_numpy(values[:1]))
        rows = table.lookup(np.arange(9).reshape(9, 1), dtype="fp32")
        if format == "fp8":
            quantised = run("engram.quantize_rows", {"values": Tensor("F32", values)}, {})
            expected = run("engram.dequant_rows", quantised, {"out_dtype": "F32"})["values"].data
        else:
            expected = encode(values, TYPES[format]).decode().astype(np.float32)
        np.testing.assert_array_equal(rows[2:], expected)
        np.testing.assert_array_equal(rows[0], expected[0])
        assert not rows[1].any()
        with pytest.raises(ShapeError, match="expected rows of 64 within 0..9"):
            table.store(3, values)


def test_indices_without_a_row(tmp_path):
    tensors = table_tensors("bf16")
    with Table.open(checkpoint(tmp_path / "a.safetensors", tensors)) as table:
        for stray in (-2, ROWS, 2**40):
            idx = np.array([[0, stray], [5, -1]])
            for given in (idx, torch.from_numpy(idx)):
                with pytest.raises(
                    TableError,
                    match=f"a.safetensors': tensor 'idx': expected -1 or a row below {ROWS}, got {stray}",
                ):
                    table.lookup(given, dtype="fp32")
            rows = table.lookup(torch.from_numpy(idx), check=False)
            np.testing.assert_array_equal(bits(rows), expected_rows(tensors, np.array([[0, -1], [5, -1]])))
        assert table.stats()["out_of_range"] == 3


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_prefetch_gives_the_same_bits(tmp_path, placement):
    tensors = table_tensors("fp8")
    with Table.open(checkpoint(tmp_path / "a.safetensors", tensors), placement=placement) as table:
        batches = [torch.from_numpy(indices(40, 8, seed=i)) for i in range(20)]
        tickets = [table.prefetch(idx) for idx in batches]
        for idx, ticket in zip(batches, tickets):
            out = torch.empty(40, 8 * DIM, dtype=torch.bfloat16)
            assert ticket.wait(out=out) is out
            assert torch.equal(out.view(torch.int16), table.lookup(idx).view(torch.int16))
            assert torch.equal(ticket.wait().view(torch.int16), out.view(torch.int16))
        with pytest.raises(ShapeError, match="prefetch: tensor 'out'"):
            tickets[0].wait(out=torch.empty(1, dtype=torch.bfloat16))
        with pytest.raises(TableError, match="tensor 'idx': expected -1 or a row"):
            table.prefetch(torch.tensor([[ROWS]])).wait()
        stats = table.stats()
        assert (stats["lookups"], stats["prefetches"], stats["rows"]) == (20, 21, 2 * 20 * 320 + 1)


def test_a_fork_can_look_up(tmp_path):
    """As the workers of a data loader do, after lookups in the parent."""
    tensors = table_tensors("fp8")
    with Table.open(checkpoint(tmp_path / "a.safetensors", tensors)) as table:
        idx = indices(400, 8)
        table.prefetch(idx, dtype="fp32").wait()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rows = [table.lookup(idx, dtype="fp32"), table.prefetch(idx, dtype="fp32").wait()]
                expected = expected_rows(tensors, idx, "F32")
                status = 0 if all(np.array_equal(bits(r), expected) for r in rows) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_share_a_table(tmp_path):
    tensors = table_tensors("bf16")
    with Table.open(checkpoint(tmp_path / "a.safetensors", tensors)) as table:
        batches = [indices(200, 6, seed=seed) for seed in range(16)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda idx: table.lookup(idx, dtype="fp32"), batches))
        for idx, rows in zip(batches, found):
            np.testing.assert_array_equal(bits(rows), expected_rows(tensors, idx, "F32"))
        assert table.stats()["lookups"] == 16


def test_cancelled_and_closed(tmp_path):
    table = Table.open(checkpoint(tmp_path / "a.safetensors", table_tensors("bf16")))
    tickets = [table.prefetch(torch.from_numpy(indices(4000, 8))) for _ in range(50)]
    assert tickets[-1].cancel()
    with pytest.raises(TableError, match="expected a ticket to wait for, got a cancelled one"):
        tickets[-1].wait()
    assert tickets[0].wait().shape == (4000, 8 * DIM)
    assert not tickets[0].cancel()
    table.close()
    table.close()
    for use in (table.lookup, table.prefetch):
        with pytest.raises(TableError, match="expected an open table, got a closed one"):
            use([[1]])


def test_lookup_into_out(tmp_path):
    tensors = table_tensors("fp32")
    with Table.open(checkpoint(tmp_path / "a.safetensors", tensors)) as table:
        idx = indices(6, 2)
        for out in (np.empty((6, 2 * DIM), np.float32), torch.empty(6, 2 * DIM)):
            given = torch.from_numpy(idx) if isinstance(out, torch.Tensor) else idx
            assert table.lookup(given, dtype="fp32", out=out) is out
            np.testing.assert_array_equal(bits(out), expected_rows(tensors, idx, "F32"))
        with pytest.raises(ShapeError, match=r"tensor 'out': expected \[6, 192\], got \[2, 2\]"):
            table.lookup(idx, dtype="fp32", out=np.empty((2, 2), np.float32))
        with pytest.raises(DTypeError, match="tensor 'out': expected F32, got float16"):
            table.lookup(idx, dtype="fp32", out=np.empty((6, 192), np.float16))
        with pytest.raises(DTypeError, match="framework"):
            table.lookup(idx, dtype="fp32", out=torch.empty(6, 192))
        with pytest.raises(ShapeError, match="contiguous"):
            table.lookup(idx, dtype="fp32", out=np.empty((192, 6), np.float32).T)


def test_what_a_lookup_refuses(tmp_path):
    with Table.open(checkpoint(tmp_path / "a.safetensors", table_tensors("bf16")), heads=4) as table:
        with pytest.raises(DTypeError, match="tensor 'idx': expected I32 or I64, got float64"):
            table.lookup(np.zeros((2, 4)))
        with pytest.raises(ShapeError, match=r"expected \[..., k\*4\], got \[2, 3\]"):
            table.lookup(np.zeros((2, 3), np.int64))
        with pytest.raises(DTypeError, match="attribute 'dtype'"):
            table.lookup(np.zeros((2, 4), np.int64), dtype="int8")
        with pytest.raises(TableError, match="expected a table in memory"):
            table.store(0, np.zeros((1, DIM), np.float32))


def test_what_is_not_supported(tmp_path):
    path = checkpoint(tmp_path / "a.safetensors", table_tensors("bf16"))
    with pytest.raises(UnsupportedError, match="'placement': expected file, host or device, got 'shared'"):
        Table.open(path, placement="shared")
    with pytest.raises(UnsupportedError, match="'cache_bytes': expected 0, got 4096"):
        Table.open(path, cache_bytes=4096)
    with pytest.raises(TableError, match="'placement'"):
        Table.open(path, placement="disk")
    with pytest.raises(UnsupportedError):
        Table.create(1, 1, format="bf16", placement="file")


def test_broken_files(tmp_path):
    path = tmp_path / "a.safetensors"
    good = checkpoint(path, table_tensors("bf16")).read_bytes()
    for content, text in [
        (b"", "safetensors header"),
        (good[:100], "safetensors header"),
        (good[:-1], "expected bytes of BF16"),
        (good[:8] + b"[" + good[9:], "expected JSON"),
    ]:
        path.write_bytes(content)
        with pytest.raises(TableError, match=f"a.safetensors': expected.*{text}|{text}"):
            Table.open(path)
    with pytest.raises(
        TableError, match="none.safetensors': expected a file that can be read, got No such file"
    ):
        Table.open(tmp_path / "none.safetensors")
    save(path, {"layers.1.engram.embed.weight": table_tensors("fp8")["weight"]})
    with pytest.raises(TableError, match="F8_E4M3 with scales"):
        Table.open(path)
    save(path, {"a": table_tensors("bf16")["weight"], "b": table_tensors("bf16")["weight"]})
    with pytest.raises(TableError, match="expected one table, got 2 tensors without a table"):
        Table.open(path)
