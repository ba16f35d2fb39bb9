"""What a run needs of memory is known before anything is written, and is never more than what it takes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from npbml.errors import SettingError
from npbml.lab import memory
from npbml.lab.memory import Images, check_memory, estimate, host_memory, in_words, pretraining
from npbml.lab.pipeline import Pipeline
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, override
from npbml.learner.settings import ImageSpec

# One step of pre-training in a process of its own, whose greatest size Linux knows. (ru_maxrss would be that of
# the process that started it, where that was larger.)
STEP = """
import sys, torch
from npbml.lab.memory import pretraining
from npbml.lab.protocols import preset
from npbml.lab.schema import override
from npbml.learner.build import encoder
from npbml.learner.settings import ImageSpec

spec = ImageSpec(3, 84, (0.5,) * 3, (0.5,) * 3)

def largest():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))

def step(config):
    network = encoder(config.learner, spec, False, config.pretrain.warp)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
    network(torch.randn(config.pretrain.batch_size, 3, 84, 84)).square().mean().backward()
    optimizer.step()

step(override(preset("quick"), {"net": {"filters": 4}, "pretrain": {"batch_size": 2}}))  # what torch itself takes
before = largest()
config = override(preset("quick", backbone=sys.argv[1]), {"pretrain": {"batch_size": int(sys.argv[2])}})
step(config)
print(largest() - before, pretraining(config, spec))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how large a process was")
@pytest.mark.parametrize(("backbone", "batch"), [("conv4", 100), ("resnet12", 24)])
def test_the_estimate_is_a_lower_bound_within_a_factor_of_three(backbone: str, batch: int) -> None:
    said = subprocess.run(
        [sys.executable, "-c", STEP, backbone, str(batch)], capture_output=True, text=True, check=True
    )
    peak, estimated = map(int, said.stdout.split())
    assert estimated <= peak <= 3 * estimated


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("net.filters", value) for value in (100_000, 1_000_000)),
        ("image_size", 4096),
        ("pretrain.batch_size", 1_000_000),
        ("loss.hidden", 1_000_000),
        ("scorer.widths", [1_000_000]),
        ("train.meta_batch", 1_000_000),
        ("inner.steps", 1_000_000),
    ],
)
def test_what_no_memory_holds_is_refused_with_its_figure_and_setting(name: str, value: Any) -> None:
    tables: dict[str, Any] = value
    for part in reversed(name.split(".")):
        tables = {part: tables}
    with pytest.raises(SettingError, match=rf"^{name}=.* needs at least .*iB of memory, and this machine has"):
        check_memory(override(preset("quick"), tables), Images(10_000, 1, 28), torch.device("cpu"))


def test_nothing_is_refused_that_fits(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    images = Images(10_000, 1, 28)
    need = estimate(config, images).total
    monkeypatch.setattr(memory, "host_memory", lambda: need)
    check_memory(config, images, torch.device("cpu"))
    monkeypatch.setattr(memory, "host_memory", lambda: need - 1)
    with pytest.raises(SettingError, match="needs at least"):
        check_memory(config, images, torch.device("cpu"))


def test_half_precision_counts_half_of_the_activations() -> None:
    settings = {"pretrain": {"batch_size": 1000}, "engine": {"precision": "bfloat16"}}
    single, half = (
        estimate(override(preset("quick"), tables), Images(0, 1, 28)).work
        for tables in ({"pretrain": {"batch_size": 1000}}, settings)
    )
    assert single / 2 <= half < 0.51 * single


def test_a_refused_run_leaves_no_folder(config: Config, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"net\.filters"):
        Pipeline.start(tmp_path / "run", override(config, {"net": {"filters": 100_000}}))
    assert not (tmp_path / "run").exists()


def test_images_are_counted_before_they_are_read(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: 2**28)
    with pytest.raises(SettingError, match="image_size=4096"):
        Pipeline.start(tmp_path / "run", override(config, {"image_size": 4096}))


def test_every_published_run_is_possible_where_there_is_memory() -> None:
    for backbone in ("conv4", "resnet12"):
        config = preset("published", dataset="mini-imagenet", backbone=backbone)
        assert estimate(config, Images(60_000, 3, 84)).total < 40 * 2**30


def test_the_memory_of_this_machine_is_known() -> None:
    assert 2**28 < host_memory() < 2**50
    assert [in_words(count) for count in (12, 3 * 2**29, 2**60)] == ["12 bytes", "1.5 GiB", "1,024 PiB"]
    assert pretraining(preset("quick"), ImageSpec(1, 28, (0.5,), (0.5,))) > 0
