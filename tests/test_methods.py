"""A method is the run's settings with a recipe on top, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import npbml
from npbml.errors import SettingError
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, check_method, method_config, override, read_recipe, refuse_contradiction
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec, LearnerSettings
from npbml.methods import (
    BUILT_IN,
    METHODS,
    Cell,
    Recipe,
    compose,
    find_recipe,
    register,
    trained_methods,
    trains,
)
from npbml.parts import LOSS_TERMS
from npbml.settings import describe, flat, merged
from npbml.tasks import Task, unstack

SMALL: dict[str, Any] = {
    "ways": 3,
    "net": {"filters": 3, "widths": [2, 2, 2, 3]},
    "loss": {"hidden": 8},
    "scorer": {"widths": [2], "pools": 1},
}
IMAGES = ImageSpec(1, 16, (0.5,), (0.25,))
OF_MAML = ["maml", "fomaml", "anil", "boil", "metasgd", "tnet", "mtnet", "maml++", "sca", "meta-curvature"]
SYSTEMS = [*OF_MAML, "warpgrad", "modgrad", "metal", "alfa", "gap", "gap-approx", "unicorn-maml", "npbml"]
ABLATIONS = [f"npbml-{number}" for number in range(1, 11)]


def changed(config: Config, other: Config) -> dict[str, Any]:
    """What `other` has in place of `config`'s settings, where they differ."""
    rows = zip(describe(Config, config), describe(Config, other), strict=True)
    return {name: theirs for (name, _, mine), (_, _, theirs) in rows if mine != theirs}


def batch(size: int = 16) -> Task:
    images: list[Tensor] = [torch.sigmoid(torch.randn(2, count, 1, size, size)) for count in (3, 6)]
    labels = [torch.arange(3).repeat_interleave(count).repeat(2, 1) for count in (1, 2)]
    return Task(images[0], labels[0], images[1], labels[1])


def test_every_system_of_the_paper_is_there() -> None:
    assert (
        {*SYSTEMS, *ABLATIONS, "npbml-sym", "npbml-any", "maml-any", "npbml-quirks"}
        == set(BUILT_IN)
        == set(trained_methods())
    )
    assert set(METHODS) == {*BUILT_IN, "prototypes"} and not trains("prototypes")
    assert all(METHODS.get(name) is recipe for name, recipe in BUILT_IN.items())


def test_maml_switches_off_the_learned_rule_and_nothing_else() -> None:
    config = override(preset("quick"), {"ways": 7, "inner": {"steps": 3}, "train": {"lr": {"theta": 0.5}}})
    assert changed(config, method_config(config, "maml")) == {
        "method": "maml",
        "warp.kind": "fixed",
        "film.enabled": False,
        "loss.film": False,
        "loss.inductive": False,
        "loss.transductive": False,
        "loss.regulariser": False,
    }


@pytest.mark.parametrize("method", BUILT_IN)
@pytest.mark.parametrize("protocol", ["published", "quick"])
def test_a_method_is_the_runs_settings_with_its_recipe(method: str, protocol: str) -> None:
    config = override(preset(protocol, "fc100", "resnet12"), {"shots": 5, "seed": 3, "method": "mine"})
    got = changed(config, method_config(config, method))
    asked = {name: tuple(v) if isinstance(v, list) else v for name, v in flat(BUILT_IN[method].rule).items()}
    usual = {name: value for name, _, value in describe(Config, config)}
    assert got == {name: value for name, value in asked.items() if value != usual[name]} | {"method": method}
    assert method_config(method_config(config, method), method) == method_config(config, method)


def test_npbml_is_the_full_method_and_so_is_its_fifth_ablation() -> None:
    assert method_config(Config(), "npbml") == Config()
    assert BUILT_IN["npbml"].rule == BUILT_IN["npbml-5"].rule == {}


