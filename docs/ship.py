"""Put the learner of a finished run into the package.

python docs/ship.py RUN METHOD NAME

What is frozen, half of the weights, is kept in half precision, as its features are on a GPU.
"""

import json
import shutil
import sys
from pathlib import Path

import torch

import npbml
from npbml.files import load_tensors, save_tensors, write_json

FROZEN = ("network.stem.", "relation.")


def main(run: str, method: str, name: str) -> None:
    source, folder = Path(run), npbml.LEARNERS / name
    shutil.rmtree(folder, ignore_errors=True)
    tensors, about = load_tensors(source / method / "learner.safetensors")
    kept = {key: value.to(torch.float16) if key.startswith(FROZEN) else value for key, value in tensors.items()}
    save_tensors(folder / method / "learner.safetensors", kept, about)
    write_json(folder / "config.json", json.loads((source / "config.json").read_text()) | {"method": method})
    shutil.copy(source / "results.json", folder)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
