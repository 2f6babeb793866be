"""Tables with a GPU: rows on the device, in pinned host memory and in files, lookups and prefetches on
streams and in graphs. The rows of the CPU are the truth."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from engramhc.errors import TableError  # noqa: E402
from engramhc.tables import Table  # noqa: E402

ROWS, DIM = 5003, 96
FORMATS = ["bf16", "fp16", "fp32", "fp8"]


def values():
    return np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)


def indices(*shape, seed=1):
    idx = torch.from_numpy(np.random.default_rng(seed).integers(-1, ROWS, shape))
    idx.view(-1)[:1] = -1
    return idx


def made(format, placement):
    table = Table.create(ROWS, DIM, format=format, placement=placement)
    table.store(0, values())
    return table


def same(rows, expected):
    assert rows.is_cuda and rows.shape == expected.shape and rows.dtype == expected.dtype
    assert torch.equal(rows.cpu().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("format", FORMATS)
def test_placements_do_not_change_a_bit(format, placement):
    with made(format, "host") as truth, made(format, placement) as table:
        for idx in (indices(300, 8), indices(2, 7, 3).to(torch.int32), indices(1, 24), indices(0, 4)):
            for dtype in (torch.bfloat16, torch.float32):
                expected = truth.lookup(idx, dtype=dtype)
                same(table.lookup(idx.cuda(), dtype=dtype), expected)
                assert torch.equal(table.lookup(idx, dtype=dtype), expected)  # back where idx is
                same(table.lookup(idx, dtype=dtype, device="cuda"), expected)
                out = torch.empty(expected.shape, dtype=dtype, device="cuda")
                assert table.lookup(idx.cuda(), dtype=dtype, out=out) is out
                same(out, expected)


def test_rows_of_a_file(tmp_path):
    path = tmp_path / "rows.bin"
    path.write_bytes(values().tobytes())
    with (
        Table.open(path, format=f"fp32[{DIM}]") as file,
        Table.open(path, format=f"fp32[{DIM}]", placement="device") as device,
    ):
        idx = indices(200, 4)
        expected = file.lookup(idx)
        for table in (file, device):
            same(table.lookup(idx.cuda()), expected)
            same(table.prefetch(idx.cuda()).wait(), expected)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_prefetch_runs_on_a_side_stream(placement):
    with made("fp8", "host") as truth, made("fp8", placement) as table:
        batches = [indices(500, 8, seed=seed) for seed in range(12)]
        tickets = [table.prefetch(idx.cuda()) for idx in batches]
        torch.cuda._sleep(1_000_000)  # work of the current stream
        for idx, ticket in zip(batches, tickets):
            same(ticket.wait().clone(), truth.lookup(idx))
        stream = torch.cuda.Stream()
        ticket = table.prefetch(batches[0].cuda(), stream=stream)
        same(ticket.wait(), truth.lookup(batches[0]))


@pytest.mark.parametrize("placement", ["device", "host"])
def test_lookup_in_a_graph(placement):
    """Captured on first use, replayed with other indices."""
    with made("fp8", "host") as truth, made("fp8", placement) as table:
        idx = indices(16, 8).cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows = table.lookup(idx)
            ticket = table.prefetch(idx)
            ahead = ticket.wait()
        for seed in (5, 6):
            now = indices(16, 8, seed=seed)
            idx.copy_(now)
            graph.replay()
            torch.cuda.synchronize()
            same(rows, truth.lookup(now))
            same(ahead, truth.lookup(now))


@pytest.mark.parametrize("placement", ["device", "host"])
def test_indices_without_a_row(placement):
    with made("bf16", placement) as table:
        idx = torch.tensor([[0, ROWS], [-2, 5]], device="cuda")
        rows = table.lookup(idx, dtype=torch.float32).view(2, 2, DIM)
        assert not rows[0, 1].any() and not rows[1, 0].any()
        assert rows[0, 0].any() and rows[1, 1].any()
        assert table.stats()["out_of_range"] == 2
        with pytest.raises(TableError, match="expected -1 or a row below"):
            table.lookup(idx, check=True)
