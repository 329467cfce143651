"""Decoding on CUDA from a joint projection: positions, the cache and attention in one kernel."""

from torch import Tensor

from luyen.models.fused.rotary import Joint
from luyen.models.kernels import Window
from luyen.models.paged import Pages


def decode_joint(
    joint: Joint,
    pages: Pages,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: Window,
    *,
    is_split: bool,
    arrivals: Tensor,
) -> Tensor:
    """As `luyen.models.paged.decode`; each row's newest key is turned and stored on the way."""
    from luyen.models.cuda.decode import Fresh, paged_decode

    query, key, value = joint.heads.split(joint.qkv)
    return paged_decode(
        query,
        pages.keys,
        pages.values,
        tables,
        lengths,
        scale,
        sliding=window.sliding,
        softcap=window.softcap,
        sinks=window.sinks,
        fresh=Fresh(keys=key, values=value, cos=joint.cos, sin=joint.sin, rotated=joint.rotated),
        arrivals=arrivals,
        is_split=is_split,
    )
