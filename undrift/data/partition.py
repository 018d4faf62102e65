"""Who has which samples: iid, Dirichlet (balanced or not), one class per client, or from a file.

Every partition is a function of the labels (None for a regression), the number of samples `n` and the seed. It ends for
any alpha and any number of clients, or says at once why it cannot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from undrift.errors import BadInput
from undrift.registry import Registry
from undrift.rng import Stream, Use
from undrift.userfiles import locate
from undrift.words import shown

Parts = list[np.ndarray]  # one sorted int64 array of sample numbers per client

BLOCK = 4096  # draws at a time of the balanced Dirichlet partition
TRIES = 100  # redraws of the unbalanced one
MIN_SIZE = 10


class Draw(IntEnum):
    """What a partition's draw is for."""

    SHARES = 1
    ORDER = 2
    CLASSES = 3
    SAMPLES = 4


def partition(
    table: Any,
    labels: np.ndarray | None,
    n: int,
    seed: int,
    folder: str | Path | None = None,
    key: str = "data.partition",
) -> Parts:
    """One index array per client, as the table (or name) at `key` says."""
    if isinstance(table, Mapping) and "file" in table and "name" not in table:
        table = {"name": "file", **table}
    given = {"labels": labels, "n": n, "seed": seed, "folder": folder, "key": key}
    parts = partitions.build(table, key=key, folder=folder, given=given)
    name = table["name"] if isinstance(table, Mapping) else table
    if isinstance(name, str) and name in partitions.names():
        return parts
    parts = parts if isinstance(parts, list | tuple) else []
    return _listed([np.asarray(rows).tolist() for rows in parts], n, f"{key}: {shown(name)}")


def iid(labels: np.ndarray | None, n: int, seed: int, clients: int, key: str = "data.partition") -> Parts:
    """Samples dealt at random, sizes equal but for one."""
    _check_clients(clients, n, key)
    return _sorted(np.array_split(_shuffled(n, seed), clients))


def dirichlet(
    labels: np.ndarray | None,
    n: int,
    seed: int,
    clients: int,
    alpha: float,
    balanced: bool = True,
    min_size: int | None = None,
    key: str = "data.partition",
) -> Parts:
    """Class shares from Dir(alpha).

    Balanced: each client's shares, under equal sizes. Otherwise each class's shares over the clients, redrawn until
    every client has `min_size` samples (10 unless said).
    """
    codes = _classes(labels, "dirichlet", key)
    _check_clients(clients, n, key)
    if not 0 < alpha < math.inf:
        raise BadInput(f"{key}.alpha is {alpha}, but must be a positive number")
    wanted = min_size if min_size is not None else 1 if balanced else MIN_SIZE
    if wanted < 1:
        raise BadInput(f"{key}.min_size is {wanted}, but every client needs at least 1 sample")
    if clients * wanted > n:
        raise BadInput(
            f"{key}.min_size: {clients} clients of at least {wanted} samples need {clients * wanted}, but there are "
            f"{n}; choose at most {max(1, n // wanted)} clients or a min_size of at most {n // clients}"
        )
    if balanced:
        return _balanced(codes, seed, clients, alpha)
    return _unbalanced(codes, seed, clients, alpha, wanted, key)


