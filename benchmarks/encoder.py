"""What an encoder is worth before anything is meta-learned, by the statistics of its last block's batch norm:

    npbml pretrain --dataset cifar-fs --protocol best --run runs/encoder
    python benchmarks/encoder.py runs/encoder

Accuracy of prototypes on tasks of the meta-validation classes, or with `--split train` of the training classes,
which the encoder knows: with the running statistics of pre-training, and with those of the task's own images,
support and query together or apart. The stem has running statistics always.
"""

import argparse
from pathlib import Path

from common import begin, parser, print_accuracies
from torch import Tensor

from npbml.engine.device import computing, in_precision
from npbml.lab.pipeline import Pipeline
from npbml.lab.run_folder import read_config
from npbml.lab.schema import override
from npbml.stages.pretrain import prototype_accuracies, use_norms

WAYS = {
    "running": ("running", "joint"),
    "of both batches": ("batch", "joint"),
    "of each batch": ("batch", "separate"),
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("run", type=Path, help="a run folder with a pre-trained encoder")
    made.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    made.add_argument("--tasks", type=int, default=600)
    made.add_argument("--split", choices=("train", "val"), default="val")
    made.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), default="float32")
    options = made.parse_args()
    device = begin(options)
    run = Pipeline(options.run, override(read_config(options.run), {"device": options.device}))
    with computing(device, options.precision, deterministic=False), in_precision(options.precision, device):
        rows = {name: accuracies(run, *way, options) for name, way in WAYS.items()}
    config = run.config
    print(f"{config.dataset}, {config.learner.backbone}, {options.tasks} tasks of the {options.split} classes\n")
    print_accuracies("statistics", rows, "running", rows["running"], options.shots)


def accuracies(run: Pipeline, statistics: str, batch: str, options: argparse.Namespace) -> list[Tensor]:
    """Of each task, for each number of shots: [tasks]"""
    network, classes = run.pretrained_network(), run.splits[options.split]
    norms = {"net": {"stem_norm": "running", "tail_norm": statistics}, "pretrain": {"prototype_batch": batch}}
    found = []
    for shots in options.shots:
        config = override(run.config, {**norms, "shots": shots})
        use_norms(network, config.learner)
        setup, tasks = run.setup(config), options.tasks
        found.append(prototype_accuracies(network, setup, config.pretrain, classes, tasks, "validation"))
    return found


if __name__ == "__main__":
    main()
