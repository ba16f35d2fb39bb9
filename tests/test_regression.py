"""Regression on sinusoids: the same rule with squared loss, for several methods."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.data.sinusoid import Sinusoids
from npbml.errors import SettingError
from npbml.lab.pipeline import Pipeline
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, check_config, check_method, method_config, override
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec
from npbml.methods import BUILT_IN
from npbml.randomness import generator
from npbml.tasks import Task

METHODS = ["maml", "metasgd", "meta-curvature", "tnet", "npbml"]
PIXEL = ImageSpec(1, 1, (0.0,), (1.0,))
SMALL: dict[str, Any] = {
    "device": "cpu",
    "train": {"steps": 3, "validate_every": 3, "validation_tasks": 4},
    "test": {"tasks": 6},
}


def sinusoid(method: str, **changes: Any) -> Config:
    return method_config(override(preset("quick", "sinusoid", method=method), changes), method)


def double(task: Task) -> Task:
    return task.map(lambda part: part.double())


def test_maml_on_waves_is_gradient_descent_on_the_mean_squared_error() -> None:
    """Against the same two layers written out in plain torch, meta-gradient and all."""
    learner = Learner(sinusoid("maml", inner={"steps": 2}).learner, PIXEL).double()
    task = double(Sinusoids(5, 7).task(Sinusoids(5, 7).draw(1, generator(0, "one"))).map(lambda part: part[0]))
    names = [f"network.tail.blocks.{i}.unit.conv.{part}" for i in (0, 1) for part in ("weight", "bias")]
    names += ["head.weight", "head.bias"]
    meta = {name: learner.get_parameter(name).detach().clone().requires_grad_() for name in names}

    def values(theta: list[Tensor], x: Tensor) -> Tensor:
        first = (x @ theta[0].flatten(1).T + theta[1]).relu()
        second = (first @ theta[2].flatten(1).T + theta[3]).relu()
        return (second @ theta[4].T + theta[5]).squeeze(-1)

    theta = list(meta.values())
    for _ in range(2):
        error = (values(theta, task.support_images.flatten(1)) - task.support_labels).square().mean()
        theta = [
            t - 0.01 * g for t, g in zip(theta, torch.autograd.grad(error, theta, create_graph=True), strict=True)
        ]
    found = values(theta, task.query_images.flatten(1))
    torch.testing.assert_close(learner.predict(task).squeeze(-1), found, rtol=0, atol=1e-12)
    error = (found - task.query_labels).square().mean()
    loss = learner.meta_loss([task])
    torch.testing.assert_close(loss, error, rtol=0, atol=1e-12)
    mine = torch.autograd.grad(loss, [learner.get_parameter(name) for name in names])
    for one, other in zip(mine, torch.autograd.grad(error, list(meta.values())), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_every_group_of_a_method_learns_from_waves(method: str) -> None:
    learner = Learner(sinusoid(method).learner, PIXEL)
    tasks = Sinusoids(10, 10).task(Sinusoids(10, 10).draw(4, generator(0, "waves")))
    learner.meta_loss(tasks).backward()
    for letter, part in learner.groups().items():
        assert not part or any(p.grad is not None and p.grad.any() for p in part.values()), letter
    extra = {"maml": set(), "npbml": {"omega", "phi", "psi"}}.get(method, {"omega"})
    assert {letter for letter, part in learner.groups().items() if part} == {"theta", *extra}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_waves_needs_no_data_and_no_pretraining(tmp_path: Path, method: str) -> None:
    run = Pipeline.start(
        tmp_path / "run", override(preset("quick", "sinusoid", method=method), {**SMALL, "method": method})
    )
    assert run.needs([method]) == []
    run.run(method)
    record = run.test(method)
    assert 0 < record["squared error"] < 100 and record["ci95"] > 0 and "accuracy" not in record
    assert record["validation"] <= record["start"]
    again = run.test(method)
    assert again["squared error"] == record["squared error"]


def test_meta_learning_lowers_the_error_on_unseen_waves(tmp_path: Path) -> None:
    changes = {**SMALL, "method": "maml", "train": {"steps": 150, "validate_every": 150, "lr": {"theta": 5e-3}}}
    run = Pipeline.start(tmp_path / "run", override(preset("quick", "sinusoid", method="maml"), changes))
    summary = run.run("maml")
    assert summary["validation"] < 0.9 * summary["start"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backbone": "conv4"}, "about values: it needs target=values and backbone=mlp, not"),
        ({"target": "classes"}, "about values: it needs target=values and backbone=mlp, not"),
        ({"train": {"augment": True}}, "images of classes"),
        ({"loss": {"transductive": True}, "inner": {"batch": "joint"}}, "loss.transductive speaks of the classes"),
    ],
)
def test_what_waves_cannot_do_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        check_config(override(preset("quick", "sinusoid"), changes))


def test_methods_that_speak_of_classes_are_refused_on_waves() -> None:
    config = preset("quick", "sinusoid")
    refused = set()
    for method in BUILT_IN:
        try:
            check_method(config, method)
        except SettingError:
            refused.add(method)
    assert "metal" in refused and not refused & set(METHODS)
    with pytest.raises(SettingError, match="prototypes stands for classes"):
        check_method(config, "prototypes")
