"""Random calls of the public functions: the right answer, or the error that the call deserves.

`make fuzz` runs 10 000; `make test` a short version. A failure names the seed that repeats it.
"""

import os
import random

import torch

from fastrpb import (
    DPFP,
    FastRPB,
    FastRPB2d,
    elu1,
    init,
    linear_attention,
    linear_attention_weights,
    relu,
    sikf,
    toeplitz,
    toeplitz_2d,
    toeplitz_matmul,
    toeplitz_matmul_2d,
)
from oracles import assert_product

CALLS = int(os.environ.get("FASTRPB_FUZZ", "400"))
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
IMPLS = ["auto", "dense", "fft"]


class Fuzzer:
    """One random call. `wrong` asks for one defect, which must then be refused."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.wrong = self.random.random() < 0.3

    def size(self, most: int) -> int:
        return self.random.choice([1, 2, 3, self.random.randint(1, most)])

    def tensor(self, *shape: int) -> torch.Tensor:
        """Random values in a random memory layout: contiguous, permuted, sliced or shifted."""
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        layout = self.random.randrange(4)
        if layout == 1:
            order = self.random.sample(range(x.dim()), x.dim())
            x = x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])
        elif layout == 2:
            x = torch.stack([x, x], -1).flatten(-2)[..., ::2]
        elif layout == 3:
            x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(shape)
        return x.to(self.random.choice(DTYPES))

    def leads(self) -> tuple[list[int], list[int]]:
        """Leading shapes of w and v that broadcast."""
        lead = [self.size(4) for _ in range(self.random.randint(0, 3))]
        drop = lambda: [1 if self.random.random() < 0.2 else s for s in lead]  # noqa: E731
        w, v = drop(), drop()
        return w[self.random.randint(0, len(w)) :], v

    def spoil(self, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        defects = [
            lambda: (torch.cat([w, w[..., :1]], -1), v),
            lambda: (w.long(), v),
            lambda: (w, v.to(torch.complex64)),
            lambda: (w, v[..., :0, :]),
            lambda: (w, torch.cat([v, v], -2)),
            lambda: (w, v[(0,) * (v.dim() - 1)]),
            lambda: (w.to("meta"), v),
            lambda: (
                (w.expand(3, *w.shape[-1:]), v.expand(2, *v.shape[-2:]))
                if w.dim() == 1 and v.dim() == 2
                else (w.int(), v)
            ),
        ]
        return self.random.choice(defects)()

    def call_1d(self) -> None:
        m, n, dim = self.size(150), self.size(150), self.size(5)
        w_lead, v_lead = self.leads()
        w, v = self.tensor(*w_lead, m + n - 1), self.tensor(*v_lead, n, dim)
        causal, impl = self.random.random() < 0.5, self.random.choice(IMPLS)
        matrix = toeplitz(torch.where(torch.arange(m + n - 1) < m, w, 0) if causal else w, m)
        if self.wrong:
            w, v = self.spoil(w, v)
        y = toeplitz_matmul(w, v, causal=causal, out_length=m, impl=impl)
        assert_product(y, matrix, v, m + n)

    def call_2d(self) -> None:
        shape = self.size(12), self.size(12)
        heads, full = self.size(4), self.random.random() < 0.5
        distances = [2 * s - 1 for s in shape] if full else [2 * max(shape) - 1]
        w = self.tensor(*([heads] if full or self.random.random() < 0.7 else []), *distances)
        n = shape[0] * shape[1]
        v = self.tensor(self.size(3), self.random.choice([1, heads]), n, self.size(5))
        wide = torch.promote_types(torch.promote_types(w.dtype, v.dtype), torch.float32)
        matrix = toeplitz_2d(w.to(wide), shape)
        if self.wrong:
            w, v = self.spoil(w, v)
        assert_product(
            toeplitz_matmul_2d(w, v, shape, impl=self.random.choice(IMPLS)), matrix, v, 4 * n
        )

    def call_module(self) -> None:
        heads, prefix = self.size(4), self.random.randint(0, 2)
        if self.random.random() < 0.5:
            longest = self.size(150)
            flags = self.random.choice([{}, {"causal": True}, {"symmetric": True}])
            rpb = FastRPB(heads, longest, prefix=prefix, init=init.normal(1.0), **flags)
            length = self.random.randint(1, longest)
        else:
            h, w, kind = self.size(10), self.size(10), self.random.choice(["additive", "full"])
            symmetric, fill = self.random.random() < 0.3, init.normal(1.0)
            rpb = FastRPB2d(heads, h, w, kind=kind, symmetric=symmetric, prefix=prefix, init=fill)
            length = h * w
        v = self.tensor(self.size(3), heads, prefix + length, self.size(5))
        mask = None
        if self.random.random() < 0.5:
            mask = torch.rand(v.shape[0], v.shape[2], generator=self.generator) < 0.7
        rpb = rpb.to(torch.promote_types(torch.float32, v.dtype))
        matrix, kept = rpb.matrix(prefix + length), v
        if mask is not None:
            kept = v * mask[:, None, :, None]
        if self.wrong:
            v, mask = self.random.choice(
                [
                    (v.int(), mask),
                    (v[:, :, : rpb.prefix], mask),
                    (torch.cat([v, v], 1), mask),
                    (torch.cat([v] * 200, 2), mask),
                    (v, torch.ones(v.shape[0], v.shape[2])),
                    (v, torch.ones(v.shape[2] + 1, dtype=torch.bool)),
                ]
            )
        assert_product(rpb(v, mask), matrix, kept, 4 * (prefix + length))

    def call_attention(self) -> None:
        m, n, dim = self.size(90), self.size(90), self.size(5)
        lead = self.size(3), self.size(3)
        q, k = self.tensor(*lead, m, dim), self.tensor(*lead, n, dim)
        v = self.tensor(*lead, n, self.size(5))
        causal = self.random.random() < 0.5
        phi = self.random.choice([sikf, elu1, relu, DPFP(1)])
        mask = None
        if self.random.random() < 0.5:
            mask = torch.rand(lead[0], n, generator=self.generator) < 0.7
        exact = (
            linear_attention_weights(q.double(), k.double(), phi=phi, mask=mask, causal=causal)
            @ v.double()
        )
        if self.wrong:
            q, k, v, mask = self.random.choice(
                [
                    (q.long(), k, v, mask),
                    (q, torch.cat([k, k], -1), v, mask),
                    (q, k, torch.cat([v, v], -2), mask),
                    (q, k[..., :0, :], v[..., :0, :], None),
                    (q[0, 0], k[0, 0], v[0, 0], None),
                    (q, k, v, torch.ones(lead[0], n)),
                ]
            )
        y = linear_attention(q, k, v, phi=phi, mask=mask, causal=causal)
        assert y.dtype == v.dtype
        eps = torch.finfo(v.dtype).eps + 1e-4  # DPFP's denominators can be tiny
        assert ((y.double() - exact).norm() <= eps * (1 + exact.norm())).all()


def refusal(call) -> Exception | None:
    """The error by which a call was refused, if it was."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return error
    return None


def test_random_calls():
    for seed in range(CALLS):
        fuzzer = Fuzzer(seed)
        call = fuzzer.random.choice(
            [fuzzer.call_1d, fuzzer.call_2d, fuzzer.call_module, fuzzer.call_attention]
        )
        try:
            error = refusal(call)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {call.__name__}, wrong={fuzzer.wrong}") from error
        assert (error is not None) == fuzzer.wrong, f"seed {seed}, {call.__name__}: {error}"
