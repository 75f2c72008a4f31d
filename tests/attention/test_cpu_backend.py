"""The compiled CPU backend equals the fp64 torch walk: outputs, states and every gradient.

The reference itself is proved against dense forms in test_contract.py. The sanitizers' build of
the same source passes these tests too: see `test_the_sanitizers_find_nothing`.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import platform
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention import backends
from slayformer.attention.backends import build, cpu, engine
from slayformer.attention.features import Dense, Kronecker
from slayformer.attention.linear import LinearAttention
from slayformer.attention.near import LARGEST_SCORE
from slayformer.errors import ConfigError
from slayformer.presets import load_preset
from slayformer.registry import build_attention

ROOT = Path(__file__).parents[2]
HEADS, WIDTH = 2, 16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}

# by name: the YAML and what is changed in it
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("slay", {}),
    "best": ("slay_best", {"far_scale": 0.7}),
    "Yat near": (
        "slay_best",
        {"local_kernel": "yat", "local_size": 24, "learnable_epsilon": True}
        | {"far_scale": 0.25, "last_far_scale": None},
    ),
    "based": ("based", {}),
}
MORE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "trainable paper": ("slay", {"trainable": True, "local": "chunk", "far_scale": 1.3}),
    "learned ⊗ exponentials": (
        "slay",
        {"polynomial": "learned_quadratic", "block_width": 3, "polynomial_features": 18},
    ),
    "one ε": ("slay_best", {"local_kernel": "yat", "local_size": 4, "epsilon": 0.1}),
    "wide blocks": ("slay_best", {"block_width": 16, "polynomial_features": 136}),
    "block_quadratic": ("slay_block_quadratic", {"local": "window", "local_size": 5}),
    "rotated exponentials": ("slay", {"polynomial": "block_quadratic", "polynomial_features": 17}),
    "exact": ("slay_exact_poly", {}),
    "hadamard": ("slay_hadamard", {"local": "chunk"}),
    "laplace": ("slay_laplace", {"local": "chunk", "local_size": 16}),
    "softmax in chunks": ("slay_best", {"local": "chunk", "local_size": 20}),
    "softmax beside ⊗": ("slay", {"local": "window", "local_kernel": "softmax", "local_size": 9}),
    # softmax's far share would be so small here that its scale's gradient cancels in fp32
    "long stretches": (
        "slay_best",
        {"local_kernel": "yat", "local_size": 100, "far_scale": 0.25},
    ),
    "linear_elu": ("linear_elu", {}),
    "performer": ("performer", {}),
    "performer_favor": ("performer_favor", {}),
    "cosformer": ("cosformer", {}),
    "hedgehog": ("hedgehog", {}),
}
LENGTHS: list[Any] = [1, 7, 63, 64, 65, 1000]
LENGTHS += [pytest.param(length, marks=pytest.mark.slow) for length in (4097, 65537)]


def make(case: str, backend: str, **sizes: int) -> LinearAttention:
    """Return the mechanism of a case, its parameters moved off their starts."""
    name, changes = (CASES | MORE_CASES)[case]
    config = load_preset(name, backend=backend, **changes)
    heads, width = sizes.get("num_heads", HEADS), sizes.get("head_dim", WIDTH)
    attention = build_attention(
        config, num_heads=heads, head_dim=width, max_sequence_length=70_000, seed=7
    )
    assert isinstance(attention, LinearAttention)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.1)
    return attention


def draw(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, count: int = 4
) -> list[Tensor]:
    """Return `count` tensors as fp64 that `dtype` can hold; heads stride as a model's do."""
    draws = torch.Generator().manual_seed(seed)
    batch, heads, length, width = shape
    drawn = (torch.randn(batch, length, heads, width, generator=draws) for _ in range(count))
    return [x.to(dtype).double().transpose(1, 2) for x in drawn]


def results(
    attention: LinearAttention, dtype: torch.dtype, tensors: list[Tensor], **options: Any
) -> list[Tensor]:
    """Return y and the gradients of q, k, v and of the parameters for a weighted sum of y."""
    *heads, weight = tensors
    q, k, v = (x.to(dtype).requires_grad_() for x in heads)
    y, _ = attention(q, k, v, **options)
    assert y.dtype == dtype
    parameters = list(attention.parameters())
    found = torch.autograd.grad(
        (y.double() * weight).sum(), (q, k, v, *parameters), materialize_grads=True
    )
    return [y.detach(), *found]


