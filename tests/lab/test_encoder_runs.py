"""Runs whose backbone is an encoder: features are computed once, the tail starts from their main directions."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import npbml
from npbml.data.tasks import ClassSet
from npbml.engine.encoding import encoded
from npbml.errors import SettingError
from npbml.lab.pipeline import Pipeline
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, override
from npbml.parts import BACKBONES
from npbml.stages.projection import principal_map

SMALL = {
    "ways": 3,
    "queries": 2,
    "baselines": [],
    "shapes": ["3x1", "3x1+6"],
    "net": {"filters": 6},
    "pretrain": {"validation_tasks": 4, "validation_shots": 1},
    "train": {"steps": 2, "validate_every": 1, "validation_tasks": 4},
    "test": {"tasks": 4},
}


class Counting(nn.Module):
    """48 numbers of an image; counts the images that it has seen."""

    count = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        Counting.count += len(images)
        return nn.functional.adaptive_avg_pool2d(images, 4).flatten(1)


@pytest.fixture
def backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    BACKBONES.register("counting", npbml.Encoder(Counting(), 8, (0.5,) * 3, (0.5,) * 3))
    Counting.count = 0
    yield "counting"
    del BACKBONES.parts["counting"]


def config(backbone: str, method: str = "npbml-any") -> Config:
    return override(preset("quick", "glyphs", backbone, method), SMALL)


def classes(count: int = 4, each: int = 5) -> ClassSet:
    images = torch.randint(0, 256, (count * each, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    starts, counts = torch.arange(count) * each, torch.full((count,), each)
    names = tuple(map(str, range(count)))
    return ClassSet(images.to(torch.uint8), starts, counts, names, torch.zeros(3), torch.ones(3))


def test_features_are_computed_once_and_read_from_disk_afterwards(backbone: str) -> None:
    encoder = BACKBONES.get(backbone)
    first = encoded(classes(), encoder, "a")
    assert Counting.count == 20 and first.images.shape == (20, 48, 1, 1)
    again = encoded(classes(), encoder, "a")
    assert Counting.count == 20 and torch.equal(first.images, again.images)
    encoded(classes(), encoder, "other images")
    assert Counting.count == 40


def test_a_damaged_file_of_features_is_made_again(backbone: str, tmp_path: Path) -> None:
    encoder = BACKBONES.get(backbone)
    first = encoded(classes(), encoder, "a")
    (file,) = (tmp_path / "cache" / "npbml" / "features").iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    again = encoded(classes(), encoder, "a")
    assert Counting.count == 40 and torch.equal(first.images, again.images)


def test_the_principal_map_keeps_the_most_variance_and_has_unit_scale() -> None:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(500, 10, generator=random) * torch.arange(1, 11) + 3
    weight, bias, share = principal_map(features, 4)
    values = features @ weight.T + bias
    torch.testing.assert_close(values.mean(0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(values.square().mean(), torch.tensor(1.0), atol=1e-4, rtol=0)
    spread = torch.linalg.svdvals(features - features.mean(0)).square()
    assert share == pytest.approx((spread[:4].sum() / spread.sum()).item(), abs=1e-5)
    wide, _, all_of_it = principal_map(features, 12)
    assert wide.shape == (12, 10) and all_of_it == pytest.approx(1.0) and not wide[10:].any()


def test_a_run_trains_tests_and_leaves_a_learner_for_pictures(backbone: str, tmp_path: Path) -> None:
    work = Pipeline.start(tmp_path / "run", config(backbone))
    with work.at_work():
        for stage in ("pretrain", "npbml-any"):
            work.run(stage)
        seen = Counting.count
        record, plain = work.test("npbml-any"), work.test("prototypes")
    assert seen == Counting.count  # tests need no picture a second time
    assert 0 <= record["accuracy"] <= 100 and 0 <= plain["accuracy"] <= 100
    learner = npbml.load(tmp_path / "run", device="cpu")
    centre = work.splits["train"].images.float().mean(0)
    torch.testing.assert_close(learner.network.stem.blocks[0].centre, centre)
    assert learner.images.size == 8 and learner.features(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)).shape[1] == 48


def test_what_needs_other_views_of_an_image_is_refused(backbone: str, tmp_path: Path) -> None:
    for name in ("augment", "rotations"):
        with pytest.raises(SettingError, match=f"train.{name}"):
            Pipeline.start(tmp_path / name, override(config(backbone), {"train": {name: True}}))
        assert not (tmp_path / name).exists()
