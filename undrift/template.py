"""`undrift new method NAME`: a file that runs and its test, to be changed into a method of one's own."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from .errors import BadInput
from .files import write

METHOD = '''"""A method of one's own. Say here, in one line each, what it computes."""

from dataclasses import dataclass

from torch import zeros_like

from undrift import Around


@dataclass(frozen=True)
class {cls}(Around):
    """g + mu (y - x) + gamma v; v+ = the mean of dx   (change this into your update)

    Float fields are hyper-parameters that can be swept; fields of other types are structure. Each method below may
    be left out where it adds nothing: what a part does not say, `inner` says.
    """

    mu: float = 0.01
    gamma: float = 0.01

    def init(self, x):
        # The fields that this part owns: the server's, and those that every client keeps between rounds.
        return {{"{field}": zeros_like(x)}}, {{}}

    def down(self, info, {field}, **rest):
        # What the server sends, beside what inner sends.
        return self.inner.down(info, **rest) | {{"{field}": {field}}}

    def client(self, work, x, {field}, **rest):
        # All that changes between rounds comes in by name, never by closing over it. `work.info` knows the round,
        # the client's steps and examples; `work.info.layout.mask("*.bias")` marks coordinates by layer name;
        # `work.info.data["classes"]` holds the client's class counts.
        def corrected(step, y, grad, x, v, mu, gamma):
            return grad(y) + mu * (y - x) + gamma * v

        corrected_work = work.adjust(corrected, x=x, v={field}, mu=self.mu, gamma=self.gamma)
        upload, mine = self.inner.client(corrected_work, x=x, **rest)
        work.log("moved", upload["dx"].norm(dim=-1, keepdim=True))  # a number per client and round: clients.jsonl
        return upload, mine

    def server(self, cohort, {field}, dx, **rest):
        # `dx` is the mean of what arrived.
        cohort.log("{field}_norm", {field}.norm(dim=-1, keepdim=True))  # a number per round: metrics.jsonl
        return self.inner.server(cohort, dx=dx, **rest) | {{"{field}": dx}}
'''

TEST = '''"""The shared suite of undrift on {cls}: pytest {test}"""

from pathlib import Path

from undrift.check import check


def test_{module}():
    failed = [str(found) for found in check("{module}:{cls}", Path(__file__).parent) if found.failed]
    assert not failed, "\\n".join(failed)
'''


def new_method(name: str, folder: Path) -> list[Path]:
    """Writes NAME.py and test_NAME.py into a folder; never over a file that is there."""
    module = re.sub(r"[^0-9a-z]+", "_", name.lower()).strip("_")
    if not module.isidentifier() or keyword.iskeyword(module) or not name.isascii():
        raise BadInput(f"new method {name!r}: a name must begin with a letter, as in slow-pull")
    files = {folder / f"{module}.py": METHOD, folder / f"test_{module}.py": TEST}
    there = [path.name for path in files if path.exists()]
    if there:
        raise BadInput(f"new method {name}: {there[0]} is there already; choose another name or folder")
    cls = "".join(word.capitalize() for word in module.split("_"))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        said = text.format(cls=cls, module=module, field=f"{module}_v", test=f"test_{module}.py")
        write(path, said.encode())
    return list(files)