def errors(found: list[Tensor], reference: list[Tensor], floor: float) -> list[float]:
    """Return relative RMS errors; sizes below `floor` times that of dv count as that."""
    least = floor * float(reference[3].norm()) / reference[3].numel() ** 0.5
    assert all(torch.isfinite(x).all() for x in found)
    return [
        float((x.double() - y).norm()) / max(float(y.norm()), least * y.numel() ** 0.5)
        for x, y in zip(found, reference, strict=True)
    ]


def compare(
    case: str,
    run: Callable[[LinearAttention, torch.dtype], list[Tensor]],
    dtype: torch.dtype = torch.float32,
    floor: float = 0.1,
    **sizes: int,
) -> None:
    """Compare what `run` finds with the compiled walk in `dtype` and with torch in fp64."""
    reference = run(make(case, "torch", **sizes), torch.float64)
    found = errors(run(make(case, "cpu", **sizes), dtype), reference, floor)
    for number, error in enumerate(found):
        assert error <= TOLERANCE[dtype], f"result {number}: {error:.1e}"


def check(case: str, length: int, dtype: torch.dtype = torch.float32, **sizes: int) -> None:
    """Compare y and all gradients for one sequence."""
    shape = (1, sizes.get("num_heads", HEADS), length, sizes.get("head_dim", WIDTH))
    tensors = draw(*shape, dtype=dtype)
    # a query that sees one key gives its v back: dq and dk vanish
    floor = 1.0 if length == 1 else 0.1
    compare(case, lambda walk, dtype: results(walk, dtype, tensors), dtype, floor, **sizes)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", LENGTHS)
def test_output_and_gradients_equal_the_reference(case: str, length: int) -> None:
    check(case, length)


@pytest.mark.parametrize("case", MORE_CASES)
def test_every_map_is_covered(case: str) -> None:
    # in one chunk, and through the state
    check(case, 150)
    check(case, 650)


@pytest.mark.parametrize("case", ["paper", "best"])
@pytest.mark.parametrize("width", [20, 64, 128])
def test_head_widths(case: str, width: int) -> None:
    check(case, 130, head_dim=width, num_heads=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case: str, dtype: torch.dtype) -> None:
    check(case, 70, dtype, head_dim=32)
    check(case, 800, dtype, head_dim=32, num_heads=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [*LENGTHS[:-1], 2048])
def test_bf16_at_every_length(case: str, length: int) -> None:
    check(case, length, torch.bfloat16, head_dim=64, num_heads=1)


@pytest.mark.parametrize("case", ["paper", "best"])
def test_half_precision_of_values_far_from_zero(case: str) -> None:
    # what the state gives a gradient is then a small difference of large sums
    q, k, v, weight = draw(1, 1, 800, 32, dtype=torch.bfloat16)
    tensors = [q, k, (v + 1).bfloat16().double(), weight]
    compare(
        case,
        lambda walk, dtype: results(walk, dtype, tensors),
        torch.bfloat16,
        num_heads=1,
        head_dim=32,
    )


@pytest.mark.parametrize("case", ["best", "softmax in chunks"])
def test_scores_beyond_the_largest_exponent(case: str) -> None:
    q, k, v, weight = draw(1, HEADS, 200, WIDTH)
    # of some pairs beyond, of most not, of some e^−40 and less
    tensors = [8 * q, 8 * k, v, weight]
    scores = (tensors[0] @ tensors[1].mT) / WIDTH**0.5
    assert 0.02 < float((scores > LARGEST_SCORE).double().mean()) < 0.3
    compare(case, lambda walk, dtype: results(walk, dtype, tensors))


