"""What only a GPU can show: PyTorch's flash kernel, and one captured graph for all lengths."""

import pytest
import torch

from tests.gpu.attention_cases import make_case

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda(device: str) -> str:
    """CUDA, or no test."""
    if device != "cuda":
        pytest.skip("needs CUDA")
    return device


@pytest.mark.parametrize("sliding", [None, 40])
def test_flash_attention_is_ours_up_to_rounding(cuda, sliding):
    from luyen.models.cuda.varlen import flash_varlen, varlen_attention
    from luyen.models.cuda.varlen_segments import Segments

    case = make_case(cuda, [140, 33, 700], (9, 3, 64), "plain")
    segments = Segments.packed(case.lengths, device=cuda)
    results = []
    for function in (flash_varlen, varlen_attention):
        leaves = [x.clone().requires_grad_() for x in case.packed()]
        out = function(*leaves, segments, case.scale, sliding=sliding)
        out.float().square().sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    for theirs, ours in zip(*results, strict=True):
        largest = ours.abs().max()
        torch.testing.assert_close(theirs / largest, ours / largest, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sliding", [None, 40])
def test_parts_of_a_long_sequence_have_the_gradients_of_the_whole(cuda, sliding, monkeypatch):
    from luyen.models.cuda import varlen_gradients
    from luyen.models.cuda.varlen import flash_varlen
    from luyen.models.cuda.varlen_segments import Segments

    case = make_case(cuda, [140, 33, 700], (9, 3, 64), "plain")
    segments = Segments.packed(case.lengths, device=cuda)
    results = []
    for rows in (1 << 20, 128):
        monkeypatch.setattr(varlen_gradients, "_rows_of_a_pass", lambda *_, rows=rows: rows)
        leaves = [x.clone().requires_grad_() for x in case.packed()]
        out = flash_varlen(*leaves, segments, case.scale, sliding=sliding)
        out.float().square().sum().backward()
        results.append([x.grad for x in leaves])
    for whole, parts in zip(*results, strict=True):
        largest = whole.abs().max()
        torch.testing.assert_close(parts / largest, whole / largest, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("is_split", [False, True])
def test_one_graph_serves_all_lengths(cuda, is_split):
    from luyen.models.cuda.decode import paged_decode

    case = make_case(cuda, [900, 700], (6, 2, 64), "plain")
    lengths = torch.tensor([1, 1], dtype=torch.int32, device=cuda)
    query = case.query[:2].clone()

    def run() -> torch.Tensor:
        return paged_decode(
            query, case.keys, case.values, case.tables, lengths, case.scale, is_split=is_split
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for counts in ([900, 700], [0, 65], [512, 1]):
        lengths.copy_(torch.tensor(counts, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run())