@pytest.mark.parametrize(
    ("method", "parts"),
    {
        "npbml-1": "",
        "npbml-2": "warp",
        "npbml-3": "inductive transductive regulariser",
        "npbml-4": "warp inductive transductive regulariser",
        "npbml-5": "warp inductive transductive regulariser film",
        "npbml-6": "",
        "npbml-7": "inductive",
        "npbml-8": "transductive",
        "npbml-9": "regulariser",
        "npbml-10": "inductive transductive regulariser",
    }.items(),
)
def test_the_ablations_have_the_parts_of_the_papers_tables(method: str, parts: str) -> None:
    config = method_config(preset("published", "mini-imagenet"), method)
    rule = config.learner
    there = {name for name in rule.loss.active if LOSS_TERMS.fact(name, "learned")}
    there |= {"warp"} if rule.warp.kind == "learned" else set()
    there |= {"film"} if rule.film.enabled else set()
    assert there == set(parts.split()) and rule.loss.film == rule.film.enabled


@pytest.mark.parametrize("method", BUILT_IN)
@pytest.mark.parametrize("protocol", ["common", "published"])
@pytest.mark.parametrize("backbone", ["conv4", "resnet12"])
def test_every_recipe_makes_a_learner_that_learns_in_every_group(
    method: str, protocol: str, backbone: str
) -> None:
    config = override(preset(protocol, "fc100", backbone, method), SMALL)
    check_method(config, method)
    torch.manual_seed(0)
    learner = Learner(method_config(config, method).learner, IMAGES)
    assert (learner.scorer is None) is not learner.settings.loss.has("needs_scores")
    loss = learner.meta_loss(batch(), progress=0.02)
    loss.backward()
    assert loss.isfinite()
    for letter, part in learner.groups().items():
        moved = [name for name, p in part.items() if p.grad is not None and p.grad.any()]
        assert moved or not part, letter
        assert all(p.grad is None or p.grad.isfinite().all() for p in part.values())
    assert learner.groups()["theta"]


@pytest.mark.parametrize("method", BUILT_IN)
def test_c30_for_every_method_tasks_together_are_tasks_one_by_one(method: str) -> None:
    config = override(
        preset("common", "fc100", "conv4", method), {**SMALL, "inner": {"steps": 2}, "init": {"std": 0.3}}
    )
    torch.manual_seed(0)
    tasks = batch(size=32)  # of 16 pixels a single one would be left, whose statistics are badly conditioned
    tasks = tasks.map(lambda part: part.double() if part.is_floating_point() else part)
    learner = Learner(method_config(config, method).learner, replace(IMAGES, size=32)).double()
    prepared, outer = learner.prepare_batch(tasks), learner.outer(0.02)
    single = learner.for_single_tasks()
    alone = [single.task_loss(*task, outer) for task in unstack((prepared, tasks.query_labels))]
    results = []
    for loss in (learner.meta_loss(tasks, progress=0.02), torch.stack(alone).mean()):
        names = list(learner.parameters())
        results.append([loss, *torch.autograd.grad(loss, names, allow_unused=True, materialize_grads=True)])
    one = [learner.meta_loss([tasks.map(lambda part, i=i: part[i])], 0.02) for i in range(2)]
    torch.testing.assert_close(results[0][0], torch.stack(one).mean(), rtol=0, atol=1e-12)
    for together, one_by_one in zip(*results, strict=True):
        torch.testing.assert_close(together, one_by_one, rtol=1e-10, atol=1e-11)


def test_every_method_of_the_common_protocol_has_the_same_network_and_start_of_the_body() -> None:
    """What the protocol holds equal for all: everything but the rule, which is what a recipe may name."""
    config = preset("common", "cifar-fs", "conv4")
    for method in (*SYSTEMS, *ABLATIONS):
        own = method_config(config, method)
        free = {"method", *flat(BUILT_IN[method].rule)}
        free |= {"warp.kind"}  # none where there was none in the pre-training
        assert set(changed(config, own)) <= free
        mine, theirs = own.learner.net, config.learner.net
        assert mine.stem_norm == theirs.stem_norm and mine.tail_norm == theirs.tail_norm
        assert mine.filters == theirs.filters and mine.frozen_blocks == theirs.frozen_blocks
        assert own.learner.head.kind == ("unicorn" if method == "unicorn-maml" else "linear")
        assert (own.train, own.test, own.pretrain) == (config.train, config.test, config.pretrain)


