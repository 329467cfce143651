"""Linear layers whose rows have the same bits in a batch of any size, on GPUs and ARM CPUs.

The vendor's product is fast, and for most shapes its rows do not depend on their number. For some
it splits the sum differently as rows are added. Which ones is measured, once per process and shape;
those take our own product, in training and in generation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luyen.base.process_setup import has_mkl, is_promised, least_rows
from luyen.models.fused.layers import AttentionPlan, MlpPlan
from luyen.models.fused.packed_linear import PackedLinear, Product

ROWS = (
    *(1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768),
    *(1000, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 3000, 3072, 3584, 4096),
    *(5120, 6144, 7168, 8192, 16384, 65536),
)
"""Numbers of rows that are compared: of decode steps and captured passes, and some of training."""
_DISTINCT = 257
"""Different rows in a measurement. They repeat, and no tile holds a multiple of this number."""
_MOST_BYTES = 1 << 31
"""Size of a result that a measurement stays below."""
_ALIGNED = 16
"""Bytes. A row at another alignment may be computed by another kernel than the first one."""
PRODUCT = "luyen_product"
"""Attribute of a linear layer: what it multiplies with, where that is not PyTorch's own."""

RESTORED = "luyen_restored_shape"
"""Attribute of a linear layer that restores its weight for each product: the `ProductShape`.

Such a layer (`luyen.models.quantization`) reads `PRODUCT` itself.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """What the choice of a kernel depends on, the number of rows apart.

    Example:
        >>> ProductShape.of(torch.zeros(3, 2), None).depth
        2
    """

    columns: int
    """Outputs."""
    depth: int
    """Inputs."""
    dtype: torch.dtype
    """Of all operands."""
    has_bias: bool
    """Whether a bias is added."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "ProductShape":
        """The shape of the products with these parameters."""
        columns, depth = weight.shape
        return cls(columns=columns, depth=depth, dtype=weight.dtype, has_bias=bias is not None)


def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; the bits of a row do not depend on the other rows, nor on their number."""
    if not torch.is_grad_enabled():
        return batch_invariant_product(x, weight, bias)
    return _BatchInvariantLinear.apply(x, weight, bias)


def batch_invariant_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same without gradients."""
    from luyen.models.cuda.linear_kernels import linear_rows

    return linear_rows(x, weight, bias)


@final
class _BatchInvariantLinear(torch.autograd.Function):
    """Our product forward. Gradients need not be batch-invariant: they use the vendor's product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`."""
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return batch_invariant_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of what needs one."""
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        flat = grads[0].reshape(-1, weight.shape[0])
        below = (flat @ weight).view(*grads[0].shape[:-1], -1) if needs[0] else None
        learned = flat.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None
        return below, learned, flat.sum(0) if needs[2] else None


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`x[i] @ weight[e].T` for the rows from `offsets[e]` to `offsets[e + 1]` of each expert.

    The bits of a row do not depend on the other rows, nor on their number. Rows beyond the last
    offset are undefined, and have a gradient of 0.
    """
    return _GroupedLinear.apply(x, weight, offsets)


@final
class _GroupedLinear(torch.autograd.Function):
    """Our product forward. Gradients use the vendor's product, expert by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        from luyen.models.cuda.linear_kernels import grouped_rows

        ctx.save_for_backward(x, weight, offsets)
        return grouped_rows(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of rows and weights."""
        x, weight, offsets = ctx.saved_tensors
        counts = offsets.diff().tolist()
        end = sum(counts)
        parts = [*zip(grads[0][:end].split(counts), x[:end].split(counts), weight, strict=True)]
        needs = ctx.needs_input_grad
        below = None
        if needs[0]:
            unread = x.new_zeros(len(x) - end, x.shape[1])
            below = torch.cat([*(grad @ own for grad, _, own in parts), unread])
        learned = torch.stack([grad.t() @ rows for grad, rows, _ in parts]) if needs[1] else None
        return below, learned, None


