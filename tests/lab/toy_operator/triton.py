import triton
import triton.language as tl

from fulmen.triton_common.launching import on_its_device
from fulmen.triton_common.naming import named
from fulmen.triton_common.tiles import launch_options


@triton.jit(repr=named("toy_double"), do_not_specialize=("size",))
def double(x, result, size, C: tl.constexpr):
    i = tl.program_id(0) * C + tl.arange(0, C)
    tl.store(result + i, 2 * tl.load(x + i, mask=i < size, other=0.0), mask=i < size)


@on_its_device
def forward(x, result):
    double[(triton.cdiv(x.numel(), 128),)](x, result, x.numel(), C=128, **launch_options(warps=4))
