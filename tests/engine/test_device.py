"""Where a run computes, and what is said where it cannot."""

import pytest
import torch

from npbml.engine.device import choose_device, describe_device
from npbml.errors import SettingError


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert choose_device("auto").type == kind


def test_named_devices_are_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(SettingError, match=r"cuda:2 asks for a GPU, but this machine has 2"):
        choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingError, match=r"none that torch can use.*device=cpu"):
        choose_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "tpu", "mps", "meta", ""])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match="auto, cpu, cuda or cuda:N"):
        choose_device(name)


def test_a_cpu_is_described_by_its_threads() -> None:
    assert describe_device(torch.device("cpu")) == "CPU, 1 thread"  # as the test session has it
