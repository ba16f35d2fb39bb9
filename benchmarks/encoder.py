"""What an encoder is worth before anything is meta-learned, by the statistics of its last block's batch norm:

    npbml pretrain --dataset cifar-fs --protocol best --run runs/encoder
    python benchmarks/encoder.py runs/encoder

Accuracy of prototypes on tasks of the meta-validation classes, or with `--split train` of the training classes,
which the encoder knows: with the running statistics of pre-training, and with those of the task's own images,
support and query together or apart. The stem has running statistics always.
"""

from pathlib import Path

from common import begin, parser, print_accuracies
from torch import Tensor

from npbml.engine.device import in_precision, set_precision
from npbml.lab.pipeline import Pipeline
from npbml.lab.run_folder import read_config
from npbml.lab.schema import override, with_device
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
    run = Pipeline(options.run, with_device(read_config(options.run), options.device))
    set_precision(options.precision)
    network, classes = run.pretrained_network(), run.splits[options.split]
    rows: dict[str, list[Tensor]] = {}
    for name, (statistics, batch) in WAYS.items():
        norms = {"stem_norm": "running", "tail_norm": statistics}
        config = override(run.config, {"net": norms, "pretrain": {"prototype_batch": batch}})
        use_norms(network, config)
        with in_precision(options.precision, device):
            rows[name] = [
                prototype_accuracies(network, config, classes, shots, options.tasks, "validation")
                for shots in options.shots
            ]
    print(f"{run.config.dataset}, {run.config.backbone}, {options.tasks} tasks of the {options.split} classes\n")
    print_accuracies("statistics", rows, "running", rows["running"], options.shots)


if __name__ == "__main__":
    main()
