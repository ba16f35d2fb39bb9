"""What an encoder is worth before anything is meta-learned, by the statistics of its last block's batch norm:

    npbml pretrain --dataset cifar-fs --protocol best --run runs/encoder
    python benchmarks/encoder.py runs/encoder

Accuracy of prototypes on tasks of the meta-validation classes, or with `--split train` of the training classes,
which the encoder knows: with the running statistics of pre-training, and with those of the task's own images,
support and query together or apart. The stem has running statistics always.
"""

from pathlib import Path

from common import begin, parser, print_table

from npbml.config import override, with_device
from npbml.engine.device import in_precision, set_precision
from npbml.engine.evaluate import ACCURACY
from npbml.run_folder import read_config
from npbml.runs import Run
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
    run = Run(options.run, with_device(read_config(options.run), options.device))
    set_precision(options.precision)
    network, classes, rows, first = run.pretrained_network(), run.splits[options.split], [], {}
    for name, (statistics, batch) in WAYS.items():
        norms = {"stem_norm": "running", "tail_norm": statistics}
        config = override(run.config, {"net": norms, "pretrain": {"prototype_batch": batch}})
        use_norms(network, config)
        row = [name]
        for shots in options.shots:
            with in_precision(options.precision, device):
                found = prototype_accuracies(network, config, classes, shots, options.tasks, "validation")
            own, apart = ACCURACY.over(found), ACCURACY.over(found - first.setdefault(shots, found))
            row.append(f"{own.mean:.2f} ± {own.ci95:.2f}")
            row.append(f"{apart.mean:+.2f} ± {apart.ci95:.2f}" if found is not first[shots] else "")
        rows.append(row)
    print(f"{run.config.dataset}, {run.config.backbone}, {options.tasks} tasks of the {options.split} classes\n")
    headings = [words for shots in options.shots for words in (f"{shots}-shot, %", "to running")]
    print_table(["statistics", *headings], rows)


if __name__ == "__main__":
    main()
