"""The next-character model of LEAF (Caldas et al., 2018) for Shakespeare."""

from __future__ import annotations

from torch import Tensor, nn

from .shapes import Size


class CharLSTM(nn.Module):
    """Characters [B, T] to logits [B, classes] of the one that follows: an embedding, an LSTM and its last output.

    The cells are PyTorch's own, which a CPU runs fused for one client after another: measured five times as quick per
    client and step as cells written out for vmap, which reads every client's matrices again at every character.
    """

    def __init__(self, classes: int, embedding: int, hidden: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(x))
        return self.head(outputs[:, -1])


def char_lstm(classes: Size, embedding: Size = 8, hidden: Size = 256, layers: Size = 2) -> nn.Module:
    """LEAF's character LSTM; `classes` is the size of the alphabet."""
    return CharLSTM(classes, embedding, hidden, layers)
