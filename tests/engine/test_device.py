"""Where a run computes, and what is said where it cannot."""

import os

import pytest
import torch

from npbml.engine.device import WORKSPACES, choose_device, computing, describe_device
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


def told() -> tuple[object, ...]:
    """What torch is told about GPUs."""
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        *(os.environ.get(name) for name in WORKSPACES),
    )


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_gpu_computes_as_asked_for_in_the_block_alone(
    monkeypatch: pytest.MonkeyPatch, precision: str, deterministic: bool
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the user's own stays
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    before, rounds = told(), precision != "float32"
    with pytest.raises(ArithmeticError), computing(torch.device("cuda"), precision, deterministic):
        inside = told()
        assert inside[:2] == (rounds, rounds) and inside[5] == ":4096:8"
        assert inside[2:5] == ((True, True, False) if deterministic else before[2:5])
        assert inside[6] == ("128" if deterministic else None)
        raise ArithmeticError
    assert told() == before


def test_on_a_cpu_nothing_is_changed() -> None:
    before = told()
    with computing(torch.device("cpu"), "tf32"):
        assert told() == before


def test_a_cpu_is_described_by_its_threads() -> None:
    assert describe_device(torch.device("cpu")) == "CPU, 1 thread"  # as the test session has it
