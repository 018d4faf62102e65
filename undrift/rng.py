"""Draws as pure functions of counters: Philox 4x32-10 (Salmon et al., 2011).

Nothing here has a state. A number is addressed by (seed, use, numbers, lane, position), so that a cohort, a chunk, a
rank or a resumed run finds the same bits whatever was drawn before it. `philox` is written with the operators that
Python integers, NumPy int64 arrays and torch int64 tensors share: the same bits from all three, on any device.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

WORD = 0xFFFFFFFF


class Use(IntEnum):
    """What a draw is for. Numbers are part of the format of a run: add at the end, never renumber."""

    COHORT = 1
    BATCHES = 2
    PARTITION = 3
    MODEL = 4
    DATA = 5
    HOLDOUT = 6
    DROPOUT = 7
    AUGMENT = 8
    BLOCKS = 9
    ROUNDING = 10
    LOST = 11


def philox(counter, key):
    """Ten rounds on a counter of four 32-bit words under a key of two.
    Words are ints or int64 arrays that broadcast."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        # A product of two words may pass 2^63 and wrap; its bits do not change, and the mask drops the copied sign.
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32 & WORD) ^ b ^ k, q & WORD, (p >> 32 & WORD) ^ d ^ m, p & WORD
        k, m = k + 0x9E3779B9 & WORD, m + 0xBB67AE85 & WORD
    return a, b, c, d


class Stream:
    """All the draws of one use: `Stream(seed, Use.BATCHES, round, epoch).permutations(sizes, clients)`.

    `lane` tells clients (or any other parallel rows) apart: an int, or an array whose shape the result leads with.
    """

    def __init__(self, seed: int, use: Use, *numbers: int):
        key = (seed & WORD, seed >> 32 & WORD)
        for n in (int(use), *numbers):
            key = philox((n & WORD, n >> 32 & WORD, 0, 0), key)[:2]
        self.key = key

    def words(self, n: int, lane=0) -> np.ndarray:
        """[*lane, n] whole numbers from 0 to 2^32 - 1, as int64."""
        lane = np.asarray(lane, dtype=np.int64)[..., None]
        block = np.arange(-(-n // 4), dtype=np.int64)
        out = philox((block, np.int64(0), lane & WORD, lane >> 32 & WORD), self.key)
        return np.stack(np.broadcast_arrays(*out), -1).reshape(*lane.shape[:-1], -1)[..., :n]

    def longs(self, n: int, lane=0) -> np.ndarray:
        """[*lane, n] whole numbers from 0 to 2^63 - 1."""
        w = self.words(2 * n, lane)
        return (w[..., 0::2] << 31) ^ w[..., 1::2] >> 1

    def uniform(self, n: int, lane=0) -> np.ndarray:
        """[*lane, n] float64 in [0, 1), 53 bits each."""
        return (self.longs(n, lane) >> 10) * 2.0**-53

    def normal(self, n: int, lane=0) -> np.ndarray:
        """[*lane, n] standard normal float64 (Box and Muller)."""
        u = self.uniform(2 * n, lane)
        return np.sqrt(-2 * np.log1p(-u[..., 0::2])) * np.cos(2 * np.pi * u[..., 1::2])

    def below(self, bounds, lane=0) -> np.ndarray:
        """[*lane, n] whole numbers, the i-th below bounds[i] (up to 2^53; the bias is under 2^-10 even there)."""
        bounds = np.asarray(bounds, dtype=np.int64)
        u = self.longs(len(bounds), lane)
        if bounds.max(initial=0) < 1 << 31:  # exact high half of u * bound from two products that fit 63 bits
            return ((u >> 32) * bounds + ((u & WORD) * bounds >> 32)) >> 31
        return np.array(
            [[int(v) * int(b) >> 63 for v, b in zip(row, bounds, strict=True)] for row in u.reshape(-1, len(bounds))],
            dtype=np.int64,
        ).reshape(u.shape)

    def permutations(self, sizes, lane=0) -> np.ndarray:
        """[*lane, max(sizes)]: each row permutes the numbers below its size; those from size on follow."""
        sizes = np.asarray(sizes, dtype=np.int64)
        n = int(sizes.max(initial=0))
        keys = self.longs(n, lane)
        keys = np.where(np.arange(n) < sizes[..., None], keys, np.iinfo(np.int64).max)
        return np.argsort(keys, axis=-1, kind="stable")

    def subset(self, population: int, n: int) -> np.ndarray:
        """n different numbers below `population`, sorted, every set equally likely, in O(n) (Floyd's method)."""
        tops = np.arange(population - n, population, dtype=np.int64)
        chosen: set[int] = set()
        for top, t in zip(tops.tolist(), self.below(tops + 1).tolist(), strict=True):
            chosen.add(top if t in chosen else t)
        return np.array(sorted(chosen), dtype=np.int64)

    def scattered(self, positions, population: int) -> np.ndarray:
        """Where a fixed permutation of 0 .. population - 1 sends `positions`, without holding it: a Feistel network of
        twelve rounds on the next even number of bits, walked until it is back inside."""
        half = max(1, (max(population - 1, 1).bit_length() + 1) // 2)
        mask = (1 << half) - 1
        out = np.array(positions, dtype=np.int64)
        todo = np.arange(out.size)
        while todo.size:
            left, right = out[todo] >> half, out[todo] & mask
            for r in range(12):
                left, right = (
                    right,
                    left ^ philox((right, np.array([r]), np.array([0]), np.array([0])), self.key)[0] & mask,
                )
            out[todo] = left << half | right
            todo = todo[out[todo] >= population]
        return out
