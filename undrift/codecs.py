"""What is sent in few bits: QSGD and FedPAQ (Alistarh et al., 2017; Reisizadeh et al., 2020), top-k, error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import zeros_like

from .algorithm import Codec, Upload
from .wire import Quantised, Sparse, over

Levels = Annotated[int, Field(ge=1, le=2**23)]
Many = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class QSGD(Codec):
    """|v|_2 sign(v_j) (l + [u_j < a - l]) / s, a = s |v_j| / |v|_2, l = floor(a); one norm for the message"""

    s: Levels = 127

    def encode(self, info, name, leaf):
        u = info.uniform(name)

        def quantise(v):
            norm = v.norm(dim=-1, keepdim=True)
            a = self.s * v.abs() / torch.where(norm > 0, norm, 1)
            low = a.floor()
            return Quantised(norm, v.sign() * (low + (u < a - low)), self.s)

        return over(leaf, quantise)


@dataclass(frozen=True)
class TopK(Codec):
    """The k coordinates of the largest |v_j|; of equals the one with the smaller index"""

    k: Many

    def encode(self, info, name, leaf):
        def largest(v):
            index = torch.sort(v.abs(), dim=-1, descending=True, stable=True).indices[..., : self.k]
            return Sparse(v.gather(-1, index), index, v.shape[-1])

        return over(leaf, largest)


class ErrorFeedback(Upload):
    """Send dx + e; e+ = what of it did not arrive. Any codec goes outside."""

    def init(self, x):
        return {}, {"e": zeros_like(x)}

    def client(self, work, e, **rest):
        up, mine = self.inner.client(work, **rest)
        dx = up["dx"] + e
        return up | {"dx": dx}, mine | {"e": dx}

    def commit(self, mine, dx, **sent):
        return self.inner.commit(mine, dx=dx, **sent) | {"e": mine["e"] - dx}
