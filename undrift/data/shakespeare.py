"""The plays of Shakespeare by role: LEAF's next character task (Caldas et al., 2018)."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from undrift.data.embedded import decoded
from undrift.data.source import Samples, Source
from undrift.errors import BadInput
from undrift.rng import Stream, Use

WINDOW = 80  # characters that predict the next one
TRAIN = 0.8  # of a role's windows


class Shakespeare(Source):
    """The 1,129 roles with two speeches or more as clients; 80 characters predict the next one.

    A role's first 80 % of windows train; its test windows begin where the text of the training windows, targets
    included, has ended. A role shorter than one window is padded on the left with code 0, so that each has a training
    sample. `test()` is a fixed draw of at most `test_size` of all test windows, the same for every seed; `groups()` are
    the roles that have test windows, a fixed draw of at most `group_size` of each, since all 760,000 would take longer
    than the training.
    """

    def __init__(self, test_size: int = 20_000, group_size: int = 50):
        for name, value in (("test_size", test_size), ("group_size", group_size)):
            if value < 1:
                raise BadInput(f"data.{name} is {value}, but must be at least 1")
        found = decoded("shakespeare.json.xz", _decode)
        lengths = found["lengths"].astype(np.int64)
        self.vocabulary = "\0" + found["characters"].tobytes().decode("ascii")  # code -> character
        self.population, self.classes = len(lengths), len(self.vocabulary)
        windows = lengths - WINDOW
        self._starts = np.cumsum(lengths) - lengths
        self._train = np.maximum(1, (TRAIN * windows).astype(np.int64))
        self._tested = np.maximum(0, windows - self._train - WINDOW)
        self._codes = np.asarray(found["corpus"])
        self._corpus = torch.from_numpy(self._codes)
        self._test_rows = self._test_windows(test_size)
        self._group_rows = self._group_windows(group_size)

    def size(self, i: int) -> int:
        return int(self._train[i])

    def sizes(self, clients: np.ndarray) -> np.ndarray:
        return self._train[clients]

    def client(self, i: int) -> Samples:
        return self._fetch(torch.from_numpy(self._rows(i)))

    def test(self) -> Samples:
        return self._fetch(self._test_rows)

    def groups(self) -> list[Samples]:
        return [self._fetch(rows) for rows in self._group_rows]

    def labels(self, i: int) -> np.ndarray:
        return self._codes[self._rows(i) + WINDOW].astype(np.int64)

    def open(self, clients: Sequence[int]):
        return [self._rows(i) for i in clients], self._fetch

    def to(self, device: torch.device | str) -> Shakespeare:
        moved = super().to(device)
        moved._corpus = self._corpus.to(moved.device)
        return moved

    def _rows(self, i: int) -> np.ndarray:
        """Where client i's training windows start in the corpus: the row number of a sample."""
        return np.arange(self._starts[i], self._starts[i] + self._train[i])

    def _fetch(self, rows: Tensor) -> Samples:
        windows = self._corpus.unfold(0, WINDOW + 1, 1)  # [positions, 81], a view
        text = windows[rows.to(self._corpus.device)].to(torch.int64)
        return text[..., :WINDOW].contiguous(), text[..., WINDOW].contiguous()

    def _first_test(self) -> np.ndarray:
        """Where each role's first test window starts: after the last training target."""
        return self._starts + self._train + WINDOW

    def _test_windows(self, size: int) -> Tensor:
        total = int(self._tested.sum())
        chosen = Stream(0, Use.DATA).subset(total, min(size, total))  # numbers of windows, all roles' one after another
        ends = np.cumsum(self._tested)
        role = np.searchsorted(ends, chosen, side="right")
        return torch.from_numpy(self._first_test()[role] + chosen - (ends - self._tested)[role])

    def _group_windows(self, size: int) -> list[Tensor]:
        first = self._first_test()
        return [
            torch.from_numpy(first[i] + Stream(0, Use.DATA, int(i)).subset(int(n), min(size, int(n))))
            for i, n in enumerate(self._tested)
            if n
        ]


def _decode(packed: bytes) -> dict[str, np.ndarray]:
    """The roles' texts one after another as codes, their lengths with padding, and the characters of codes 1, 2, ..."""
    roles = [r["speeches"] for r in json.loads(lzma.decompress(packed)) if len(r["speeches"]) >= 2]
    texts = ["\n".join(speeches).encode("ascii") for speeches in roles]
    texts = [text.rjust(WINDOW + 1, b"\0") for text in texts]
    raw = np.frombuffer(b"".join(texts), dtype=np.uint8)
    characters, corpus = np.unique(np.append(raw, np.uint8(0)), return_inverse=True)
    return {
        "corpus": corpus[:-1].astype(np.uint8),
        "lengths": np.array([len(text) for text in texts], dtype=np.int64),
        "characters": characters[1:],
    }