@pytest.mark.parametrize(
    ("method", "cell", "expected"),
    [
        ("maml", Cell(), {"net.filters": 32, "inner.test_steps": 10, "train.steps": 60_000, "train.ensemble": 1}),
        ("maml", Cell("cifar-fs"), {"net.filters": 48, "train.steps": 50_000, "train.ensemble": 5}),
        ("maml", Cell("cifar-fs"), {"train.meta_batch": None}),  # four tasks of one shot, two of more
        ("maml", Cell("mini-imagenet", "resnet12"), {"net.embedding": "mean", "train.ensemble": 5}),
        ("metasgd", Cell(), {"inner.steps": 1, "precondition.uniform": True, "train.lr.omega": 1e-3}),
        ("tnet", Cell(), {"net.filters": 32, "inner.lr": 0.05, "train.clip": "value"}),
        ("maml++", Cell(), {"net.filters": 48, "inner.lr": 0.1, "train.meta_batch": 2, "train.ensemble": 5}),
        ("sca", Cell(), {"train.meta_batch": 2, "train.steps": 75_000, "train.weight_decay": 1e-4}),
        ("sca", Cell(shots=5), {"train.meta_batch": 1, "outer.epochs": 150}),
        ("warpgrad", Cell(), {"net.filters": 128, "inner.lr": 0.1, "train.meta_batch": 1}),
        ("modgrad", Cell(), {"net.filters": 64, "inner.steps": 1, "inner.last_blocks": 2, "test.tasks": 1000}),
        ("metal", Cell("cifar-fs"), {"net.filters": 48, "train.clip": "none", "train.ensemble": 5}),
        ("alfa", Cell(), {"net.filters": 48, "inner.lr": 0.01}),
        ("gap", Cell(), {"net.filters": 128, "train.lr.omega": 3e-3, "train.lr.theta": 1e-4}),
        ("gap", Cell("tiered-imagenet", shots=5), {"train.steps": 200_000, "train.lr.omega": 1e-4}),
        ("boil", Cell("cifar-fs"), {"inner.lr": 0.5, "inner.steps": 1, "net.filters": 64}),
        ("boil", Cell("cifar-fs", "resnet12"), {"inner.lr": 0.3, "train.lr.theta": 6e-4}),
        (
            "unicorn-maml",
            Cell(shots=5),
            {"inner.steps": 20, "train.optimizer": "sgd", "init.source": "pretrained"},
        ),
        ("npbml", Cell(), {"net.filters": 128, "train.steps": 30_000, "train.lr.theta": 1e-5}),
        ("npbml-3", Cell(shots=5), {"net.filters": 128, "inner.momentum": 0.9}),
    ],
)
def test_published_settings_are_the_authors(method: str, cell: Cell, expected: dict[str, Any]) -> None:
    config = preset("published", cell.dataset, cell.backbone, method, cell.shots)
    settings = {name: value for name, _, value in describe(Config, config)}
    assert {name: settings[name] for name in expected} == expected
    check_method(config, method)


def test_an_unknown_method_is_answered_with_the_names() -> None:
    with pytest.raises(SettingError) as error:
        method_config(Config(), "mamml")
    assert "no method 'mamml'" in str(error.value)
    assert all(name in str(error.value) for name in METHODS)


def test_what_was_asked_for_and_contradicts_the_method_is_refused() -> None:
    config = override(preset("quick"), {"method": "maml"})
    refuse_contradiction(config, {"loss.inductive": False, "inner.steps": 3})
    metasgd = override(preset("quick"), {"method": "metasgd"})
    refuse_contradiction(metasgd, {"precondition.chain": ["diagonal"]})
    with pytest.raises(SettingError, match=r"method maml sets loss\.inductive=False, but True was asked for"):
        refuse_contradiction(config, {"loss.inductive": True})


def test_a_network_without_a_warp_stays_without_one() -> None:
    config = override(preset("quick"), {"warp": {"kind": "none"}})
    assert method_config(config, "npbml").learner.warp.kind == "none"
    assert method_config(config, "maml").learner.warp.kind == "none"


