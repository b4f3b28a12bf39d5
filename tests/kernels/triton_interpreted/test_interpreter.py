"""The repaired interpreter itself: bfloat16 computes on values, and each kind of forbidden access raises."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels.triton_interpreted.interpreter import SanitizerError


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, sum_ptr, product_ptr, negated_ptr, less_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(sum_ptr + i, x + y)
    tl.store(product_ptr + i, x * y)
    tl.store(negated_ptr + i, -x)
    tl.store(less_ptr + i, x < y)


@triton.jit
def cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def copy_kernel(x_ptr, out_ptr, count, stride, SIZE: tl.constexpr):
    """Program p copies lanes p * stride .. + SIZE, those below `count`; masked lanes hold no `other`."""
    i = tl.program_id(0) * stride + tl.arange(0, SIZE)
    x = tl.load(x_ptr + i, mask=i < count)
    tl.store(out_ptr + i, x)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_bfloat16_arithmetic() -> None:
    x, y = numbers(64).bfloat16(), numbers(64, seed=1).bfloat16()
    results = [torch.empty_like(x) for _ in range(3)]
    less = torch.empty(64, dtype=torch.bool)
    arithmetic_kernel[(1,)](x, y, *results, less, SIZE=64)
    assert torch.equal(torch.stack(results), torch.stack((x + y, x * y, -x)))
    assert torch.equal(less, x < y)


CASTS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@pytest.mark.parametrize("source", CASTS)
@pytest.mark.parametrize("target", CASTS)
def test_casts_round_to_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, 1.0625, 1.1875, 1e-3, 440.0])
    x = torch.cat((ties, numbers(56))).to(source)
    out = torch.empty(64, dtype=target)
    cast_kernel[(1,)](x, out, SIZE=64)
    assert torch.equal(out.float(), x.to(target).float())


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
def test_casts_keep_infinities(target: torch.dtype) -> None:
    x = torch.tensor([torch.inf, -torch.inf, 65_000.0, -65_000.0])
    out = torch.empty(4, dtype=target)
    cast_kernel[(1,)](x, out, SIZE=4)
    assert torch.equal(out, x.to(target))


def test_every_fp8_value_is_read_and_written() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wide, narrow = torch.empty(256), torch.empty(256, dtype=torch.float8_e4m3fn)
    cast_kernel[(1,)](codes.view(torch.float8_e4m3fn), wide, SIZE=256)
    torch.testing.assert_close(wide, codes.view(torch.float8_e4m3fn).float(), equal_nan=True, rtol=0, atol=0)
    cast_kernel[(1,)](wide, narrow, SIZE=256)
    assert torch.equal(narrow.view(torch.uint8), codes)


def test_bfloat16_dot() -> None:
    a, b = numbers(16, 16).bfloat16(), numbers(16, 16, seed=1).bfloat16()
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out, SIZE=16)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", CASTS)
def test_masked_lanes_without_other_are_poison(dtype: torch.dtype) -> None:
    x, out = numbers(8).to(dtype), torch.zeros(8).to(dtype)
    copy_kernel[(1,)](x, out, 5, 8, SIZE=8)
    assert torch.equal(out[:5].float(), x[:5].float())
    assert out[5:].isnan().all()


def test_access_outside_a_tensor_raises() -> None:
    with pytest.raises(InterpreterError, match="load of 1 lanes outside"):
        copy_kernel[(1,)](torch.zeros(7), torch.zeros(8), 8, 8, SIZE=8)
    with pytest.raises(InterpreterError, match="store of 2 lanes outside"):
        copy_kernel[(1,)](torch.zeros(8), torch.zeros(6), 8, 8, SIZE=8)


def test_programs_that_write_the_same_address_raise() -> None:
    with pytest.raises(SanitizerError, match="written twice"):
        copy_kernel[(2,)](torch.zeros(16), torch.zeros(16), 16, 7, SIZE=8)
    copy_kernel[(2,)](torch.zeros(16), torch.zeros(16), 16, 8, SIZE=8)
