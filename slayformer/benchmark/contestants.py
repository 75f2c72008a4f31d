"""What is timed: every mechanism of ours, naive exact forms, and other projects' attentions.

Shape suffixes: B batch, H heads, T positions, D width of q and k, E width of v.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import elu, scaled_dot_product_attention

from slayformer.attention.backends import BACKENDS
from slayformer.attention.kernels import spherical_yat, unit
from slayformer.attention.quadratic import TINY
from slayformer.errors import ConfigError, nearest
from slayformer.presets import load_preset, make_attention, preset_names
from slayformer.registry import attention_entry

# what everything is divided by
REFERENCE = "torch_sdpa"

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(Exception):
    """A contestant that cannot run here, and why."""


@dataclass(frozen=True)
class Shape:
    """The tensors a contestant gets, [batch, heads, length, head_dim]."""

    batch: int
    heads: int
    head_dim: int
    length: int
    dtype: torch.dtype
    device: torch.device
    # attention.backend of our mechanisms
    backend: str = "auto"

    def draw(self, count: int = 3) -> list[Tensor]:
        """Return `count` tensors of N(0, 1), the same for the same shape on a CPU."""
        size = (self.batch, self.heads, self.length, self.head_dim)
        draws = torch.Generator(self.device).manual_seed(0)
        options = {"dtype": self.dtype, "device": self.device}
        return [torch.randn(size, generator=draws, **options) for _ in range(count)]  # type: ignore[call-overload]


@dataclass(frozen=True)
class Runner:
    """A contestant made for one shape: causal attention, and what it can learn."""

    attend: Call
    parameters: Sequence[Tensor] = ()


def load_mechanism(name: str, shape: Shape) -> Any:
    """Return mechanism `name` as a module for `shape`, by `shape.backend` where it has one.

    Raises ConfigError for a name that does not exist.
    """
    config = load_preset(name)
    entry = attention_entry(config.mechanism or config.name)
    # mechanisms over explicit pairs have no engine to choose
    chosen: dict[str, Any] = {}
    if shape.backend in entry.attention.backends:
        chosen["backend"] = shape.backend
    attention = make_attention(
        name,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        max_sequence_length=shape.length,
        **chosen,
    )
    return attention.to(shape.device)


def engine_of(name: str, shape: Shape) -> str:
    """Return which engine of BACKENDS computes mechanism `name`; `pairs` if it has no choice."""
    config = load_preset(name)
    entry = attention_entry(config.mechanism or config.name)
    wanted = [backend for backend in BACKENDS if backend in entry.attention.backends]
    if wanted in ([], ["torch"]):
        return "pairs"
    if shape.backend != "auto":
        return shape.backend
    for backend in wanted:
        tiny = replace(shape, length=4, batch=1, backend=backend)
        try:
            with torch.no_grad():
                load_mechanism(name, tiny)(*tiny.draw())
        except ConfigError:
            continue
        return backend
    raise AssertionError("the backend torch takes everything")


def _mechanism(name: str, shape: Shape) -> Runner:
    attention = load_mechanism(name, shape)
    return Runner(lambda q, k, v: attention(q, k, v)[0], list(attention.parameters()))


def _sdpa(shape: Shape) -> Runner:
    return Runner(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))


def _naive(scores: Callable[[Tensor, Tensor], Tensor], *, softmax: bool) -> Runner:
    """Return attention with all scores of the sequence at once."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        if softmax:
            return scores(q, k).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        kernel = scores(q, k).masked_fill(hidden, 0)
        return kernel @ v / (kernel.sum(-1, keepdim=True) + TINY)

    return Runner(attend)


def _naive_softmax(shape: Shape) -> Runner:
    return _naive(lambda q, k: q @ k.mT * shape.head_dim**-0.5, softmax=True)


def _naive_yat_spherical(shape: Shape) -> Runner:
    return _naive(lambda q, k: spherical_yat(unit(q) @ unit(k).mT, 1e-3), softmax=False)


def _import(module: str, package: str) -> Any:
    """Return another project's module; raises Unavailable if it is not here or does not load."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        told = f"{package} is not installed"
        if error.name != module.partition(".")[0]:
            told = f"{package} does not load ({error})"
        raise Unavailable(told) from error


def _only_cuda(shape: Shape, package: str) -> None:
    if shape.device.type != "cuda":
        raise Unavailable(f"{package} computes on CUDA GPUs only")


def _flash_attention(shape: Shape) -> Runner:
    _only_cuda(shape, "flash-attn")
    if shape.dtype == torch.float32:
        raise Unavailable("flash-attn computes with bf16 and fp16 only")
    flash = _import("flash_attn", "flash-attn").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)

    return Runner(attend)


def _flash_linear(shape: Shape, feature_map: Callable[..., Tensor], parameters: Any) -> Runner:
    """Return flash-linear-attention's chunked kernel behind a map whose features are stored."""
    _only_cuda(shape, "flash-linear-attention")
    chunked = _import("fla.ops.linear_attn", "flash-linear-attention").chunk_linear_attn

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi_q, phi_k = feature_map(q, is_query=True), feature_map(k, is_query=False)
        heads = (x.to(v.dtype).transpose(1, 2) for x in (phi_q, phi_k, v))
        return chunked(*heads, normalize=True)[0].transpose(1, 2)

    return Runner(attend, parameters)


