"""The compiled walk's data structure and its calls; mirrors kernel/problem.h."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from slayformer.attention.backends.build import BuildError, load_library

# kinds of parts, near kernels and near rules
SQUARES, LINEAR, FACTOR = range(3)
NO_KERNEL, YAT, EXPONENTIAL = range(3)
EVERY_PAIR, SAME_STRETCH, CLOSER = range(3)
# what becomes of a product's columns
ACTIVATIONS = {"identity": 0, "square": 1, "exponent": 2, "gated": 3}
MOST_PARTS = 8


class Rows(Structure):
    """A [B, H, T, width] tensor whose last stride is 1."""

    _fields_: ClassVar = [("data", c_void_p), *((n, c_int64) for n in ("batch", "head", "token"))]

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """Return the rows of `x`, which must live as long."""
        return cls(x.data_ptr(), *x.stride()[:3])


class Part(Structure):
    """Columns of the features' factors."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("kind", "width", "block")),
        *((name, Rows) for name in ("query", "key", "d_query", "d_key")),
    ]


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Problem(Structure):
    """Everything a call is told."""

    _fields_: ClassVar = [
        *_fields(c_int64, "batch heads length lag absent strict value_width feature_count chunk"),
        *_fields(c_int64, "segments threads has_past has_future is_bf16 is_quotient parts"),
        ("part", Part * MOST_PARTS),
        *_fields(c_void_p, "query_projection key_projection"),
        *_fields(c_int64, "near_kind near_rule near_size near_width"),
        ("near_factor", c_double),
        *_fields(Rows, "near_query near_key d_near_query d_near_key"),
        *_fields(c_void_p, "epsilon near_scale offset d_epsilon d_near_scale"),
        *_fields(Rows, "value d_value output d_output normaliser d_normaliser"),
        *_fields(c_void_p, "memory d_memory_after memory_after d_memory"),
        *_fields(c_void_p, "query_positions key_positions query_documents key_documents"),
        *_fields(c_void_p, "first_document key_mask"),
    ]


class ColumnsOfProduct(Structure):
    """Columns that one activation takes."""

    _fields_: ClassVar = _fields(c_int64, "activation width block")


class Projection(Structure):
    """Vectors, and the product and activations that make factors of them."""

    _fields_: ClassVar = [
        *_fields(c_int64, "width columns outputs is_bf16 parts"),
        ("part", ColumnsOfProduct * MOST_PARTS),
        ("floor", c_double),
        *_fields(Rows, "x d_x"),
        *_fields(c_void_p, "weight bias d_weight d_bias"),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled library with its functions declared; raises BuildError."""
    loaded = load_library()
    loaded.slay_bytes.restype = c_int64
    if loaded.slay_bytes() != ctypes.sizeof(Problem) + ctypes.sizeof(Projection):
        raise BuildError("kernel/problem.h and backends/engine.py differ")
    for call in (loaded.slay_forward, loaded.slay_backward):
        call.argtypes, call.restype = [POINTER(Problem)], ctypes.c_int
    return loaded


def run(problem: Problem, *, backward: bool) -> None:
    """Run one pass; raises MemoryError."""
    problem.threads = torch.get_num_threads()
    call = library().slay_backward if backward else library().slay_forward
    if call(ctypes.byref(problem)):
        raise MemoryError("the compiled attention ran out of memory")
