"""SLAY: spherical linearised attention with the Yat kernel (paper, section 2), and its variants.

The kernel x²/(C − 2x) = ∫ e^{−sC} x² e^{2sx} ds becomes a sum over nodes, Σ_r w_r x² e^{2 s_r x}.
A degree-2 map stands for x², positive random features for the exponentials, and a fusion joins
them. Each choice is an option of its own; configs/attention/slay*.yaml are named combinations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slayformer.attention.base import (
    SCALAR_LEARNING_RATE,
    generator,
    log_spread,
    mechanism_parameter,
)
from slayformer.attention.features import Dense, Features, Kronecker
from slayformer.attention.kernels import fitted_quadrature, gauss_laguerre, unit
from slayformer.attention.linear import LinearAttention
from slayformer.attention.near import NearExponential, NearKernel, NearYat
from slayformer.attention.polynomial import (
    CENTER,
    POLYNOMIALS,
    PolynomialMap,
    count_sketches,
    sketch_product,
)
from slayformer.attention.positive_features import ExponentialFeatures
from slayformer.attention.projection import Columns, Projection
from slayformer.config import AttentionConfig, one_of, positive
from slayformer.errors import ConfigError
from slayformer.registry import register_attention

Quadrature = Callable[[int, float], tuple[np.ndarray, np.ndarray]]
QUADRATURES: dict[str, Quadrature] = {"gauss_laguerre": gauss_laguerre, "fitted": fitted_quadrature}
# an ordinary kernel value at cosine x is near x²/2, whose mean over directions is 1/(2d); a signed
# map's normaliser below this share of it per key is not believed
GUARD_SHARE = 0.05
# further off, fp32 would not see what scores differ by
LARGEST_CENTER = 100.0
# maps of x² whose number of features follows from the head's width
OWN_SIZE = ("exact", "block_quadratic", "learned_quadratic")


@dataclass(kw_only=True)
class SlayConfig(AttentionConfig):
    """Options of SLAY; `slay.yaml` holds the paper's Table 9."""

    # the map of x² and its number of features (P)
    polynomial: str = one_of(*POLYNOMIALS)
    polynomial_features: int = positive()
    # `unbiased` multiplies anchor features so that x² has the factor 1
    anchor_scale: str = one_of("paper", "unbiased")
    # width of the blocks of learned_quadratic
    block_width: int = positive()
    # where its centres start: near 0 scores are nearly x² at first, from 1 on nearly all alike
    block_center: float = positive(CENTER)
    # `tensor`: x² features ⊗ exponentials; `hadamard`: elementwise; `sketch`: ⊗ sketched to
    # `sketch_features` a node (signed); `laplace_only`: exponentials; `polynomial_only`: x²/C
    fusion: str = one_of("tensor", "hadamard", "sketch", "laplace_only", "polynomial_only")
    sketch_features: int | None = positive(None)
    # positive random features of a node (D), and how their directions are drawn
    exponential_features: int = positive()
    random_features: str = one_of("iid", "orthogonal")
    # R nodes of the integral over s
    quadrature: str = one_of(*QUADRATURES)
    nodes: int = positive()
    # ω, anchors and log weights become parameters
    trainable: bool = False
    # kernel for near pairs: `chunk`, same stretch of `local_size`; `window`, less apart
    local: str = one_of("none", "chunk", "window")
    local_size: int = positive()
    # the exact spherical Yat kernel, or softmax's e^{q·k/√D}
    local_kernel: str = one_of("yat", "softmax", default="yat")
    # start of the learned factor on far pairs: of the first head and (null: the same) of the last,
    # in equal ratios between
    far_scale: float = positive()
    last_far_scale: float | None = positive(None)
    # signed maps: `guard` gives a row its own v where the normaliser is not clearly positive, and
    # counts such rows; `paper` divides by whatever comes
    denominator: str = one_of("guard", "paper")
    epsilon: float = positive()
    # the exact near kernel learns its ε, one a head
    learnable_epsilon: bool = False
    # added to the normaliser
    delta: float = positive()

    def check(self) -> None:
        """Raise ConfigError for combinations without a meaning."""
        if self.fusion == "hadamard" and self.polynomial_features != self.exponential_features:
            hint = f"fusion=hadamard needs exponential_features={self.exponential_features} as well"
            raise ConfigError("attention.polynomial_features", self.polynomial_features, hint)
        if self.fusion == "hadamard" and self.polynomial in OWN_SIZE:
            hint = "cannot have the exponentials' size; choose from " + ", ".join(
                name for name in POLYNOMIALS if name not in OWN_SIZE
            )
            raise ConfigError("attention.polynomial", self.polynomial, hint)
        if (self.fusion == "sketch") != (self.sketch_features is not None):
            hint = "is the size of fusion=sketch, and of no other"
            raise ConfigError("attention.sketch_features", self.sketch_features, hint)
        if self.learnable_epsilon and self.local == "none":
            hint = "only the exact kernel of near pairs has an ε to learn; set local"
            raise ConfigError("attention.learnable_epsilon", True, hint)
        if self.learnable_epsilon and self.local_kernel == "softmax":
            hint = "softmax has no ε; only local_kernel=yat has one to learn"
            raise ConfigError("attention.learnable_epsilon", True, hint)
        if self.block_center > LARGEST_CENTER:
            hint = f"scores are as good as alike beyond; use at most {LARGEST_CENTER:g}"
            raise ConfigError("attention.block_center", self.block_center, hint)
        if self.local != "none" and not self.is_positive():
            hint = "needs features that are never negative beside the exact kernel"
            raise ConfigError("attention.local", self.local, hint)

    def without_effect(self) -> dict[str, str]:
        """Return the options that do nothing here, each with the choice that makes it so."""
        polynomial, fusion = f"polynomial={self.polynomial}", f"fusion={self.fusion}"
        unused: dict[str, str] = {}
        if self.polynomial != "anchor":
            unused["anchor_scale"] = polynomial
        if self.polynomial != "learned_quadratic":
            unused |= dict.fromkeys(("block_width", "block_center"), polynomial)
        if self.polynomial == "exact":
            unused["polynomial_features"] = polynomial
        if self.fusion == "laplace_only":
            names = ("polynomial_features", "anchor_scale", "block_width", "block_center")
            unused |= dict.fromkeys(("polynomial", *names), fusion)
        if self.fusion == "polynomial_only":
            for name in ("exponential_features", "random_features", "quadrature", "nodes"):
                unused[name] = fusion
            if self.polynomial in ("exact", "learned_quadratic"):
                unused["trainable"] = f"{fusion} and {polynomial}"
        if self.local == "none":
            names = ("local_size", "local_kernel", "far_scale", "last_far_scale")
            unused |= dict.fromkeys(names, "local=none")
        if self.is_positive():
            unused["denominator"] = "features that are never negative"
        return unused

    def is_positive(self) -> bool:
        """Return whether no score can be negative."""
        if self.fusion == "laplace_only":
            return True
        return self.fusion != "sketch" and POLYNOMIALS[self.polynomial].positive


