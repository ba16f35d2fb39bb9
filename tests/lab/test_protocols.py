"""The presets are the paper's protocol and a quick one, each of them admissible."""

from typing import Any

import pytest

from npbml.data.sets import NAMES
from npbml.errors import SettingError
from npbml.lab.identity import differences
from npbml.lab.protocols import PROTOCOLS, preset
from npbml.lab.schema import Config, check_config, check_method, override
from npbml.methods import trained_methods
from npbml.nets.settings import block_widths
from npbml.parts import BACKBONES, DATASETS, METHODS
from npbml.settings import leaves
from npbml.stages.pretrain import MOMENTUM

NETWORKS = tuple(name for name in BACKBONES if BACKBONES.fact(name, "target") == "classes")


def values(config: Config) -> dict[str, Any]:
    """Every setting by its full name."""
    return {leaf.name: leaf.value for leaf in leaves(config)}


def test_published_is_the_papers_protocol() -> None:
    """The paper's section 4 and METHODS 18.7 to 18.10."""
    settings = values(preset("published", "mini-imagenet"))
    expected = {
        "ways": 5,
        "queries": 15,
        "net.filters": 128,
        "inner.steps": 5,
        "inner.lr": 0.01,
        "inner.momentum": 0.9,
        "inner.nesterov": True,
        "inner.weight_decay": 5e-4,
        "outer.order": 2,
        "pretrain.steps": 200_000,
        "pretrain.batch_size": 128,
        "pretrain.lr": 0.01,
        "pretrain.schedule": "multistep",
        "pretrain.augment.flip": True,
        "scorer_training.steps": 100_000,
        "scorer_training.lr": 1e-3,
        "train.steps": 30_000,
        "train.lr.theta": 1e-5,
        "train.lr.omega": 1e-5,
        "train.lr.phi": 1e-5,
        "train.lr.psi": 1e-5,
        "train.optimizer": "adam",
        "train.weight_decay": 0.0,
        "train.schedule": "constant",
        "train.clip": "none",
        "train.augment": False,
        "test.tasks": 600,
    }
    assert {name: settings[name] for name in expected} == expected
    assert MOMENTUM == 0.9


@pytest.mark.parametrize("protocol", ["quick", "common", "best", "plain"])
def test_our_own_protocols_clip_the_meta_gradient_but_for_regression(protocol: str) -> None:
    """Squared errors have gradients of any size from the start."""
    train = preset(protocol, "cifar-fs").train
    assert (train.clip, train.clip_at) == ("norm", 3.0)
    assert preset(protocol, "sinusoid").train.clip == "none"


@pytest.mark.parametrize(("shots", "tasks"), [(1, 4), (2, 2), (5, 2), (20, 2)])
def test_a_meta_batch_is_four_tasks_of_one_shot_or_two_of_more(shots: int, tasks: int) -> None:
    config = override(preset("published"), {"shots": shots})
    assert config.meta_batch == tasks
    assert override(config, {"train": {"meta_batch": 7}}).meta_batch == 7


@pytest.mark.parametrize("dataset", NAMES)
@pytest.mark.parametrize("backbone", NETWORKS)
def test_the_decay_of_pretraining_is_the_papers(dataset: str, backbone: str) -> None:
    small = backbone.startswith("resnet12") and dataset in ("mini-imagenet", "cifar-fs", "fc100")
    assert preset("published", dataset, backbone).pretrain.weight_decay == (0.01 if small else 5e-4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dataset", [*NAMES, "/my/pictures"])
@pytest.mark.parametrize("backbone", NETWORKS)
def test_every_preset_is_admissible_and_what_it_says_it_is(protocol: str, dataset: str, backbone: str) -> None:
    config = preset(protocol, dataset, backbone)
    check_config(config)
    assert (config.protocol, config.dataset, config.learner.backbone) == (protocol, dataset, backbone)
    assert config.pretrain.augment.flip is (dataset not in ("glyphs", "omniglot"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("backbone", NETWORKS)
def test_waves_have_the_network_that_is_for_them(protocol: str, backbone: str) -> None:
    config = preset(protocol, "sinusoid", backbone)
    check_config(config)
    assert (config.learner.backbone, config.learner.target, config.shots) == ("mlp", "values", 10)
    assert config.train.steps == (70_000 if protocol == "published" else 5000)


def test_the_protocols_know_of_every_data_set() -> None:
    assert set(DATASETS) == {*NAMES, "sinusoid"}


def test_a_plain_run_is_the_quick_protocol_on_glyphs() -> None:
    assert (Config().protocol, Config().dataset, Config().learner.backbone) == ("quick", "glyphs", "conv4")
    quick, published = preset("quick"), preset("published")
    assert quick.train.steps < published.train.steps and quick.pretrain.steps < published.pretrain.steps
    for name in ("inner", "warp", "film"):
        assert getattr(quick.learner, name) == getattr(published.learner, name)


@pytest.mark.parametrize("backbone", ["conv4", "resnet12", "resnet12-wide"])
def test_plain_is_best_but_for_its_scores(backbone: str) -> None:
    best, plain = (preset(protocol, "mini-imagenet", backbone) for protocol in ("best", "plain"))
    scores = {f"scorer.{name}" for name in ("kind", "enlarge", "rotations", "centre", "whiten", "rounds")}
    if backbone == "resnet12-wide":  # its images are larger than the crops that it learns from as they are
        scores = scores - {"scorer.enlarge"} | {"scorer.flip"}
    distilled = set() if backbone == "conv4" else {"pretrain.distill"}
    assert set(differences(best, plain)) == {"protocol", "loss.score_weight", *scores, *distilled}
    for method in METHODS:
        check_method(best, method)
        check_method(plain, method)


def test_what_scores_for_the_wide_network_is_as_wide() -> None:
    narrow, wide = (preset("best", "cifar-fs", backbone) for backbone in ("resnet12", "resnet12-wide"))
    assert differences(narrow, wide) == ["backbone", "scorer.widths"]
    assert wide.learner.scorer.widths == block_widths("resnet12-wide", wide.learner.net)


@pytest.mark.parametrize("method", trained_methods())
def test_every_method_can_be_trained_as_it_was_published(method: str) -> None:
    for backbone in ("conv4", "resnet12"):
        for shots in (1, 5):
            config = preset("published", "mini-imagenet", backbone, method, shots)
            assert (config.method, config.shots) == (method, shots)
            check_config(config)


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(
        SettingError, match="protocol takes one of published, fast, best, plain, quick, common, not 'slow'"
    ):
        preset("slow")


def test_an_unknown_backbone_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"no backbone 'vgg'\. Choose from conv4, resnet12, resnet12-wide, wrn28-10, mlp"
    ):
        preset("quick", "glyphs", "vgg")


def test_an_unknown_method_is_refused_where_its_settings_matter() -> None:
    with pytest.raises(SettingError, match=r"no method 'mamml'\. Did you mean 'maml'\? Choose from npbml, maml"):
        preset("published", "glyphs", "conv4", "mamml")
