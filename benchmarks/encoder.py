"""What an encoder is worth before anything is meta-learned, by the statistics of its last block's batch norm:

    npbml pretrain --dataset cifar-fs --protocol best --run runs/encoder
    python benchmarks/encoder.py runs/encoder

Accuracy of prototypes on tasks of the meta-validation classes: with the running statistics of pre-training, and
with those of the task's own images, support and query together or apart. The stem has running statistics always.
"""

from pathlib import Path

from common import begin, parser, print_table

from npbml.config import override
from npbml.engine.evaluate import ACCURACY
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
    options = made.parse_args()
    begin(options)
    run = Run.open(options.run)
    network, rows = run.pretrained_network(), []
    for name, (statistics, batch) in WAYS.items():
        norms = {"stem_norm": "running", "tail_norm": statistics}
        config = override(run.config, {"net": norms, "pretrain": {"prototype_batch": batch}})
        use_norms(network, config)
        row = [name]
        for shots in options.shots:
            found = prototype_accuracies(network, config, run.splits["val"], shots, options.tasks, "validation")
            accuracy = ACCURACY.over(found)
            row.append(f"{accuracy.mean:.2f} ± {accuracy.ci95:.2f}")
        rows.append(row)
    print(f"{run.config.dataset}, {run.config.backbone}, {options.tasks} meta-validation tasks\n")
    print_table(["statistics", *(f"{shots}-shot, %" for shots in options.shots)], rows)


if __name__ == "__main__":
    main()
