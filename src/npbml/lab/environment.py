"""What the outcome of a run may depend on beside its settings."""

import os
import platform
from importlib.metadata import version
from typing import Any

import torch

from npbml.engine.device import describe_device
from npbml.lab.schema import Config
from npbml.registry import LOADED
from npbml.version import __version__


def environment(config: Config, device: torch.device, data: str) -> dict[str, Any]:
    """What the outcome may depend on beside the settings."""
    packages = ("torch", "numpy", "pillow", "matplotlib", "safetensors")
    return {
        "npbml": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "platform": f"{platform.system()} {platform.machine()}",
        "device": describe_device(device),
        "cores": os.cpu_count(),
        "seed": config.seed,
        "data": data,
        **({"plugins": list(LOADED)} if LOADED else {}),
    }
