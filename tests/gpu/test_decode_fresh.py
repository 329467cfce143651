"""Rows that bring keys unturned and unstored get the bits of the kernels that do it one by one."""

import pytest
import torch

from tests.gpu.attention_cases import KINDS, make_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 128), (4, 2, 96)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_row_may_bring_its_new_key_as_it_was_projected(device, shape, kind, is_split, share):
    from luyen.models.cuda.decode import Fresh, paged_decode, store_keys_values
    from luyen.models.cuda.rotary_kernels import rotate

    if device != "cuda" and kind not in ("plain", "all"):
        pytest.skip("the interpreter is slow")
    lengths = [1, 64, 65, 513, 1030, 2048] if device == "cuda" else [1, 65, 540]
    case = make_case(device, lengths, shape, kind)
    heads, kv_heads, width = shape
    rows, rotated = len(lengths) + 1, int(width * share)
    dtype = case.query.dtype
    make = torch.Generator().manual_seed(1)
    joint = torch.randn(rows, heads + 2 * kv_heads, width, generator=make).to(device, dtype)
    query, key, value = joint.split([heads, kv_heads, kv_heads], 1)
    angle = torch.randn(rows, rotated // 2, generator=make)
    cos, sin = (turn(angle).repeat(1, 2).to(device, dtype) for turn in (torch.cos, torch.sin))
    # The last row rests: it has no place and no keys.
    counts = torch.tensor([*lengths, 0], dtype=torch.int32, device=device)
    tables = torch.cat([case.tables, torch.full_like(case.tables[:1], 2_000_000_000)])
    newest = case.slots[torch.tensor(case.ends(), device=device) - 1]
    slots = torch.cat([newest, newest.new_full((1,), -1)])

    turned, turned_key = rotate(query, key, cos, sin, rotated)
    stored = [case.keys.clone(), case.values.clone()]
    store_keys_values(turned_key, value, *stored, slots)
    read = (tables, counts, case.scale)
    wanted = paged_decode(turned, *stored, *read, is_split=False, **case.window)

    found = [case.keys.clone(), case.values.clone()]
    arrivals = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
    fresh = Fresh(keys=key, values=value, cos=cos, sin=sin, rotated=rotated)
    out = paged_decode(
        query, *found, *read, fresh=fresh, arrivals=arrivals, is_split=is_split, **case.window
    )
    for mine, right in zip((out, *found), (wanted, *stored), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)
    assert not arrivals.any()
