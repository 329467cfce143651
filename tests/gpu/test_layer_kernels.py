"""Kernels of a layer against plain PyTorch in fp32, forward and backward, and row by row."""

from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.models.attention import use_our_attention
from luyen.models.fused.ops import (
    AddRmsNorm,
    Gated,
    Heads,
    NormStyle,
    Rotated,
    RotatedHeads,
    apply_function,
    reference_add_rms_norm,
    reference_gated,
    reference_rotated,
)
from luyen.models.fused.patch import fuse_layers
from luyen.models.packed_attention import PackedContext
from tests.tiny_models import VOCABULARY, tiny_net

pytestmark = pytest.mark.gpu

STYLES = {
    "llama": NormStyle(eps=1e-6),
    "gpt_oss": NormStyle(eps=1e-5, is_wide=True),
    "gemma": NormStyle(eps=1e-6, offset=1.0, is_wide=True),
}


def leaves(device: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    made = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    return made[0] if len(made) == 1 else made


def assert_same_gradients(ours: Any, theirs: Any, inputs: list[Tensor]) -> None:
    """Both are tuples of outputs over the same inputs."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    pulls = [torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape) for x in theirs]
    got = torch.autograd.grad(ours, inputs, pulls)
    wanted = torch.autograd.grad(theirs, inputs, pulls)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("width", [24, 576])
def test_add_and_norm(device: str, style: str, rows: int, width: int):
    hidden, residual, weight = leaves(device, (rows, width), (rows, width), (width,))
    given = (hidden, residual, weight, STYLES[style])
    ours, theirs = AddRmsNorm.apply(*given), reference_add_rms_norm(*given)
    assert_same_gradients(ours, theirs, [hidden, residual, weight])
    alone = AddRmsNorm.apply(theirs[1].detach(), None, weight, STYLES[style])
    assert torch.equal(alone, ours[0])


def test_norm_without_a_residual_and_with_a_frozen_weight(device: str):
    hidden, weight = leaves(device, (2, 5, 40), (40,))
    weight.requires_grad_(False)
    style = STYLES["llama"]
    ours = AddRmsNorm.apply(hidden, None, weight, style)
    theirs, _ = reference_add_rms_norm(hidden, None, weight, style)
    assert_same_gradients((ours,), (theirs,), [hidden])


def test_a_weights_gradient_over_many_rows_is_the_same_every_time(device: str):
    rows = 5000 if device == "cuda" else 1100
    hidden, weight = leaves(device, (rows, 16), (16,))
    grads = [
        torch.autograd.grad(AddRmsNorm.apply(hidden, None, weight, STYLES["llama"]).sum(), weight)
        for _ in range(2)
    ]
    assert torch.equal(grads[0][0], grads[1][0])
    theirs, _ = reference_add_rms_norm(hidden, None, weight, STYLES["llama"])
    wanted = torch.autograd.grad(theirs.sum(), weight)[0]
    torch.testing.assert_close(grads[0][0], wanted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("inner", [48, 700])
def test_gate(device: str, activation: Any, inner: int):
    both = leaves(device, (3, 2 * inner))
    gate, up = both.chunk(2, -1)
    ours, theirs = Gated.apply(both, None, activation), reference_gated(gate, up, activation)
    assert_same_gradients((ours,), (theirs,), [both])
    gate, up = leaves(device, (2, 3, inner), (2, 3, inner))
    ours, theirs = Gated.apply(gate, up, activation), reference_gated(gate, up, activation)
    assert_same_gradients((ours,), (theirs,), [gate, up])


@pytest.mark.parametrize("rotated", [32, 24, 8])
@pytest.mark.parametrize("is_half", [True, False])
def test_rotation_of_heads_in_one_projection(device: str, rotated: int, is_half: bool):
    heads = Heads(queries=5, keys=3, width=32)
    qkv = leaves(device, (7, heads.columns))
    angle = torch.rand(7, rotated // 2, device=device)
    angle = angle if is_half else torch.cat([angle, angle], -1)
    cos, sin = angle.cos(), angle.sin()
    ours = RotatedHeads.apply(qkv, cos, sin, None, None, heads, rotated, None)
    q, k, v = heads.split(qkv)
    theirs = (reference_rotated(q, cos, sin, rotated), reference_rotated(k, cos, sin, rotated), v)
    assert_same_gradients(ours, theirs, [qkv])


@pytest.mark.parametrize("style", STYLES)
def test_norm_and_rotation_of_heads(device: str, style: str):
    heads = Heads(queries=5, keys=3, width=24)
    qkv, left, right = leaves(
        device, (1100 if device == "cuda" else 9, heads.columns), (24,), (24,)
    )
    angle = torch.rand(qkv.shape[0], 24, device=device)
    angle[:, 12:] = angle[:, :12]
    cos, sin = angle.cos(), angle.sin()
    ours = RotatedHeads.apply(qkv, cos, sin, left, right, heads, 24, STYLES[style])
    q, k, v = heads.split(qkv)
    q, _ = reference_add_rms_norm(q, None, left, STYLES[style])
    k, _ = reference_add_rms_norm(k, None, right, STYLES[style])
    theirs = (reference_rotated(q, cos, sin, 24), reference_rotated(k, cos, sin, 24), v)
    assert_same_gradients(ours, theirs, [qkv, left, right])


def test_rotation_of_separate_projections(device: str):
    q, k = leaves(device, (7, 4, 16), (7, 2, 16))
    angle = torch.rand(7, 8, device=device)
    cos, sin = angle.cos(), angle.sin()
    ours = Rotated.apply(q, k, cos, sin, 16)
    theirs = tuple(reference_rotated(x, cos, sin, 16) for x in (q, k))
    assert_same_gradients(ours, theirs, [q, k])


def test_without_gradients_the_bits_are_the_same(device: str):
    hidden, residual, weight = leaves(device, (3, 40), (3, 40), (40,))
    cos, sin = (turn(leaves(device, (3, 4)).detach()) for turn in (torch.cos, torch.sin))
    heads = Heads(queries=2, keys=1, width=10)
    calls: list[tuple[Any, ...]] = [
        (AddRmsNorm, hidden, residual, weight, STYLES["llama"]),
        (AddRmsNorm, hidden, None, weight, STYLES["gemma"]),
        (Gated, hidden, None, "silu"),
        (Gated, hidden, residual, "gelu"),
        (RotatedHeads, hidden, cos, sin, None, None, heads, 8, None),
        (Rotated, hidden.view(3, 4, 10), residual.view(3, 4, 10), cos, sin, 8),
    ]
    for function, *inputs in calls:
        wanted = function.apply(*inputs)
        assert torch.equal(_joined(apply_function(function, *inputs)), _joined(wanted))
        with torch.no_grad():
            found = apply_function(function, *inputs)
        assert torch.equal(_joined(found), _joined(wanted))


def _joined(outputs: Any) -> Tensor:
    """All numbers of one or several outputs."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.cat([part.reshape(-1) for part in parts])


@pytest.mark.parametrize("rows", [2, 37])
def test_a_row_does_not_depend_on_the_others(device: str, rows: int):
    kind = torch.bfloat16 if device == "cuda" else torch.float16
    heads = Heads(queries=3, keys=1, width=64)
    x, r, w = leaves(device, (rows, 320), (rows, 320), (320,), dtype=kind)
    head_weight = w[:64].contiguous()
    cos, sin = torch.rand(2, rows, 64, device=device).to(kind)

    def run(chosen: slice) -> list[Tensor]:
        a, b = x[chosen].clone(), r[chosen].clone()
        angles = cos[chosen].clone(), sin[chosen].clone()
        style, weights = STYLES["llama"], (head_weight, head_weight)
        return [
            *AddRmsNorm.apply(a, b, w, style),
            Gated.apply(a, None, "silu"),
            *RotatedHeads.apply(a, *angles, None, None, heads, 64, None),
            *RotatedHeads.apply(a, *angles, *weights, heads, 64, style),
        ]

    with torch.no_grad():
        whole = run(slice(None))
        for row in range(0, rows, 7):
            for one, many in zip(run(slice(row, row + 1)), whole, strict=True):
                assert torch.equal(one[0], many[row])


def logits_of(net: Any, tokens: Tensor) -> Tensor:
    """Logits of one packed sequence."""
    out = net.base_model(
        input_ids=tokens[None],
        position_ids=torch.arange(tokens.numel(), device=tokens.device)[None],
        use_cache=False,
        luyen_context=PackedContext.of([tokens.numel()], device=tokens.device),
    )
    return net.get_output_embeddings()(out.last_hidden_state[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a whole model needs CUDA")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"])
def test_a_fused_model_on_the_gpu_is_the_plain_one(kind: str):
    tokens = torch.randint(3, VOCABULARY, (40,), generator=torch.Generator().manual_seed(0))
    plain, fused = tiny_net(kind), tiny_net(kind).cuda()
    for net in (plain, fused):
        use_our_attention(net)
    assert fuse_layers(fused).kept == {}
    theirs, ours = logits_of(plain, tokens), logits_of(fused, tokens.cuda())
    with torch.no_grad():
        assert torch.equal(logits_of(fused, tokens.cuda()), ours)
    torch.testing.assert_close(ours.cpu(), theirs, atol=1e-3, rtol=1e-3)
    for logits in (theirs, ours):
        torch.log_softmax(logits, -1)[:, 5].mean().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in fused.named_parameters():
        assert parameter.grad is not None
        got = parameter.grad.cpu()
        torch.testing.assert_close(got, wanted[name], atol=1e-3, rtol=1e-2, msg=name)
