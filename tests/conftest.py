import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Small vectors gain nothing from threads, and tests run side by side."""
    torch.set_num_threads(1)
