"""Block coordinates: FedBCGD and FedBCGD+ (Liu et al., 2024), and sub-models as HeteroFL's (Diao et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import zeros_like

from ..algorithm import Around, Codec, Upload
from ..wire import Partial, over
from ..work import Work


class Blocks(Codec):
    """Only the coordinates of this client's block travel; the server's mean of each is over those that sent it."""

    covered = True

    def encode(self, info, name, leaf):
        return Partial(over(leaf, lambda v: v * info.cover), info.cover)


class Freeze(Around):
    """A client moves only the coordinates of its block. Innermost: it masks what other parts made of the gradient."""

    covered = True

    def local(self, info, local):
        return self.inner.local(info, replace(local, decay=local.decay * info.cover))

    def client(self, work, **rest):
        cover = work.info.cover.to(work.info.lr.dtype)
        return self.inner.client(work.adjust(lambda step, y, grad, m: m * grad(y), m=cover), **rest)


@dataclass(frozen=True)
class ControlledSVRG(Around):
    """g(y) - g(x) + grad f_i(x) - c_i + c; c_i+ = grad f_i(x) where it was sent (`state` full: everywhere, as printed)
    c = the mean of all c_i"""

    state: Literal["sent", "full"] = "sent"
    over_all = frozenset({"dc"})

    def init(self, x):
        return {"c": zeros_like(x)}, {"ci": zeros_like(x)}

    def down(self, info, c, **rest):
        return self.inner.down(info, **rest) | {"c": c}

    def client(self, work, x, c, ci, **rest):
        full = work.full_grad(x)
        shift = full - ci + c
        work = work.adjust(lambda step, y, grad, x, shift: grad(y) - grad(x) + shift, x=x, shift=shift)
        up, mine = self.inner.client(work, x=x, **rest)
        return up | {"dc": full - ci}, mine | {"ci": ci if self.state == "sent" else full}

    def commit(self, mine, dc, **sent):
        mine = self.inner.commit(mine, **sent)
        return mine | {"ci": mine["ci"] + dc} if self.state == "sent" else mine

    def server(self, cohort, c, dc, **rest):
        return self.inner.server(cohort, **rest) | {"c": c + dc}


class SubModel(Upload):
    """The client holds and trains the coordinates of its slice only; `Blocks` outside sends only those."""

    covered = True

    def down(self, info, **server):
        return Blocks().coded(info, self.inner.down(info, **server))

    def survey(self, work, **rest):
        return self.inner.survey(self.masked(work), **rest)

    def client(self, work, **rest):
        return self.inner.client(self.masked(work), **rest)

    @staticmethod
    def masked(work: Work) -> Work:
        own = work.info.cover.to(work.info.lr.dtype)
        return work.objective(lambda net, y, batch, loss, own: loss(own * y, batch), own=own)
