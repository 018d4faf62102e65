"""The plain loop and vmap on a CUDA device: the CPU's results to rounding, within the memory there is."""

import pytest
import torch

from undrift import config
from undrift.experiment import build
from undrift.running import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS = ["fedavg", "scaffold", "fedcm", "fedacg", "mime", "fedyogi", "centralised"]


def experiment(**run_table) -> config.Experiment:
    document = {
        "data": {"name": "mnist", "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 30, "balanced": False}},
        "model": {"name": "lenet"},
        "local": {"lr": 0.05, "steps": 3, "batch": 20, "momentum": 0.5},
        "participation": {"clients": 5},
        "run": {"rounds": 3, "eval_every": 3, "precision": "float32", **run_table},
    }
    return config.parse(document)


def model(e: config.Experiment, method: str, rounds: int = 3) -> torch.Tensor:
    e = config.parse(config.derive(config.document(e), {"algorithm": {"name": method}}))
    simulation = build(e).simulation
    for _ in range(rounds):
        simulation.keep(simulation.play())
    return simulation.model().cpu()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_gives_the_results_of_the_cpu(method, engine):
    cpu = model(experiment(device="cpu", engine="loop", precision="float64"), method)
    gpu = model(experiment(device="cuda", engine=engine, precision="float64"), method)
    # pixels / 255 in float32 may differ by a bit between devices, so that even float64 agrees only to this
    assert (cpu - gpu).abs().max() <= 1e-6 * cpu.abs().max()


def test_float32_on_a_gpu_agrees_to_rounding():
    cpu, gpu = (model(experiment(device=d), "scaffold") for d in ("cpu", "cuda"))
    assert (cpu - gpu).abs().max() <= 1e-3 * cpu.abs().max()


def test_a_cohort_that_does_not_fit_is_played_in_smaller_chunks():
    e = experiment(device="cuda", engine="vmap", chunk=5)
    expected = model(e, "fedavg", rounds=1)
    simulation = build(e).simulation
    full = simulation._play

    def cramped():
        if simulation.chunk > 2:
            raise torch.OutOfMemoryError("as if")
        return full()

    simulation._play = cramped
    simulation.keep(simulation.play())
    assert simulation.chunk == 2
    assert (simulation.model().cpu() - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_cap_on_the_memory_is_kept():
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2 * 2**30 / total))
    try:
        e = config.derive(config.document(experiment(device="cuda", engine="vmap")), {
            "data": {"name": "mnist", "partition": {"name": "iid", "clients": 300}},
            "participation.clients": 300, "local": {"lr": 0.05, "steps": 1, "batch": 200},
        })  # fmt: skip
        simulation = build(config.parse(e)).simulation
        simulation.keep(simulation.play())
        assert torch.isfinite(simulation.model()).all()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_run_with_everything(tmp_path):
    result = run(experiment(device="cuda", precision="tf32"), tmp_path / "run")
    assert result.records[-1]["test_accuracy"] > 0.1
    more = config.parse(config.derive(config.document(experiment(device="cuda", precision="tf32")), {"run.rounds": 5}))
    assert len(run(more, tmp_path / "run", resume=True).records) == 5


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_deterministic_repeats_bits(engine):
    a, b = (model(experiment(device="cuda", engine=engine, deterministic=True), "scaffold") for _ in range(2))
    assert torch.equal(a, b)
    torch.use_deterministic_algorithms(False)