def one_class(labels: np.ndarray | None, n: int, seed: int, clients: int, key: str = "data.partition") -> Parts:
    """Each client has samples of one class, and each class as many clients as any other but for one."""
    codes = _classes(labels, "one-class", key)
    _check_clients(clients, n, key)
    counts = np.bincount(codes)
    if clients < len(counts):
        raise BadInput(
            f"{key}.clients is {clients}, but one-class needs at least one client for each of the {len(counts)} classes"
        )
    # Where classes and clients do not divide, the largest classes get the clients that are left.
    holders = np.full(len(counts), clients // len(counts))
    holders[np.argsort(-counts, kind="stable")[: clients % len(counts)]] += 1
    short = np.flatnonzero(counts < holders)
    if short.size:
        c = int(short[0])
        raise BadInput(
            f"{key}.clients is {clients}, but a class with {counts[c]} samples cannot be split over its "
            f"{holders[c]} clients; choose at most {int(counts.min()) * len(counts)} clients"
        )
    by_class = np.split(_shuffled_within(codes, seed), np.cumsum(counts)[:-1])
    parts = [part for rows, k in zip(by_class, holders, strict=True) for part in np.array_split(rows, k)]
    order = Stream(seed, Use.PARTITION, Draw.ORDER).permutations(clients)  # a client's number says nothing of its class
    return _sorted([parts[k] for k in order])


def from_file(n: int, file: str, folder: str | Path | None = None, key: str = "data.partition") -> Parts:
    """The index lists in a JSON file, one list per client, looked for beside the experiment."""
    where = f"{key}.file: {shown(file, 200)}"
    try:
        lists = json.loads(locate(file, f"{key}.file", folder).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{where} cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} is not JSON ({error})") from error
    return _listed(lists, n, where)


def _listed(lists, n: int, where: str) -> Parts:
    """Index lists that someone else wrote, every number looked at."""
    if not isinstance(lists, list) or not lists or not all(isinstance(rows, list) for rows in lists):
        raise BadInput(f"{where} must give a list with one list of sample numbers per client")
    return [_listed_client(rows, i, n, where) for i, rows in enumerate(lists)]


def _listed_client(rows: list, i: int, n: int, where: str) -> np.ndarray:
    if not rows:
        raise BadInput(f"{where} gives client {i} no samples; every client needs at least one")
    for row in rows:
        if type(row) is not int:
            raise BadInput(f"{where} gives client {i} the sample {shown(row)}, but samples are whole numbers")
        if not 0 <= row < n:
            raise BadInput(f"{where} gives client {i} the sample {row}, but samples go from 0 to {n - 1}")
    if len(set(rows)) < len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        raise BadInput(f"{where} gives client {i} the sample {twice} more than once")
    return np.array(rows, dtype=np.int64)


def _balanced(codes: np.ndarray, seed: int, clients: int, alpha: float) -> Parts:
    """Places are filled one at a time in a random order of clients, a class from the client's shares q_i ~ Dir(alpha);
    classes that are used up leave q_i, and the rest of q_i is scaled up."""
    n, left = len(codes), np.bincount(codes)
    sizes = np.full(clients, n // clients)
    sizes[: n % clients] += 1
    who = np.repeat(np.arange(clients), sizes)[Stream(seed, Use.PARTITION, Draw.ORDER).permutations(n)]
    draws = Stream(seed, Use.PARTITION, Draw.CLASSES).uniform(n)
    log_q = log_gamma(alpha, len(left), clients, Stream(seed, Use.PARTITION, Draw.SHARES))
    chosen = np.empty(n, dtype=np.int64)
    steps, done = _steps(log_q, left), 0
    while (
        done < n
    ):  # a block of draws is independent until a class is used up: keep it up to there, then draw on without it
        block = slice(done, done + BLOCK)
        c = (draws[block, None] >= steps[who[block]]).sum(1)
        keep = _until_used_up(c, left)
        chosen[done : done + keep] = c[:keep]
        done += keep
        after = left - np.bincount(c[:keep], minlength=len(left))
        if done < n and np.any((after == 0) & (left > 0)):
            steps = _steps(log_q, after)
        left = after
    rows = np.empty(n, dtype=np.int64)
    rows[np.argsort(chosen, kind="stable")] = _shuffled_within(codes, seed)
    return _sorted(np.split(rows[np.argsort(who, kind="stable")], np.cumsum(sizes)[:-1]))


def _steps(log_q: np.ndarray, left: np.ndarray) -> np.ndarray:
    """[clients, classes] upper ends of the classes' shares in [0, 1), of classes that are left. In logarithms, since a
    small alpha leaves clients whose other classes have shares below any float64."""
    logs = np.where(left > 0, log_q, -np.inf)
    ends = np.cumsum(np.exp(logs - logs.max(1, keepdims=True)), 1)
    steps = ends / ends[:, -1:]
    steps[:, np.flatnonzero(left)[-1] :] = 1.0  # the rounding of the sum must not reach a class that is used up
    return steps


def _until_used_up(c: np.ndarray, left: np.ndarray) -> int:
    """How many of the drawn classes can be kept before one is used up, that draw included."""
    keep = len(c)
    for k in np.flatnonzero(np.bincount(c, minlength=len(left)) >= np.maximum(left, 1)):
        keep = min(keep, int(np.flatnonzero(c == k)[left[k] - 1]) + 1)
    return keep


def _unbalanced(codes: np.ndarray, seed: int, clients: int, alpha: float, min_size: int, key: str) -> Parts:
    """Each class is cut at the cumulated shares of Dir(alpha) over the clients."""
    counts = np.bincount(codes)
    for attempt in range(TRIES):
        log_p = log_gamma(alpha, clients, len(counts), Stream(seed, Use.PARTITION, Draw.SHARES, attempt))
        ends = np.cumsum(np.exp(log_p - log_p.max(1, keepdims=True)), 1)
        cuts = np.rint(ends / ends[:, -1:] * counts[:, None]).astype(np.int64)  # [classes, clients]
        if np.diff(cuts, axis=1, prepend=0).sum(0).min() >= min_size:
            break
    else:
        raise BadInput(
            f"{key}: after {TRIES} draws some client still has fewer than min_size = {min_size} samples; choose a "
            f"larger alpha than {alpha}, fewer clients than {clients}, a smaller min_size, or balanced = true"
        )
    by_class = np.split(_shuffled_within(codes, seed), np.cumsum(counts)[:-1])
    pieces = [np.split(rows, cut[:-1]) for rows, cut in zip(by_class, cuts, strict=True)]
    return _sorted([np.concatenate(mine) for mine in zip(*pieces, strict=True)])


def log_gamma(alpha: float, n: int, lanes: int, stream: Stream) -> np.ndarray:
    """[lanes, n] logarithms of Gamma(alpha) draws; normalised over n (a softmax) they are Dir(alpha).

    Marsaglia and Tsang (2000), their boost for alpha < 1 in logarithms, so that no alpha is too small. Attempts go on,
    in lanes of their own, until each number is accepted.
    """
    alpha = max(alpha, 1e-300)  # shares are one class each long before
    boost = alpha < 1
    d = alpha + boost - 1 / 3
    c = 1 / math.sqrt(9 * d)
    out = np.full((lanes, n), np.nan)
    lane = np.arange(lanes)
    attempt = 0
    while np.isnan(out).any():
        u = stream.uniform(3 * n, lane + (attempt << 32))
        x = np.sqrt(-2 * np.log1p(-u[:, :n])) * np.cos(2 * np.pi * u[:, n : 2 * n])
        v = np.maximum(1 + c * x, 0) ** 3
        with np.errstate(divide="ignore", invalid="ignore"):  # v = 0 is never accepted
            good = np.log1p(-u[:, 2 * n :]) < 0.5 * x**2 + d * (1 - v + np.log(v))
            out = np.where(np.isnan(out) & (v > 0) & good, np.log(d) + np.log(v), out)
        attempt += 1
    if boost:
        out += np.log1p(-stream.uniform(n, lane + (attempt << 32))) / alpha
    return out


def _classes(labels: np.ndarray | None, name: str, key: str) -> np.ndarray:
    """The labels as codes 0, 1, ... without gaps."""
    if labels is None:
        raise BadInput(f'{key}.name = "{name}" splits by class, but these data have no classes; take "iid"')
    return np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _check_clients(clients: int, n: int, key: str) -> None:
    if clients < 1:
        raise BadInput(f"{key}.clients is {clients}, but must be at least 1")
    if clients > n:
        raise BadInput(f"{key}.clients is {clients}, but with {n} samples there can be at most {n} clients")


def _shuffled(n: int, seed: int) -> np.ndarray:
    return Stream(seed, Use.PARTITION, Draw.SAMPLES).permutations(n)


def _shuffled_within(codes: np.ndarray, seed: int) -> np.ndarray:
    """All samples, class after class, shuffled within each."""
    rows = _shuffled(len(codes), seed)
    return rows[np.argsort(codes[rows], kind="stable")]


def _sorted(parts) -> Parts:
    return [np.sort(part).astype(np.int64) for part in parts]


partitions = Registry("partition")
partitions.add("iid", iid)
partitions.add("dirichlet", dirichlet, "class shares from Dir(alpha), in equal sizes (balanced) or not")
partitions.add("one-class", one_class)
partitions.add("file", from_file)