@pytest.mark.parametrize("case", CASES)
def test_half_precision_with_documents_padding_and_states(case: str) -> None:
    mask = torch.ones(1, 333, dtype=torch.bool)
    mask[:, -9:] = False
    options = {"mask": mask, "document_ids": torch.arange(333)[None] // 170}
    *heads, weight = draw(1, HEADS, 333, WIDTH, dtype=torch.bfloat16)
    real = mask[:, None, :, None]

    def packed(walk: LinearAttention, dtype: torch.dtype) -> list[Tensor]:
        y, *gradients = results(walk, dtype, [*heads, weight * real], **options)
        return [y * real, *gradients]

    compare(case, packed, torch.bfloat16)
    tensors = [*heads, weight]
    compare(case, lambda walk, dtype: stepwise(walk, dtype, tensors, [65, 200]), torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_padding_documents_and_all_sides(case: str) -> None:
    length = 331
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :70] = mask[1, -9:] = False
    documents = (torch.arange(length) // torch.tensor([[50], [130]])).contiguous()
    *heads, weight = draw(2, HEADS, length, WIDTH)
    for options in (
        {"mask": mask},
        {"document_ids": documents},
        {"mask": mask, "document_ids": documents},
        {"causal": False},
        {"causal": False, "mask": mask, "document_ids": documents},
    ):
        real = mask[:, None, :, None] if "mask" in options else torch.ones(1)

        def run(walk: LinearAttention, dtype: torch.dtype, options=options, real=real):
            # a padded query's output means nothing
            y, *gradients = results(walk, dtype, [*heads, weight * real], **options)
            return [y * real, *gradients]

        compare(case, run)


def stepwise(
    attention: LinearAttention, dtype: torch.dtype, tensors: list[Tensor], cuts: list[int]
) -> list[Tensor]:
    """Return what `results` does for calls on pieces, the last state's gradient taken too."""
    *heads, weight = tensors
    q, k, v = (x.to(dtype).requires_grad_() for x in heads)
    state = attention.init_state(q.shape[0], value_dim=v.shape[-1])
    pieces, bounds = [], [0, *cuts, q.shape[2]]
    for start, stop in pairwise(bounds):
        y, state = attention(*(x[:, :, start:stop] for x in (q, k, v)), state=state)
        pieces.append(y)
    y, memory = torch.cat(pieces, dim=2), state.memory_BHMN
    draws = torch.Generator().manual_seed(5)
    of_memory = torch.randn(memory.shape, generator=draws, dtype=torch.float64)
    total = (y.double() * weight).sum() + (memory.double() * of_memory).sum() / 100
    parameters = list(attention.parameters())
    found = torch.autograd.grad(total, (q, k, v, *parameters), materialize_grads=True)
    return [y.detach(), *found, memory.detach()]


@pytest.mark.parametrize("case", CASES)
def test_states_in_and_out(case: str) -> None:
    draws = torch.Generator().manual_seed(3)
    cuts = sorted(torch.randperm(399, generator=draws)[:4].add(1).tolist())
    tensors = draw(2, HEADS, 400, WIDTH)
    compare(case, lambda walk, dtype: stepwise(walk, dtype, tensors, cuts))


@pytest.mark.parametrize("case", CASES)
def test_other_value_width_and_plain_strides(case: str) -> None:
    q, k = (x.contiguous() for x in draw(1, HEADS, 90, WIDTH, count=2))
    # columns of a wider tensor, and a transpose: the last stride is not 1
    v = draw(1, HEADS, 90, 64)[0][..., 3:40]
    v = v.mT.contiguous().mT
    weight = torch.ones_like(v)
    compare(case, lambda walk, dtype: results(walk, dtype, [q, k, v, weight]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 3])
def test_two_runs_are_bit_equal(case: str, threads: int) -> None:
    attention = make(case, "cpu", num_heads=1)
    tensors = draw(1, 1, 900, WIDTH)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        runs = [
            [results(attention, dtype, tensors) for _ in range(2)]
            for dtype in (torch.float32, torch.bfloat16)
        ]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for one, two in runs for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_head_is_cut_into_stretches_for_more_threads(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    documents = (torch.arange(700) >= 333).long()[None]
    tensors = draw(1, 1, 700, WIDTH)
    compare(case, lambda walk, dtype: results(walk, dtype, tensors), num_heads=1)
    packed = {"document_ids": documents}
    compare(case, lambda walk, dtype: results(walk, dtype, tensors, **packed), num_heads=1)
    compare(case, lambda walk, dtype: stepwise(walk, dtype, tensors, [211]), num_heads=1)


def test_auto_takes_the_compiled_walk_and_fp64_goes_to_torch(monkeypatch: pytest.MonkeyPatch):
    called: list[str] = []
    for name, backend in backends.BACKENDS.items():

        def spy(*arguments: Any, name=name, apply=backend.apply) -> Any:
            called.append(name)
            return apply(*arguments)

        monkeypatch.setitem(backends.BACKENDS, name, dataclasses.replace(backend, apply=spy))
    attention = make("best", "auto")
    attention(*(x.float() for x in draw(1, HEADS, 5, WIDTH, count=3)))
    attention(*draw(1, HEADS, 5, WIDTH, count=3))
    assert called == ["cpu", "torch"]
    with pytest.raises(ConfigError, match=r"attention\.backend=cpu: .*float64"):
        make("best", "cpu")(*draw(1, HEADS, 5, WIDTH, count=3))


def test_a_map_it_does_not_know_runs_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Dense(torch.ones(1, HEADS, 5, 1))
    with pytest.raises(cpu.NotCovered):
        cpu.factors(Kronecker(Kronecker(one, one), one))
    q, k, v = (x.float() for x in draw(1, HEADS, 5, WIDTH, count=3))
    expected, _ = make("linear_elu", "torch")(q, k, v)

    def refuse(features: Any) -> Any:
        raise cpu.NotCovered("this one")

    monkeypatch.setattr(cpu, "factors", refuse)
    assert torch.equal(make("linear_elu", "auto")(q, k, v)[0], expected)
    with pytest.raises(ConfigError, match=r"attention\.backend=cpu: .*this one"):
        make("linear_elu", "cpu")(q, k, v)


def test_quadratic_mechanisms_refuse_it() -> None:
    with pytest.raises(ConfigError, match=r"attention\.backend=cpu: softmax .* auto, torch"):
        load_preset("softmax", backend="cpu")
    assert load_preset("softmax", backend="torch").backend == "torch"


@pytest.fixture
def fresh_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Forget the library, use an empty cache, and forget it again afterwards."""
    library = Path(engine.library()._name)
    for kept in (engine.library, build._load_once, backends._warn):
        kept.cache_clear()
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    yield library
    for kept in (engine.library, build._load_once, backends._warn):
        kept.cache_clear()


def compiler(folder: Path, library: Path, sleep_s: float) -> str:
    """Return a compiler that takes `sleep_s` and copies `library`; it notes every call."""
    script = folder / "compiler"
    script.write_text(
        f"#!/bin/sh\necho called >> {folder}/calls\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'printf half > "$2"\nsleep {sleep_s}\ncp {library} "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_processes_that_start_at_once_compile_once(fresh_build, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, fresh_build, 0.5))
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=build.load_library) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "calls").read_text().splitlines() == ["called"]
    assert Path(build.load_library()._name).parent == tmp_path / "cache"


def test_a_build_that_was_killed_is_done_again(fresh_build, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, fresh_build, 0.5))
    worker = multiprocessing.get_context("fork").Process(target=build.load_library)
    worker.start()
    while not (tmp_path / "calls").exists():
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    assert not list((tmp_path / "cache").glob("*.so"))
    assert build.load_library().slay_bytes() > 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


@pytest.mark.parametrize("broken", [False, True])
def test_without_a_compiler_torch_takes_over_with_one_warning(
    broken, fresh_build, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/bin/false" if broken else "")
    q, k, v = (x.float() for x in draw(1, HEADS, 9, WIDTH, count=3))
    attention = make("best", "auto")
    with pytest.warns(UserWarning, match="compiler|failed") as caught:
        y, _ = attention(q, k, v)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v)
    assert torch.equal(y, make("best", "torch")(q, k, v)[0])
    with pytest.raises(ConfigError, match=r"attention\.backend=cpu"):
        make("best", "cpu")(q, k, v)


def run_tests(chosen: str, environment: dict[str, str]) -> None:
    """Run tests of this file on another build of the library."""
    command = [sys.executable, "-m", "pytest", "-qx", "-m", "not slow", "-k", chosen, __file__]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


another_build = pytest.mark.skipif(
    build.FLAGS_VARIABLE in os.environ, reason="this is the run on another build"
)


@pytest.mark.slow
@another_build
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are an x86 compiler's flags")
@pytest.mark.parametrize("flags", ["-mno-avx512bf16", "-mno-avx512f", "-mno-avx"])
def test_processors_that_know_less(flags: str) -> None:
    run_tests("widths or half", {build.FLAGS_VARIABLE: flags})


@pytest.mark.slow
@another_build
def test_the_sanitizers_find_nothing() -> None:
    """The fast tests of this file on a build with AddressSanitizer and UBSan."""
    runtime = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    environment = {
        build.FLAGS_VARIABLE: flags,
        "LD_PRELOAD": " ".join(path.strip() for path in runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    run_tests("covered or widths or half or padding or states or strides or stretches", environment)
