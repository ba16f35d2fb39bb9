"""What the outcome of a run may depend on beside its settings."""

import os
import platform
from importlib.metadata import version
from typing import Any

import torch

import npbml
from npbml.config import Config
from npbml.engine.device import describe_device


def environment(config: Config, device: torch.device, data: str) -> dict[str, Any]:
    """What the outcome may depend on beside the settings."""
    packages = ("torch", "numpy", "pillow", "matplotlib", "safetensors")
    return {
        "npbml": npbml.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "platform": f"{platform.system()} {platform.machine()}",
        "device": describe_device(device),
        "cores": os.cpu_count(),
        "seed": config.seed,
        "data": data,
    }