def _flash_linear_elu(shape: Shape) -> Runner:
    return _flash_linear(shape, lambda x, is_query: elu(x) + 1, [])


def _flash_linear_slay(shape: Shape) -> Runner:
    attention = load_mechanism("slay", shape)
    positions = torch.arange(shape.length, device=shape.device).expand(shape.batch, -1)

    def feature_map(x: Tensor, is_query: bool) -> Tensor:
        tensors = attention.feature_tensors(torch.float32)
        features = attention.feature_map(
            x.float(), *tensors, is_query=is_query, positions=positions
        )
        return features.expand()

    return _flash_linear(shape, feature_map, list(attention.parameters()))


def _performer_pytorch(shape: Shape) -> Runner:
    module = _import("performer_pytorch", "performer-pytorch")
    # it says on standard output that it has no CUDA kernels
    with redirect_stdout(StringIO()):
        attention = module.FastAttention(shape.head_dim, causal=True).to(shape.device)
    return Runner(attention)


def _fast_transformers(shape: Shape) -> Runner:
    package = "pytorch-fast-transformers"
    if shape.dtype != torch.float32:
        raise Unavailable(f"{package} computes with fp32 only")
    masking = _import("fast_transformers.masking", package)
    attention = _import("fast_transformers.attention", package).CausalLinearAttention(
        shape.head_dim
    )
    attention = attention.to(shape.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, _, length, _ = q.shape
        causal = masking.TriangularCausalMask(length, device=q.device)
        lengths = masking.LengthMask(torch.full((batch,), length, device=q.device))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return attention(*heads, causal, lengths, lengths).transpose(1, 2)

    return Runner(attend, list(attention.parameters()))


@dataclass(frozen=True)
class Peer:
    """An implementation beside ours; `package` is the one it needs, other than torch."""

    make: Callable[[Shape], Runner]
    about: str
    package: str | None = None


PEERS: dict[str, Peer] = {
    REFERENCE: Peer(_sdpa, "torch's fused softmax attention, causal"),
    "naive_softmax": Peer(_naive_softmax, "softmax over all scores at once, in torch"),
    "naive_yat_spherical": Peer(
        _naive_yat_spherical, "the exact spherical Yat kernel over all scores at once, in torch"
    ),
    "flash_attn": Peer(_flash_attention, "FlashAttention's own package", "flash-attn"),
    "fla_elu": Peer(
        _flash_linear_elu,
        "chunk_linear_attn of flash-linear-attention, features elu(x) + 1",
        "flash-linear-attention",
    ),
    "fla_slay": Peer(
        _flash_linear_slay,
        "chunk_linear_attn of flash-linear-attention, SLAY's 384 features stored",
        "flash-linear-attention",
    ),
    "performer_pytorch": Peer(
        _performer_pytorch,
        "FastAttention of performer-pytorch, its default number of features",
        "performer-pytorch",
    ),
    "fast_transformers": Peer(
        _fast_transformers,
        "CausalLinearAttention of pytorch-fast-transformers, features elu(x) + 1",
        "pytorch-fast-transformers",
    ),
}


def check_names(mechanisms: Sequence[str], peers: Sequence[str]) -> None:
    """Raise ConfigError for a name that stands for nothing, or that is there twice."""
    for key, names, known in (
        ("mechanisms", mechanisms, preset_names()),
        ("peers", peers, [*PEERS]),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(key, name, nearest(name, known))
        if len(set(names)) < len(names):
            raise ConfigError(key, list(names), "name each once")


def make_runner(name: str, shape: Shape) -> Runner:
    """Return the peer or mechanism `name` for `shape`; raises Unavailable or ConfigError."""
    return PEERS[name].make(shape) if name in PEERS else _mechanism(name, shape)


def peer_versions() -> dict[str, str]:
    """Return the versions of the packages that peers need, as far as they are installed."""
    found = {}
    for package in {peer.package for peer in PEERS.values() if peer.package}:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return dict(sorted(found.items()))
