"""What travels. A leaf is a tensor [..., n] or one of the classes here; all know decode, count, pack and unpack.

Bytes are those of float32 whatever the computing precision; `pack` and `count` agree to the byte, and both sides know
the kind, the sizes and the mask of a leaf, so that none of these travels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Quantised:
    """norm * codes / s."""

    norm: Tensor  # [..., 1]
    codes: Tensor  # [..., n] whole numbers in -s .. s
    s: int


@dataclass(frozen=True)
class Sparse:
    """n coordinates of `size`; the others ARE ZERO and count in the mean."""

    values: Leaf  # [..., n]
    index: Tensor  # [..., n]
    size: int


@dataclass(frozen=True)
class Partial:
    """The coordinates of `mask`; the others ARE ABSENT and do not count in the mean."""

    values: Leaf  # [..., P], zero outside the mask
    mask: Tensor  # [..., P] bool, known to both sides


Leaf = Tensor | Quantised | Sparse | Partial


class Count(NamedTuple):
    """Of each client's leaf: int64 arrays of the leading shape."""

    floats: np.ndarray
    bytes: np.ndarray


def over(leaf: Leaf, f) -> Leaf:
    """f on the tensor at the heart of a leaf."""
    return f(leaf) if isinstance(leaf, Tensor) else replace(leaf, values=over(leaf.values, f))


def decode(leaf: Leaf) -> Tensor:
    match leaf:
        case Quantised(norm, codes, s):
            return norm * codes / s
        case Sparse(values, index, size):
            v = decode(values)
            return v.new_zeros(*v.shape[:-1], size).scatter(-1, index, v)
        case Partial(values):
            return decode(values)
    return leaf


def width(leaf: Leaf) -> int:
    """The last axis of the decoded leaf."""
    match leaf:
        case Quantised(_, codes, _):
            return codes.shape[-1]
        case Sparse(_, _, size):
            return size
        case Partial(_, mask):
            return mask.shape[-1]
    return leaf.shape[-1]


def opened(tree: dict) -> dict:
    return {k: decode(v) for k, v in tree.items()}


def mask(leaf: Leaf) -> Tensor | None:
    return leaf.mask if isinstance(leaf, Partial) else None


def each(leaf: Leaf, f) -> Leaf:
    """f on every tensor of a leaf."""
    if isinstance(leaf, Tensor):
        return f(leaf)
    return replace(leaf, **{k: each(v, f) for k, v in vars(leaf).items() if not isinstance(v, int)})


def bits(s: int) -> int:
    """A sign and a level of 0 .. s."""
    return 1 + math.ceil(math.log2(s + 1))


def index_type(size: int) -> type:
    return next(t for t in (np.uint8, np.uint16, np.uint32, np.uint64) if size <= np.iinfo(t).max + 1)


def count(leaf: Leaf, vector: bool = True, itemsize: int = 4) -> Count:
    """What each client's leaf costs; scalars of a side field count as bytes, not as floats."""

    def of(leaf, n):  # n: how many of its coordinates travel, [...]
        match leaf:
            case Partial(values, mask):
                return of(values, mask.sum(-1).cpu().numpy())
            case Sparse(values, index, size):
                k = np.full(index.shape[:-1], index.shape[-1])
                return Count(2 * k, of(values, None).bytes + k * index_type(size)().nbytes)
            case Quantised(_, codes, s):
                n = np.full(codes.shape[:-1], codes.shape[-1]) if n is None else n
                return Count(n, itemsize + -(-n * bits(s) // 8))
        n = np.full(leaf.shape[:-1], leaf.shape[-1]) if n is None else n
        return Count(n if vector or leaf.shape[-1] > 1 else 0 * n, n * itemsize)

    return of(leaf, None)


def nbytes(leaf: Leaf, itemsize: int = 4) -> int:
    """The bytes of one client's leaf: len(pack(leaf))."""
    return int(count(leaf, itemsize=itemsize).bytes)


def pack(leaf: Leaf, dtype=np.float32, at=slice(None)) -> bytes:
    """One client's leaf as bytes, little-endian."""
    match leaf:
        case Partial(values, mask):
            return pack(values, dtype, mask)
        case Sparse(values, index, size):
            return index.cpu().numpy().astype(np.dtype(index_type(size)).newbyteorder("<")).tobytes() + pack(
                values, dtype
            )
        case Quantised(norm, codes, s):
            codes = codes[at].to(torch.int64).cpu().numpy()
            word = np.abs(codes) << 1 | (codes < 0)
            stream = word[:, None] >> np.arange(bits(s)) & 1
            return pack(norm, dtype) + np.packbits(stream.astype(np.uint8).ravel()).tobytes()
    return leaf[at].detach().cpu().numpy().astype(np.dtype(dtype).newbyteorder("<")).tobytes()


def unpack(data: bytes, like: Leaf, dtype=np.float32, at: Tensor | None = None) -> Leaf:
    """The leaf from its bytes; `like` gives the kind, the sizes, the mask and the computing precision."""

    def spread(v, full):
        return v if at is None else torch.zeros_like(full).masked_scatter(at, v)

    match like:
        case Partial(values, mask):
            return Partial(unpack(data, values, dtype, mask), mask)
        case Sparse(values, index, size):
            kind = np.dtype(index_type(size)).newbyteorder("<")
            cut = index.shape[-1] * kind.itemsize
            found = torch.from_numpy(np.frombuffer(data[:cut], kind).astype(np.int64))
            return Sparse(unpack(data[cut:], values, dtype), found, size)
        case Quantised(norm, codes, s):
            n = codes.shape[-1] if at is None else int(at.sum())
            head = np.dtype(dtype).itemsize
            stream = np.unpackbits(np.frombuffer(data[head:], np.uint8))[: n * bits(s)].reshape(n, bits(s))
            word = (stream.astype(np.int64) << np.arange(bits(s))).sum(1)
            found = torch.from_numpy(np.where(word & 1, -(word >> 1), word >> 1)).to(codes.dtype)
            return Quantised(unpack(data[:head], norm, dtype), spread(found, codes), s)
    values = torch.from_numpy(np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(np.float64))
    return spread(values.to(like.dtype), like)
