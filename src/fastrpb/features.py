"""Feature maps of linear attention: sim(q, k) = φ(q)ᵀφ(k) (§2.3, §3.1).

A feature map is an object that maps (q, k) to (φ(q), φ(k)) and is passed as `phi=`. There are two
families. `FeatureMap`s give the features themselves. `ExpFeatureMap`s give their logarithm,
φ = exp(log φ), which overflows when taken as it stands; attention shifts it first, by amounts that
cancel, so that nothing overflows and nothing is lost.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from fastrpb.checks import check_size, compute_dtype, kept

Features = tuple[Tensor, Tensor]

# The logarithm of the features of a key that does not count: below any real one, yet finite, so
# that differences of two of them are not NaN.
HIDDEN = -1e30


class FeatureMap(ABC):
    """φ by itself, one vector at a time. A map of your own has `features` alone.

    >>> from fastrpb import linear_attention
    >>> class Square(FeatureMap):
    ...     def features(self, x):
    ...         return x.square()
    >>> q, k, v = torch.randn(3, 2, 4, 100, 8)
    >>> linear_attention(q, k, v, phi=Square(), causal=True).shape
    torch.Size([2, 4, 100, 8])
    """

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """φ(x): (..., dim) → (..., features), none negative."""

    def __call__(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Features:
        """(φ(q), φ(k)), the features of masked keys zero.

        Args:
            q: (batch, heads, M, dim).
            k: (batch, heads, N, dim).
            mask: (batch, N) bool, True = keep.
        """
        return self.features(q), kept(self.features(k), mask)


class ExpFeatureMap(ABC):
    """φ = exp(log φ), given by its logarithm: attention never overflows, whatever its size.

    >>> from fastrpb import linear_attention
    >>> class Sharp(ExpFeatureMap):
    ...     def log_features(self, x):
    ...         return 2 * x
    >>> q, k, v = torch.randn(3, 2, 4, 100, 8)
    >>> bool(linear_attention(1e4 * q, k, v, phi=Sharp()).isfinite().all())
    True
    """

    @abstractmethod
    def log_features(self, x: Tensor) -> Tensor:
        """Log φ(x): (..., dim) → (..., features)."""

    def logs(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Features:
        """(log φ(q), log φ(k)); keys that the mask (batch, N) hides are below all others."""
        dtype = compute_dtype(q, k)  # HIDDEN is beyond half precision
        log_k = kept(self.log_features(k.to(dtype)), mask, HIDDEN)
        return self.log_features(q.to(dtype)), log_k

    def __call__(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Features:
        """(φ(q), φ(k)) up to a factor for each query, which a normalised attention cancels.

        A shift s_f for each feature, its largest key, is taken off the keys and added to the
        queries: exp(k_f - s_f)·exp(q_f + s_f). Then each query takes off its own largest. Exact;
        all exponents are at most 0, and no feature underflows because another one is large.
        """
        log_q, log_k = self.logs(q, k, mask)
        shift = log_k.detach().amax(-2, keepdim=True)
        log_q = log_q + shift
        phi_k = kept(torch.exp(log_k - shift), mask)
        return torch.exp(log_q - log_q.detach().amax(-1, keepdim=True)), phi_k


Phi = FeatureMap | ExpFeatureMap


class SIKF(ExpFeatureMap):
    """φ(x) = exp(x): like softmax, the attention does not change with (q + c, k + d)."""

    def log_features(self, x: Tensor) -> Tensor:
        return x


class ELU1(FeatureMap):
    """φ(x) = ELU(x) + 1 (Katharopoulos et al. 2020), exp(x) below zero.

    Where all channels of a query and of its keys are below about -50, their product is below what
    float32 can hold and the output is zero; float64 reaches -370, `sikf` any distance.
    """

    def features(self, x: Tensor) -> Tensor:
        # Not elu(x) + 1, which cancels to zero below -17 in float32.
        return x.clamp(max=0).exp() + nn.functional.relu(x)


class ReLU(FeatureMap):
    """φ(x) = max(x, 0) + 1e-3 (Choromanski et al. 2020, the generalised attention).

    Their epsilon keeps a query whose features would all be zero from having nothing to attend to.
    """

    def features(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x) + 1e-3


class DPFP(FeatureMap):
    """φ(x) = [r·roll(r, 1), ..., r·roll(r, ν)] with r = ReLU([x, -x]): 2·dim·ν features.

    Deterministic and parameter-free (Schlag et al. 2021).

    >>> DPFP(nu=1).features(torch.tensor([1.0, 2.0]))
    tensor([0., 2., 0., 0.])
    """

    def __init__(self, nu: int = 1):
        check_size("nu", nu)
        self.nu = nu

    def features(self, x: Tensor) -> Tensor:
        if self.nu >= 2 * x.shape[-1]:
            raise ValueError(f"nu={self.nu} must be below 2·dim = {2 * x.shape[-1]}")
        r = nn.functional.relu(torch.cat([x, -x], dim=-1))
        return torch.cat([r * r.roll(j, dims=-1) for j in range(1, self.nu + 1)], dim=-1)


class Given(FeatureMap):
    """φ(x) = x: the features are there already, and none is negative."""

    def features(self, x: Tensor) -> Tensor:
        return x


class Projected(ExpFeatureMap):
    """The features of `FavorPlus` for the rows R of a projection (m, dim)."""

    def __init__(self, projection: Tensor):
        self.projection = projection

    def log_features(self, x: Tensor) -> Tensor:
        count, dim = self.projection.shape
        z = x * dim**-0.25
        rz = z @ self.projection.to(z.dtype).mT
        constant = math.log(2 * count) / 2
        return torch.cat([rz, -rz], -1) - z.square().sum(-1, keepdim=True) / 2 - constant


class FavorPlus(nn.Module, ExpFeatureMap):
    """Random features whose φ(q)ᵀφ(k) is exp(qᵀk/√dim) on average (Performer).

    φ(x) = exp(-‖z‖²/2)/√(2m) · [exp(Rz), exp(-Rz)] with z = x·dim^(-1/4). The m rows of R are
    orthogonal within blocks of dim, and as long as rows of independent normal numbers.

    Args:
        dim: of queries and keys.
        num_features: m; the map has 2m features. The error falls like 1/√m.
        seed: of the rows; two maps with one seed are equal.

    Attributes:
        projection: R, (num_features, dim), a buffer that is saved with the model.

    >>> FavorPlus(dim=16, num_features=64).log_features(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 128])
    """

    projection: Tensor

    def __init__(self, dim: int, num_features: int, *, seed: int = 0):
        super().__init__()
        check_size("dim", dim)
        check_size("num_features", num_features)
        self.dim = dim
        self.num_features = num_features
        self.seed = seed
        self.register_buffer("projection", torch.empty(num_features, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.redraw(self.seed)

    # nn.Module would route a call to forward.
    __call__ = ExpFeatureMap.__call__

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Draw other features, the same ones for the same seed on every device."""
        generator = torch.Generator().manual_seed(seed)
        blocks = -(-self.num_features // self.dim)
        kind = {"generator": generator, "device": "cpu", "dtype": torch.float32}
        normal = torch.randn(blocks, self.dim, self.dim, **kind)
        q, r = torch.linalg.qr(normal)
        # With the signs of R, the Q of a normal matrix is any orthogonal one with equal chance.
        rows = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).flatten(0, 1)
        other = torch.randn(self.num_features, self.dim, **kind)
        lengths = other.norm(dim=-1)
        self.projection.copy_(rows[: self.num_features] * lengths[:, None])

    def log_features(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ValueError(f"x has {x.shape[-1]} channels, the features are for dim={self.dim}")
        return Projected(self.projection).log_features(x)

    def extra_repr(self) -> str:
        return f"{self.dim}, num_features={self.num_features}"


sikf = SIKF()
elu1 = ELU1()
relu = ReLU()
