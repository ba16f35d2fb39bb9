"""The batched augmentation against its definition, image by image."""

import dataclasses
import time

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from npbml.data.augment import Variation, augment, draw_variation, vary
from npbml.data.settings import AugmentSettings
from npbml.errors import SettingError
from npbml.randomness import draw_numbers, generator
from npbml.settings import check

PLAIN = AugmentSettings(crop_scale_low=1.0, flip=False)  # whole images, of which only the colours vary


def of_one_colour(variation: Variation) -> Variation:
    """The same crops without jitter."""
    return variation._replace(factors=torch.ones_like(variation.factors))


def number(seed: int, *purpose: str | int) -> torch.Tensor:
    return draw_numbers(generator(seed, *purpose))[0]


def some_images(count: int, channels: int, height: int, width: int | None = None) -> torch.Tensor:
    """Smooth pictures of many levels: the mean of coarse and fine noise."""
    random = np.random.default_rng(count + channels + height)
    shape = (count, channels, height, width or height)
    fine = random.integers(0, 256, shape)
    coarse = np.kron(random.integers(0, 256, (*shape[:2], 2, 2)), np.ones((height // 2, shape[3] // 2)))
    return torch.from_numpy(((fine + 2 * coarse) // 3).astype(np.uint8))


def cropped(image: torch.Tensor, variation: Variation, place: int, size: int | None = None) -> np.ndarray:
    """The crop as float [channels, height, width] of 0..1: Pillow's, channel by channel."""
    top, left, height, width = (int(field[place]) for field in variation[:4])
    channels = []
    for channel in image.numpy().astype(np.float32) / 255:
        crop = Image.fromarray(channel).crop((left, top, left + width, top + height))
        crop = crop.resize((size, size) if size else channel.shape[::-1], Image.Resampling.BILINEAR)
        channels.append(np.asarray(ImageOps.mirror(crop) if variation.mirrored[place] else crop))
    return np.stack(channels).astype(np.float64)


def jittered(image: np.ndarray, variation: Variation, place: int) -> np.ndarray:
    """Brightness, contrast and saturation by torchvision's definitions, one after another."""

    def grey(image: np.ndarray) -> np.ndarray:
        return image[0] if len(image) == 1 else 0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2]

    for step in variation.order[place].tolist():
        factor = float(variation.factors[place, step])
        if step == 0:
            image = factor * image
        elif step == 1:
            image = factor * image + (1 - factor) * grey(image).mean()
        else:
            image = factor * image + (1 - factor) * grey(image)
        image = np.clip(image, 0, 1)
    return image


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(28, 28), (24, 36)])
@pytest.mark.parametrize(
    ("settings", "jitter"),
    [
        (PLAIN, False),
        (dataclasses.replace(PLAIN, flip=True), False),
        (dataclasses.replace(PLAIN, crop_scale_low=0.08), False),
        (PLAIN, True),
        (AugmentSettings(), True),
    ],
    ids=["plain", "flip", "crop", "jitter", "all"],
)
def test_a_batch_is_what_each_image_would_be(
    settings: AugmentSettings, jitter: bool, size: tuple[int, int], channels: int
) -> None:
    images = some_images(24, channels, *size)
    variation = draw_variation(24, *size, settings, number(0, "definition"))
    variation = variation if jitter else of_one_colour(variation)
    varied = vary(images, variation).double().numpy()
    assert varied.shape == images.shape
    for place in range(24):
        expected = jittered(cropped(images[place], variation, place), variation, place)
        np.testing.assert_allclose(varied[place], expected, rtol=0, atol=2e-5)


def test_crops_of_another_size_are_what_each_image_would_be() -> None:
    images = some_images(24, 3, 28, 24)
    variation = draw_variation(24, 28, 24, AugmentSettings(), number(0, "size"))
    varied = vary(images, variation, 40).double().numpy()
    assert varied.shape == (24, 3, 40, 40)
    for place in range(24):
        expected = jittered(cropped(images[place], variation, place, 40), variation, place)
        np.testing.assert_allclose(varied[place], expected, rtol=0, atol=2e-5)


def test_whole_images_of_half_the_size_are_the_means_of_four_pixels() -> None:
    images = some_images(8, 3, 20)
    variation = of_one_colour(draw_variation(8, 20, 20, PLAIN, number(1)))
    expected = (images / 255).unflatten(3, (10, 2)).unflatten(2, (10, 2)).mean((3, 5))
    torch.testing.assert_close(vary(images, variation, 10), expected, rtol=0, atol=1e-5)


def test_jitter_is_what_pillow_calls_enhancing() -> None:
    images = some_images(24, 3, 28)
    variation = draw_variation(24, 28, 28, PLAIN, number(0, "Pillow"))
    varied = vary(images, variation).double().numpy() * 255
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for place in range(24):
        picture = Image.fromarray(images[place].numpy().transpose(1, 2, 0))
        for step in variation.order[place].tolist():
            picture = enhancers[step](picture).enhance(float(variation.factors[place, step]))
        # Pillow cuts off to whole levels after each step, and the next one may multiply what it cut.
        assert np.abs(varied[place] - np.asarray(picture).transpose(2, 0, 1)).max() <= 4


def test_images_in_bytes_and_in_fractions_are_the_same() -> None:
    images = some_images(8, 3, 20)
    one, other = (augment(form, AugmentSettings(), number(1)) for form in (images, images / 255))
    assert one.dtype == torch.float32
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_without_variation_the_images_stay_as_they_are() -> None:
    images = some_images(8, 3, 20)
    variation = of_one_colour(draw_variation(8, 20, 20, PLAIN, number(1)))
    torch.testing.assert_close(vary(images, variation), images / 255, rtol=0, atol=1e-5)


def test_saturation_leaves_grey_alone() -> None:
    images = some_images(6, 1, 16)
    variation = draw_variation(6, 16, 16, AugmentSettings(), number(4))
    grey = variation._replace(factors=variation.factors.clone())
    grey.factors[:, 2] = 0
    torch.testing.assert_close(vary(images, grey), vary(images, variation), rtol=0, atol=1e-6)


def test_results_stay_between_black_and_white() -> None:
    drawn = draw_variation(200, 12, 12, AugmentSettings(), number(2))
    wide = drawn._replace(factors=(drawn.factors - 1) / 0.4 + 1)  # 0 to 2
    varied = vary(some_images(200, 3, 12), wide)
    assert varied.min() == 0 and varied.max() <= 1


def test_crops_follow_torchvisions_distribution() -> None:
    """Against the definition's own loop: ten tries, the first that fits, else the whole of a square image."""
    count, size = 20000, 28
    variation = draw_variation(count, size, size, AugmentSettings(), number(0, "crops"))
    random = np.random.default_rng(0)
    reference = np.empty((count, 4))
    for place in range(count):
        for _ in range(10):
            area = size * size * random.uniform(0.08, 1)
            ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
            width, height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < width <= size and 0 < height <= size:
                reference[place] = (
                    random.integers(size - height + 1),
                    random.integers(size - width + 1),
                    height,
                    width,
                )
                break
        else:
            reference[place] = 0, 0, size, size
    drawn = torch.stack(variation[:4], 1).numpy()
    assert (drawn >= 0).all() and (drawn[:, :2] + drawn[:, 2:] <= size).all()
    assert (drawn == drawn.round()).all() and drawn[:, 2:].min() >= 1
    for column in range(4):
        both = np.stack(
            [np.bincount(one[:, column].astype(int), minlength=size + 1) for one in (drawn, reference)]
        )
        distance = np.abs(both.cumsum(1)[0] - both.cumsum(1)[1]).max() / count
        assert distance < 1.95 * (2 / count) ** 0.5  # Kolmogorov and Smirnov at the level 0.001


@pytest.mark.parametrize(("height", "width", "box"), [(40, 10, (13, 0, 13, 10)), (9, 60, (0, 24, 9, 12))])
def test_where_no_crop_fits_the_middle_is_taken(height: int, width: int, box: tuple[int, int, int, int]) -> None:
    variation = draw_variation(50, height, width, PLAIN, number(0))
    assert all((field == side).all() for field, side in zip(variation[:4], box, strict=True))


def test_factors_orders_and_mirrors_are_uniform() -> None:
    count = 12000
    variation = draw_variation(count, 8, 8, AugmentSettings(), number(0, "uniform"))
    assert 0.6 <= variation.factors.min() < 0.601 and 1.399 < variation.factors.max() <= 1.4
    torch.testing.assert_close(variation.factors.mean(0), torch.ones(3).double(), rtol=0, atol=0.01)
    assert abs(float(variation.mirrored.double().mean()) - 0.5) < 0.02
    orders = (variation.order * torch.tensor([9, 3, 1])).sum(1).unique(return_counts=True)[1].double()
    assert len(orders) == 6 and float(((orders - count / 6) ** 2 / (count / 6)).sum()) < 20.5
    assert not draw_variation(count, 8, 8, PLAIN, number(0)).mirrored.any()


def test_a_generator_names_its_draws() -> None:
    first, again, other = (draw_variation(5, 8, 8, AugmentSettings(), number(0, s)) for s in (1, 1, 2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first.factors, other.factors)


def test_impossible_settings_are_named() -> None:
    check(AugmentSettings())
    for name, value in (("crop_scale_low", 0.0), ("crop_scale_low", 1.1)):
        with pytest.raises(SettingError, match=name):
            check(dataclasses.replace(AugmentSettings(), **{name: value}))


def test_a_batch_of_glyphs_takes_milliseconds() -> None:
    images, times, threads = some_images(128, 1, 28), [], torch.get_num_threads()
    torch.set_num_threads(1)  # two threads on a busy machine wait for one another, not for the work
    try:
        for step in range(20):
            start = time.perf_counter()
            augment(images, AugmentSettings(), number(0, step))
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    assert min(times) < 0.02
