"""Law C24: FiLM_psi(x) = (gamma_psi + 1) x + beta_psi."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.learner.learner import Learner
from npbml.learner.prepare import normalised
from npbml.randomness import generator
from npbml.rule.modulate import FiLM
from npbml.tasks import Task


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "numbers"), dtype=torch.float64)


def random_film(inputs: int, outputs: int, conditioning: str = "item") -> FiLM:
    film = FiLM(inputs, outputs, conditioning).double()  # type: ignore[arg-type]
    with torch.no_grad():
        film.generator.weight.copy_(numbers(2 * outputs, inputs, seed=8))
        film.generator.bias.copy_(numbers(2 * outputs, seed=9))
    return film


@pytest.mark.parametrize("shape", [(), (5, 6)])
@pytest.mark.parametrize("conditioning", ["item", "batch"])
def test_c24_film_is_its_equation(shape: tuple[int, ...], conditioning: str) -> None:
    film, u, y = random_film(3, 2, conditioning), numbers(4, 3, *shape), numbers(4, 2, *shape, seed=1)
    pooled = u.mean((2, 3)) if shape else u
    if conditioning == "batch":
        pooled = pooled.mean(0).expand(4, -1)
    both = pooled @ film.generator.weight.T + film.generator.bias
    for item in range(4):
        for channel in range(2):
            expected = (1 + both[item, channel]) * y[item, channel] + both[item, 2 + channel]
            torch.testing.assert_close(film(u, y)[item, channel], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("conditioning", ["item", "batch"])
def test_c24_zero_film_is_the_identity(conditioning: str) -> None:
    film, y = random_film(3, 2, conditioning), numbers(4, 2, 5, 5, seed=1)
    torch.nn.init.zeros_(film.generator.weight)
    torch.nn.init.zeros_(film.generator.bias)
    assert torch.equal(film(numbers(4, 3, 5, 5), y), y)


def test_c24_batch_conditioning_is_the_mean_of_the_items_modulations() -> None:
    """The generator is linear: of the mean, it is the mean."""
    item, batch, u = random_film(3, 2), random_film(3, 2, "batch"), numbers(4, 3, 5, 5)
    for mine, theirs in zip(batch.generate(u), item.generate(u), strict=True):
        assert mine.shape == (1, 2)
        torch.testing.assert_close(mine, theirs.mean(0, keepdim=True), rtol=0, atol=1e-12)


def test_c24_item_conditioning_ignores_the_other_items() -> None:
    film, u, y = random_film(3, 2), numbers(4, 3, 5, 5), numbers(4, 2, 5, 5, seed=1)
    other = torch.cat([u[:1], numbers(3, 3, 5, 5, seed=2)])
    torch.testing.assert_close(film(u, y)[0], film(other, y)[0], rtol=0, atol=1e-12)
    batch = random_film(3, 2, "batch")
    assert (batch(u, y)[0] - batch(other, y)[0]).abs().max() > 1e-2


def test_film_keeps_the_first_modulation_where_it_is_fixed() -> None:
    film = random_film(3, 2, "batch")
    fixed: dict[object, object] = {}
    u, y = numbers(4, 3, 5, 5), numbers(4, 2, 5, 5, seed=1)
    first = film(u, y, fixed)
    assert torch.equal(first, film(u, y))
    assert torch.equal(film(numbers(4, 3, 5, 5, seed=2), y, fixed), first)


def test_film_refresh_task_modulates_by_theta_0_on_the_inner_batch(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task]
) -> None:
    """The query logits, with the tail written out and gamma and beta of theta_0 on support and query."""
    learner, task = make_learner(film={"conditioning": "batch", "refresh": "task"}), make_task()
    stem, (block,) = learner.network.stem, learner.network.tail.blocks
    start, adapted = learner.start(3), learner.adapt(task)
    kept: list[tuple[Tensor, Tensor]] = []

    def tail(theta: dict[str, Tensor], u: Tensor) -> Tensor:
        for film, weight, norm in (
            (block.unit.film, theta["network.tail.blocks.0.unit.conv.weight"], block.unit.norm),
            (block.warp.film, block.warp.omega, block.warp.norm),
        ):
            y = F.conv2d(u, weight, padding=1)
            y = F.batch_norm(y, None, None, norm.weight, norm.bias, training=True)
            if len(kept) < 2:
                kept.append(film.generate(u))
            gamma, beta = kept[film is block.warp.film]
            y = (1 + gamma[..., None, None]) * y + beta[..., None, None]
            u = F.max_pool2d(y.relu(), 2) if film is block.unit.film else y
        return u.mean((2, 3)) @ theta["head.weight"].T + theta["head.bias"]

    support, query = (normalised(learner, images) for images in (task.support_images, task.query_images))
    tail(start, stem(torch.cat([support, query])))
    expected = tail(adapted, stem(query))
    torch.testing.assert_close(learner.predict(task), expected, rtol=0, atol=1e-10)
    fresh = make_learner(film={"conditioning": "batch"})
    assert (fresh.predict(task) - expected).abs().max() > 1e-4