@register_attention("slay", SlayConfig)
class SlayAttention(LinearAttention):
    """A map of the spherical Yat kernel, alone or beside the exact kernel of near pairs."""

    config: SlayConfig
    polynomial: PolynomialMap | None
    exponential: ExponentialFeatures | None
    sketch_polynomial: Tensor
    sketch_exponential: Tensor

    def __init__(self, config: SlayConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.delta = config.delta
        self.positive = config.is_positive()
        if not self.positive and config.denominator == "guard":
            self.guard_floor = GUARD_SHARE / (2 * self.head_dim)
        if config.local != "none":
            self.local, self.local_size = config.local, config.local_size
            start = log_spread(config.far_scale, config.last_far_scale, self.num_heads)
            self.log_far_scale = mechanism_parameter(start, SCALAR_LEARNING_RATE)
        if config.learnable_epsilon:
            start = torch.full((self.num_heads, 1, 1), config.epsilon)
            self.log_epsilon = mechanism_parameter(start.log(), SCALAR_LEARNING_RATE)
        self._build_maps()

    def _build_maps(self) -> None:
        """Draw the maps that the fusion joins, and add up their sizes."""
        config = self.config
        self.polynomial = self.exponential = None
        if config.fusion != "laplace_only":
            self.polynomial = self._draw_polynomial()
            self.feature_count = self.polynomial.feature_count
            self.score_width = self.polynomial.score_width
        if config.fusion == "polynomial_only":
            return
        self.exponential = self._draw_exponential()
        count = config.nodes * config.exponential_features
        if config.fusion == "tensor":
            self.feature_count *= count
            self.score_width += count
            return
        self.feature_count = self.score_width = count
        if config.sketch_features is not None and self.polynomial is not None:
            self.feature_count = self.score_width = config.nodes * config.sketch_features
            draws, size = generator(3 * self.seed + 2), config.sketch_features
            for name, width in (
                ("sketch_polynomial", self.polynomial.feature_count),
                ("sketch_exponential", config.exponential_features),
            ):
                self.register_buffer(name, count_sketches(width, size, draws)[0])

    def _draw_polynomial(self) -> PolynomialMap:
        config = self.config
        options: dict[str, Any] = {"trainable": config.trainable}
        if config.polynomial == "anchor":
            options["anchor_scale"] = config.anchor_scale
        if config.polynomial == "learned_quadratic":
            options |= {"block_width": config.block_width, "center": config.block_center}
        return POLYNOMIALS[config.polynomial](
            budget=config.polynomial_features,
            heads=self.num_heads,
            width=self.head_dim,
            seed=3 * self.seed,
            **options,
        )

    def _draw_exponential(self) -> ExponentialFeatures:
        config = self.config
        rule = QUADRATURES[config.quadrature]
        nodes, weights = rule(config.nodes, config.epsilon)
        return ExponentialFeatures(
            torch.tensor(nodes),
            torch.tensor(weights),
            heads=self.num_heads,
            features=config.exponential_features,
            width=self.head_dim,
            kind=config.random_features,
            trainable=config.trainable,
            seed=3 * self.seed + 1,
        )

    def feature_tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the tensors of the two maps, of the sketch, and of the near scores, in order."""
        parts = [*self.polynomial.tensors(dtype)] if self.polynomial else []
        if self.exponential:
            parts += self.exponential.tensors(dtype)
        if self.config.fusion == "sketch":
            parts += [self.sketch_polynomial.to(dtype), self.sketch_exponential.to(dtype)]
        if self.local != "none":
            # far scores times a factor, or near ones divided by it: the quotient is the same, and
            # so the state does not hold the factor
            parts.append(self._shrinkage(dtype) / self.log_far_scale.to(dtype).exp())
            if self.config.learnable_epsilon:
                parts.append(self.log_epsilon.to(dtype).exp())
        return tuple(parts)

    def normaliser_offset(self, dtype: torch.dtype) -> Tensor | float:
        """Return δ, shrunk as the scores are."""
        return self.delta * self._shrinkage(dtype)

    def _shrinkage(self, dtype: torch.dtype) -> Tensor | float:
        """Return e^{−2 shift}, the factor that the exponents' shift puts on every score."""
        if self.exponential is None:
            return 1.0
        return torch.exp(-2 * self.exponential.shift(dtype))

    def feature_map(
        self, x_BHTD: Tensor, *tensors: Tensor, is_query: bool, positions: Tensor
    ) -> Features:
        """Return the features of x/‖x‖ for the configured fusion."""
        u_BHTD = unit(x_BHTD)
        rest = list(tensors)
        polynomial = exponential = None
        if self.polynomial:
            count = self.polynomial.tensor_count
            polynomial = self.polynomial.features(u_BHTD, *rest[:count])
            rest = rest[count:]
        if self.exponential:
            exponential = self.exponential.features(u_BHTD, *rest[:2])
            rest = rest[2:]
        return self._fuse(polynomial, exponential, rest)

    def projection(self, *tensors: Tensor) -> Projection | None:
        """Return the map as activations of one product, where it is such a map."""
        config = self.config
        if config.fusion not in ("tensor", "polynomial_only") or self.polynomial is None:
            return None
        count = self.polynomial.tensor_count
        joined = self.polynomial.projection(*tensors[:count])
        if joined is None:
            return None
        rest = list(tensors[count:])
        if self.exponential:
            weight_HDF, bias_H1F = rest[:2]
            rest = rest[2:]
            columns = Columns("factor", "exponent", weight_HDF.shape[-1])
            joined = Projection(
                torch.cat([joined.weight_HDF, weight_HDF], dim=-1),
                torch.cat([joined.bias_HF, bias_H1F[:, 0]], dim=-1),
                (*joined.columns, columns),
            )
        else:
            joined = joined.scaled(self._single_weight() ** 0.5)
        if config.local == "none":
            return joined
        if config.local_kernel == "softmax":
            factor = self.head_dim**-0.5
            return replace(joined, near="exponential", near_scale=rest[0], near_factor=factor)
        epsilon = rest[1] if config.learnable_epsilon else config.epsilon
        return replace(joined, near="yat", near_scale=rest[0], near_epsilon=epsilon)

    def _single_weight(self) -> float:
        """Return 1/C, the weight of one node at s = 0."""
        return 1 / (2 + self.config.epsilon)

    def _fuse(
        self, polynomial: Features | None, exponential: Dense | None, sketches: list[Tensor]
    ) -> Features:
        """Join the features of x² and of the exponentials."""
        if exponential is None:
            assert polynomial is not None
            # one node at s = 0: x²/C
            return polynomial.scaled(self._single_weight() ** 0.5)
        if polynomial is None:
            return exponential
        if self.config.fusion == "tensor":
            return Kronecker(polynomial, exponential)
        per_node = exponential.phi_BHTM.unflatten(-1, (self.config.nodes, -1))
        shared = polynomial.expand()[..., None, :]
        if self.config.fusion == "hadamard":
            # Σ_i p_i(q) p_i(k) e_i(q) e_i(k) over P = D indices: √P restores the mean of x² e^{2sx}
            return Dense((shared * per_node * shared.shape[-1] ** 0.5).flatten(-2))
        return Dense(sketch_product(shared @ sketches[0], per_node @ sketches[1]).flatten(-2))

    def near_kernel(self, q_BHTD: Tensor, k_BHSD: Tensor, *tensors: Tensor) -> NearKernel:
        """Return the exact spherical Yat kernel, or softmax's, on the scale of the features."""
        epsilon: Tensor | float = self.config.epsilon
        scale = tensors[-1]
        if self.config.local_kernel == "softmax":
            return NearExponential(q_BHTD * self.head_dim**-0.5, k_BHSD, scale)
        if self.config.learnable_epsilon:
            scale, epsilon = tensors[-2:]
        return NearYat(q_BHTD, k_BHSD, scale, epsilon)

    def feature_flops(self) -> int:
        """Return the FLOPs of one vector's features in one head, as far as they are formed."""
        flops = 3 * self.head_dim
        if self.polynomial:
            flops += self.polynomial.flops()
        if self.exponential:
            flops += self.exponential.flops()
        return flops + 2 * self.feature_count
