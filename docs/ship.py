"""Put the learner of a finished run into the package.

python docs/ship.py RUN METHOD NAME

It becomes one file, src/npbml/learners/NAME.safetensors, with its settings, the images it takes and the results of
the run in the metadata. What is frozen, half of the weights, is kept in half precision, as its features are on a
GPU.
"""

import sys
from pathlib import Path

import torch

from npbml.catalogue import LEARNERS, load
from npbml.json_files import read_json
from npbml.learner.file import about_learner
from npbml.tensor_files import save_tensors


def main(run: str, method: str, name: str) -> None:
    source = Path(run)
    learner = load(source, method, device="cpu")
    # Of a learner's state; a scorer that learns with the rule is not frozen.
    frozen = (
        ("network.stem.",) if learner.scorer is None or learner.scorer.learned else ("network.stem.", "relation.")
    )
    tensors = {
        key: tensor.to(torch.float16) if key.startswith(frozen) else tensor
        for key, tensor in learner.state_dict().items()
    }
    about = {"method": method, "results": read_json(source / "results.json")}
    about |= about_learner(learner.settings, learner.images)
    save_tensors(LEARNERS / f"{name}.safetensors", tensors, about)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