def test_a_warp_that_pretraining_did_not_have_is_left_out_where_it_is_not_learned() -> None:
    config = override(preset("quick"), {"pretrain": {"warp": False}})
    assert method_config(config, "maml").learner.warp.kind == "none"
    assert method_config(config, "npbml").learner.warp.kind == "learned"


@pytest.mark.parametrize("method", list(METHODS))
def test_a_method_is_told_in_a_line(method: str) -> None:
    summary = find_recipe(method).summary
    assert summary == METHODS.part(method).summary
    assert 10 < len(summary) < 100 and "\n" not in summary


@pytest.fixture
def own_recipes() -> Any:
    yield
    for name in [name for name, part in METHODS.parts.items() if not part.built_in]:
        del METHODS.parts[name]


def gap_with_npbml() -> dict[str, Any]:
    return {"precondition": {"chain": ["svd"]}, "warp": {"kind": "fixed"}}


def test_a_new_method_is_mixed_in_python(own_recipes: None) -> None:
    """GAP's preconditioner with NPBML's loss and FiLM: learned parts of both, trained by the same code."""
    npbml.register("gap-npbml", npbml.compose("GAP's spectrum, NPBML's loss", "npbml", **gap_with_npbml()))
    config = override(preset("common", "fc100"), SMALL)
    check_method(config, "gap-npbml")
    learner = Learner(method_config(config, "gap-npbml").learner, IMAGES)
    learner.meta_loss(batch()).backward()
    groups = learner.groups()
    assert all(groups[letter] for letter in groups)
    assert list(groups["omega"]) == [name for name in groups["omega"] if name.startswith("precondition.")]
    assert all(p.grad is not None and p.grad.any() for p in groups["omega"].values())


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_new_method_is_mixed_in_a_file(own_recipes: None, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine{suffix}"
    text = 'summary = "mine"\nbase = "npbml"\n[precondition]\nchain = ["svd"]\n[warp]\nkind = "fixed"\n'
    path.write_text(
        text if suffix == ".toml" else json.dumps({"summary": "mine", "base": "npbml", **gap_with_npbml()})
    )
    assert read_recipe(path) == "mine"
    assert find_recipe("mine").summary == "mine" and find_recipe("mine").rule == gap_with_npbml()


def test_bases_are_laid_on_top_of_each_other(own_recipes: None) -> None:
    both = compose("both", "maml", "metasgd", precondition={"chain": ["kronecker", "diagonal"]})
    assert both.rule == merged(BUILT_IN["metasgd"].rule, {"precondition": {"chain": ["kronecker", "diagonal"]}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base = "mamml"', "no method 'mamml'"),
        ("[precondition]\nchains = []", "precondition.chains"),
        ('[precondition]\nchain = ["svdd"]', "precondition.chain"),
        ("shots = 5", "'shots' is no setting of it"),
        ("[pretrain]\nsteps = 5", "'pretrain.steps' is no setting of it"),
        ("precondition = 3", "precondition"),
        ("[inner", "not TOML"),
    ],
)
def test_a_recipe_that_is_none_is_refused(own_recipes: None, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SettingError) as error:
        read_recipe(path)
    assert words in str(error.value) and "mine" not in METHODS


@pytest.mark.parametrize("name", ["maml", "prototypes", "pretrain", "relation", "pictures", ".", ""])
def test_a_name_that_is_taken_is_refused(own_recipes: None, name: str) -> None:
    with pytest.raises(SettingError, match="cannot be the name"):
        register(name, Recipe("mine", {}))


def test_a_recipe_speaks_of_the_rule_alone() -> None:
    names = {name for name, _, _ in describe(LearnerSettings)}
    for method, recipe in BUILT_IN.items():
        assert set(flat(recipe.rule)) <= names, method


def test_boils_head_begins_by_xaviers_rule_since_no_inner_step_makes_it_larger() -> None:
    config = preset("common")
    heads = {name: Learner(method_config(config, name).learner, IMAGES).head.weight for name in ("maml", "boil")}
    bound = (6 / sum(heads["boil"].shape)) ** 0.5
    assert 0.9 * bound < heads["boil"].abs().max() <= bound
    assert heads["maml"].abs().max() < 0.05
