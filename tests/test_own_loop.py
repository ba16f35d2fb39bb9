"""A loop of a user's own: meta-training with the library alone, without a run folder or a configuration file."""

import torch

import npbml
from npbml.engine.metastep import eager_meta_step
from npbml.settings import from_dict


# The loop as the README shows it; at most twenty lines.
def meta_train(steps: int) -> tuple[npbml.Learner, list[float]]:
    net = {"filters": 8, "frozen_blocks": 0, "affine": "meta"}
    recipe = npbml.compose("mine", "maml", ways=3, net=net, init={"source": "scratch"}, head={"kind": "linear"})
    settings = from_dict(npbml.LearnerSettings, recipe.rule, npbml.LearnerSettings())
    learner = npbml.Learner(settings, npbml.ImageSpec(3, 16, (0.5,) * 3, (0.25,) * 3))
    optimizer = torch.optim.Adam(learner.parameters(), lr=1e-2)
    losses = []
    tasks = [my_task(torch.Generator().manual_seed(number)) for number in range(4)]
    for _ in range(steps):
        loss = learner.meta_loss(tasks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return learner, losses


def my_task(random: torch.Generator) -> npbml.Task:
    """Three colours, one labelled picture and four others of each."""
    colours = 0.3 * torch.rand(3, 1, 3, 1, 1, generator=random)
    noise = 0.4 * torch.randn(3, 5, 3, 16, 16, generator=random)
    pictures, labels = (colours + noise).clamp(0, 1), torch.arange(3)
    query = pictures[:, 1:].flatten(0, 1)
    return npbml.Task(pictures[:, 0], labels, query, labels.repeat_interleave(4))


def test_the_loop_learns() -> None:
    learner, losses = meta_train(30)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert learner.predict(my_task(torch.Generator().manual_seed(-1))).shape == (12, 3)


def test_a_learner_goes_through_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    learner, _ = meta_train(1)
    task = my_task(torch.Generator().manual_seed(9))
    npbml.save_learner(learner, tmp_path / "mine.safetensors")
    again = npbml.load(tmp_path / "mine.safetensors", device="cpu")
    assert again.settings == learner.settings and again.images == learner.images
    assert torch.equal(again.predict(task), learner.predict(task))


def test_the_eager_meta_step_is_that_loop() -> None:
    one, _ = meta_train(0)
    other, _ = meta_train(0)
    tasks = [my_task(torch.Generator().manual_seed(number)) for number in range(2)]
    steps = {learner: torch.optim.SGD(learner.parameters(), lr=0.1) for learner in (one, other)}
    value = eager_meta_step(one, steps[one], tasks)
    loss = other.meta_loss(tasks)
    loss.backward()
    steps[other].step()
    assert value == loss.item()
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)