@torch.no_grad()
def is_uneven(shape: ProductShape, device: torch.device, product: Product = F.linear) -> bool:
    """Whether a row's bits were seen to depend on its place or on the number of rows.

    The same few rows are multiplied over and over, as part of larger and larger batches. Global
    random numbers are not consumed.
    """
    size = shape.dtype.itemsize
    if shape.depth * size % _ALIGNED:
        return True
    make: dict[str, Any] = {
        "generator": torch.Generator(device).manual_seed(0),
        "dtype": shape.dtype,
        "device": device,
    }
    rows = [n for n in ROWS if n == 1 or n * shape.columns * size < _MOST_BYTES]
    repeats = -(-max(rows) // _DISTINCT)
    x = torch.randn(_DISTINCT, shape.depth, **make).repeat(repeats, 1)
    weight = torch.randn(shape.columns, shape.depth, **make)
    bias = torch.randn(shape.columns, **make) if shape.has_bias else None
    truth = product(x[:_DISTINCT], weight, bias)
    return not all(_repeats(product(x[:n], weight, bias), truth) for n in reversed(rows))


def _repeats(found: Tensor, truth: Tensor) -> bool:
    """Whether the rows are those of `truth`, over and over. Parts keep the memory low."""
    return all(torch.equal(part, truth[: len(part)]) for part in found.split(_DISTINCT))


@cache
def is_uneven_here(shape: ProductShape, device: torch.device) -> bool:
    """`is_uneven` of the vendor's product, measured once."""
    uneven = is_uneven(shape, device)
    if device.type == "cuda":
        # What the measurement took is for pages of keys and values.
        torch.cuda.empty_cache()
    return uneven


def choose_products(
    model: nn.Module,
    *,
    is_exact: bool,
    device: torch.device | None = None,
    measure: Callable[[ProductShape, torch.device], bool] = is_uneven_here,
) -> list[ProductShape]:
    """Give each linear layer the product it needs, and list the shapes that take ours.

    `device` is where they will multiply; None: where their weights are.

    Without `is_exact` every layer takes the vendor's again. Only linear layers are seen, the base
    and the adapter of a LoRA layer among them; experts that multiply by themselves are not.
    """
    found: dict[ProductShape, None] = {}
    for owner, shape, home in _products(model):
        is_ours = is_exact and measure(shape, device or home)
        if is_ours:
            found[shape] = None
        _assign(owner, is_ours)
    return list(found)


def product_of(linear: nn.Linear) -> Product:
    """What a layer multiplies with, for a caller that takes its weight."""
    return vars(linear).get(PRODUCT, F.linear)


def _products(
    model: nn.Module,
) -> Iterator[tuple[PackedLinear | nn.Linear, ProductShape, torch.device]]:
    """Everything that multiplies, with its shape: packed layers once, as a whole."""
    plans = [vars(module).get("luyen_plan") for module in model.modules()]
    packed = [plan.packed for plan in plans if isinstance(plan, AttentionPlan | MlpPlan)]
    parts: set[nn.Module] = set()
    for whole in packed:
        if whole is not None:
            parts.update(whole.modules)
            yield whole, ProductShape.of(whole.weight, whole.bias), whole.weight.device
    for module in model.modules():
        if type(module) is nn.Linear and module not in parts:
            yield module, ProductShape.of(module.weight, module.bias), module.weight.device
        elif isinstance(module, nn.Linear) and RESTORED in vars(module):
            yield module, vars(module)[RESTORED], module.weight.device


def _assign(owner: PackedLinear | nn.Linear, is_ours: bool) -> None:
    if isinstance(owner, PackedLinear):
        owner.product = batch_invariant_product if is_ours else F.linear
    elif RESTORED in vars(owner):
        vars(owner)[PRODUCT] = batch_invariant_product if is_ours else F.linear
    elif is_ours:
        vars(owner).update(
            {PRODUCT: batch_invariant_product, "forward": MethodType(_forward, owner)}
        )
    elif PRODUCT in vars(owner):
        del vars(owner)[PRODUCT], vars(owner)["forward"]


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    return batch_invariant_linear(x, self.weight, self.bias)


# Linear layers on a CPU: a few rows get the bits that they have among many.
#
# MKL on AMD and OpenBLAS sum the products of a row in one order for any number of rows, except for
# a few rows, which they sum in another order. So a few rows are filled up with zeros.


def batch_invariant_few_rows(model: nn.Module) -> None:
    """Make every plain linear layer batch-invariant, in place, where this processor needs it.

    Only plain layers are seen, the base and the adapter of a LoRA layer among them; experts that
    multiply by themselves are not.
    """
    floats = [p for p in model.parameters() if p.is_floating_point()]
    is_single = all(parameter.dtype == torch.float32 for parameter in floats)
    if not is_single or few_rows_product("float32") is F.linear:
        return
    if not has_mkl():
        # Two libraries would sum differently, so one is shut.
        torch.backends.mkldnn.enabled = False  # pyright: ignore[reportAttributeAccessIssue]
    for module in model.modules():
        if type(module) is nn.Linear:
            vars(module).update(
                {PRODUCT: few_rows_linear, "forward": MethodType(_few_rows_forward, module)}
            )
        elif RESTORED in vars(module):
            vars(module)[PRODUCT] = few_rows_linear


def few_rows_product(dtype: str) -> Product:
    """What gives a row the same bits in any number of rows on this CPU, where that is promised."""
    return few_rows_linear if least_rows() > 1 and is_promised(dtype) else F.linear


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; the bits of a row do not depend on whether it is one of a few.

    Example:
        >>> few_rows_linear(torch.ones(1, 2), torch.ones(3, 2))
        tensor([[2., 2., 2.]])
    """
    count = x.numel() // x.shape[-1]
    missing = least_rows() - count
    if missing <= 0 or count == 0:
        return F.linear(x, weight, bias)
    rows = F.linear(F.pad(x.reshape(count, -1), (0, 0, 0, missing)), weight, bias)
    return rows[:count].view(*x.shape[:-1], -1)


def _few_rows_forward(self: nn.Linear, x: Tensor) -> Tensor:
    return few_rows_linear(x, self.weight, self.bias)
