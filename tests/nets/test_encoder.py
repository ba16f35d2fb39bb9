"""Encoders of one's own: any module is a frozen stem, and its weights stay out of a learner's file."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import npbml
from npbml.learner.settings import ImageSpec
from npbml.methods import find_recipe
from npbml.parts import BACKBONES
from npbml.settings import from_dict, merged

SPEC = ImageSpec(3, 16, (0.5,) * 3, (0.25,) * 3)


def module(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 12, 3, 2), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )


def encoder(made: object = None, **settings: float) -> npbml.Encoder:
    return npbml.Encoder(made or module(), SPEC.size, SPEC.mean, SPEC.std, **settings)  # type: ignore[arg-type]


@pytest.fixture
def registered() -> Iterator[npbml.Encoder]:
    made = encoder()
    BACKBONES.register("test-encoder", made)
    yield made
    del BACKBONES.parts["test-encoder"]


def learner(method: str = "npbml-any") -> npbml.Learner:
    small = {"backbone": "test-encoder", "net": {"filters": 8}, "warp": {"kernel": 1}, "scorer": {"rounds": 2}}
    tables = merged(find_recipe(method).rule, small)
    return npbml.Learner(from_dict(npbml.LearnerSettings, tables, npbml.LearnerSettings()), SPEC)


def images(count: int, size: int = SPEC.size, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), generator=random, dtype=torch.uint8)


def test_features_are_the_modules_with_a_mean_square_of_one() -> None:
    made, x = module(), torch.randn(5, 3, 16, 16)
    found = encoder(made).features(x)
    with torch.no_grad():
        raw = made.eval()(x)
    assert found.shape == (5, 12, 1, 1)
    torch.testing.assert_close(
        found.flatten(1), raw / raw.square().mean(1, keepdim=True).sqrt(), atol=1e-4, rtol=0
    )
    root = encoder(made, power=0.5).features(x).flatten(1)
    torch.testing.assert_close(root, raw.sqrt() / raw.mean(1, keepdim=True).sqrt(), atol=1e-4, rtol=0)


def test_maps_stay_maps_and_other_sizes_and_grey_images_are_taken() -> None:
    maps = encoder(module()[:3])  # type: ignore[index]
    assert maps.features(torch.randn(2, 3, 16, 16)).shape == (2, 12, 7, 7)
    assert maps.features(torch.randn(2, 3, 30, 30)).shape == (2, 12, 7, 7)
    grey = torch.randn(2, 1, 16, 16)
    assert torch.equal(maps.features(grey), maps.features(grey.expand(-1, 3, -1, -1)))


def test_the_users_module_is_left_as_it_was() -> None:
    made = module().train()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    encoder(made).features(torch.randn(4, 3, 16, 16))
    assert made.training and all(parameter.requires_grad for parameter in made.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in made.state_dict().items())


def test_a_function_that_makes_the_module_is_called_once_when_it_is_needed() -> None:
    calls: list[int] = []

    def make() -> nn.Module:
        calls.append(1)
        return module()

    made = encoder(make)
    assert not calls
    threads = [threading.Thread(target=lambda: made.features(torch.zeros(1, 3, 16, 16))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and made.digest == encoder().digest


def test_features_of_an_image_do_not_depend_on_others(registered: npbml.Encoder) -> None:
    x = images(6)
    whole, own = learner().features(x), learner().features(x[2:3])
    torch.testing.assert_close(whole[2:3], own, atol=1e-6, rtol=0)


def test_a_learner_adapts_and_answers_and_only_its_tail_learns(registered: npbml.Encoder) -> None:
    made = learner()
    assert not any("stem" in name for name, _ in made.named_parameters())
    x, labels = images(9), torch.arange(3).repeat(3)
    theta = made.adapt(npbml.Task(x, labels, x[:0], labels[:0], images(4, seed=1)))
    logits = made.answer(theta, images(5, seed=2))
    assert logits.shape == (5, 3) and logits.isfinite().all()
    loss = made.meta_loss([npbml.Task(x, labels, images(6, seed=3), torch.arange(3).repeat(2))])
    loss.backward()
    assert made.network.tail.blocks[0].block.weight.grad.abs().sum() > 0  # type: ignore[union-attr]


def test_a_learners_file_has_no_weights_of_the_encoder_but_knows_them(
    registered: npbml.Encoder, tmp_path: Path
) -> None:
    made, path = learner(), tmp_path / "learner.safetensors"
    npbml.save_learner(made, path)
    again = npbml.load(path, device="cpu")
    own = {name.rpartition(".")[2] for name in made.state_dict() if ".stem." in name}
    assert own == {"centre", "digest"}
    assert torch.equal(made.features(images(2)), again.features(images(2)))
    BACKBONES.register("test-encoder", encoder(module(seed=1)))
    with pytest.raises(npbml.RunError, match="other weights than the one that this learner was trained on"):
        npbml.load(path, device="cpu")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: npbml.Encoder(module(), 0, SPEC.mean, SPEC.std), "size of at least 1"),
        (lambda: npbml.Encoder(module(), 16, SPEC.mean, (0.0,) * 3), "std above 0"),
        (lambda: npbml.Encoder(module(), 16, (0.5,), (0.5,)), "3 channels"),
        (lambda: encoder(lambda: "no module").features(torch.zeros(1, 3, 16, 16)), "made of a torch module"),
        (lambda: encoder(nn.Flatten(0)).features(torch.zeros(1, 3, 16, 16)), r"vectors \[n, width\] or maps"),
    ],
)
def test_what_cannot_be_an_encoder_is_refused(make: object, message: str) -> None:
    with pytest.raises(npbml.SettingError, match=message):
        make()  # type: ignore[operator]


def test_settings_that_would_look_at_other_views_are_refused(registered: npbml.Encoder) -> None:
    tables = merged(find_recipe("npbml").rule, {"backbone": "test-encoder"})
    settings = from_dict(npbml.LearnerSettings, tables, npbml.LearnerSettings())
    with pytest.raises(npbml.SettingError, match="scored by these alone"):
        npbml.Learner(settings, SPEC)
