"""What `auto` stands for: device, precision, threads, engine and chunk, chosen before round 1 and written down."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_map

from . import config
from .cohort import LADDER
from .errors import BadInput, RunFailed
from .gradients import Net, many_clients, one_client, vmap_trouble
from .speeds import speeds
from .work import Batch, bare

MOST_THREADS = 1024
MOST = 64  # clients side by side on a CPU: beyond it nothing is gained
VECTORS = 8  # of the model's width that a client needs while it trains, about
DTYPES = {"float64": torch.float64, "float32": torch.float32, "tf32": torch.float32}


@dataclass(frozen=True)
class Choices:
    """How a run is computed; the same choices give the same bits."""

    device: str
    precision: str
    threads: int
    engine: str
    chunk: int

    def __str__(self) -> str:
        how = "one client at a time" if self.engine == "loop" else f"{self.chunk} clients at once (vmap)"
        return f"{how}, {self.precision}, {self.device}, {self.threads} thread{'s' * (self.threads > 1)}"


def place(run: config.Run) -> tuple[str, str, int]:
    """(device, precision, threads) of a run, and the process set to them."""
    device = run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise BadInput(f'run.device = "{device}": PyTorch sees no CUDA device here; "auto" or "cpu" work')
        index = int(device.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise BadInput(
                f'run.device = "{device}": there are {torch.cuda.device_count()} CUDA devices, counted from 0'
            )
    precision = run.precision
    if precision == "auto":
        precision = "tf32" if device.startswith("cuda") else "float32"
    if precision == "bf16":
        raise BadInput(
            'run.precision = "bf16" is not offered by this version; "float32" and "float64" are, on CUDA "tf32"'
        )
    if precision == "tf32" and not device.startswith("cuda"):
        raise BadInput('run.precision = "tf32" needs a CUDA device; on a CPU "float32" and "float64" work')
    if run.compile == "yes":
        raise BadInput('run.compile = "yes" is not offered by this version; "auto" and "no" are')
    threads = run.threads if run.threads != "auto" else allowed()
    if threads > MOST_THREADS:
        raise BadInput(
            f"run.threads = {threads}: at most {MOST_THREADS} are possible, and there are {cores()} cores here"
        )
    settle(device, precision, threads, run.deterministic)
    return device, precision, threads


def settle(device: str, precision: str, threads: int, deterministic: bool) -> None:
    """The process-wide settings of a run."""
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if deterministic and device.startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed() -> int:
    """The threads of a run on its own: a core each, fewer where the environment says so."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(cores(), int(said)) if said.isdecimal() and int(said) > 0 else cores()


def engine(
    run: config.Run, net: Net, x, batch: Batch, cohort: int, threads: int, precision: str
) -> tuple[str, int, list[str]]:
    """(engine, chunk, notices): one client after another, or how many at once. `batch` is one client's."""
    device = x.device.type
    if run.engine == "loop" or (run.engine == "auto" and cohort == 1):
        return "loop", 1, []
    trouble = vmap_trouble(net, x, batch)
    if trouble:
        if run.engine == "vmap":
            raise BadInput(
                f'run.engine = "vmap": {type(net.module).__name__} cannot be batched over clients: {trouble}'
            )
        return (
            "loop",
            1,
            [f"clients train one after another: {type(net.module).__name__} cannot be batched ({trouble})"],
        )
    chunk = min(run.chunk, cohort) if run.chunk != "auto" else largest_chunk(run, net, x, batch, cohort)
    if run.engine == "vmap" or device != "cpu":
        return "vmap", chunk, []

    def side_by_side(n):
        return tree_map(lambda t: None if t is None else torch.stack([t] * n), batch)

    alone, together = one_client(net), many_clients(net)
    many, xs = side_by_side(chunk), torch.stack([x] * chunk)
    seconds = speeds(work_of(net, batch, chunk, precision, threads), {
        "loop": lambda: [alone(bare, {}, x, batch) for _ in range(chunk)],
        "vmap": lambda: together(bare, {}, xs, many),
    })  # fmt: skip
    return ("vmap", chunk, []) if seconds["vmap"] < seconds["loop"] else ("loop", 1, [])


def work_of(net: Net, batch: Batch, chunk: int, precision: str, threads: int) -> str:
    """What `chunk` gradients of a mini-batch are called in the table of speeds."""
    return f"{net.module} {list(net.layout.shapes)} {shapes(batch)} {chunk} clients {precision} {threads} threads"


def largest_chunk(run: config.Run, net: Net, x, batch: Batch, cohort: int) -> int:
    """How many clients at once: the cohort, within the memory."""
    if x.device.type == "cuda":
        room = torch.cuda.mem_get_info(x.device)[0] if run.memory == "auto" else run.memory * 2**30
        fits = int(min(0.6 * room / cost_on_cuda(net, x, batch), cohort))
    else:
        room = 2.0 if run.memory == "auto" else run.memory / 2
        fits = int(min(MOST, room * 2**30 / (VECTORS * x.element_size() * net.layout.size)))
    if fits < 1:
        raise RunFailed("too little memory for one client: a smaller model or local.batch, or more memory, is needed")
    return cohort if cohort <= fits else max(n for n in (*LADDER, 1) if n <= fits)


def cost_on_cuda(net: Net, x, batch: Batch) -> float:
    """Bytes that one more client in a batch takes, its vectors included."""
    peaks = []
    for n in (1, 3):
        many = tree_map(lambda t, n=n: None if t is None else torch.stack([t] * n), batch)
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        many_clients(net)(bare, {}, torch.stack([x] * n), many)
        peaks.append(torch.cuda.max_memory_allocated(x.device) - before)
    return max(peaks[1] - peaks[0], 0) / 2 + VECTORS * x.element_size() * net.layout.size


def shapes(batch: Batch) -> str:
    return str(tree_map(lambda t: None if t is None else (tuple(t.shape), str(t.dtype)), tuple(batch)))
