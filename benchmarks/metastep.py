"""One meta-step of NPBML, by npbml's engine and in the style of the paper's code, on the same network and tasks:

    python benchmarks/metastep.py --net conv4
    python benchmarks/metastep.py --net resnet12

The paper's style is `higher`, one task after another, with the whole network in every inner step. It starts from
images; npbml is timed from tasks whose frozen work is done, and again with the frozen blocks computed for every
batch. The optimiser's step is in all of them. First it is checked that all find the same meta-gradient, against
that of the paper's style in single and in double precision. The scores of query items are given to all alike.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    WAYS,
    Engine,
    Make,
    Variant,
    about,
    begin,
    double_errors,
    draw_bars,
    errors_by_group,
    first_steps,
    flat,
    in_double,
    make_learner,
    nudged,
    parser,
    print_double,
    print_remarks,
    print_table,
    random_tasks,
    relative_error,
    save,
    seen_by,
    time_in_turns,
    try_import,
)
from plain import LossNetworks, NpbmlClassifier, take
from torch import Tensor

from npbml.engine.metastep import Ready
from npbml.learner.learner import Learner
from npbml.learner.prepare import Counts, prepare_tasks
from npbml.nets.settings import block_widths
from npbml.stages.metatrain import as_given
from npbml.tasks import Task, split_batch

PAPER = "the paper's style"
STEM = ", with the stem"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--net", choices=("conv4", "resnet12"), default="conv4")
    made.add_argument("--filters", type=int, help="conv4's, or those of resnet12's first block; 128 or 64")
    made.add_argument("--size", type=int, default=84)
    made.add_argument("--shots", type=int, default=5)
    made.add_argument("--meta-batch", type=int, default=2)
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--skip", default="", help="words, such as compiled: npbml's variants that are left out")
    made.add_argument("--only", default="", help="words that those of npbml's variants have which are not")
    made.add_argument(
        "--stem-gradients", action="store_true", help="the paper's style with the frozen blocks' gradients as well"
    )
    made.add_argument("--no-double", action="store_true", help="leave out all that is in double precision")
    options = made.parse_args()
    device = begin(options)
    filters = options.filters or (128 if options.net == "conv4" else 64)
    learner = make_learner("npbml", options.net, options.shots, options.size, device, filters)
    tasks = random_tasks(options.meta_batch, options.shots, options.size, device)
    prepared = learner.prepare_batch(tasks)
    learner.scorer = None  # its scores are known, and its time is not what is measured

    notes: list[str] = []
    left_out: dict[str, str] = {}
    engine = Engine(learner, notes, options.skip, options.only)
    ready = engine.variants(as_given, ((prepared, tasks.query_labels),))
    stem = engine.variants(with_stem(learner), (prepared.scores, tasks), STEM)
    seen = seen_by(learner, tasks)
    paper, double = paper_variants(learner, seen, prepared.scores, options.stem_gradients, left_out)
    exact = copy.deepcopy(learner).double()
    inputs = prepared.scores.double(), in_double(tasks)
    double += Engine(exact, notes).eager(with_stem(exact), inputs, "double")
    if options.no_double:
        double = []

    print("first steps and gradients")
    first_steps([*double, *paper, *ready, *stem], device)
    left_out |= {v.name: v.failure for v in [*double, *paper, *ready, *stem] if v.failure}
    print("timing, in turns")
    time_in_turns([*paper, *ready, *stem], device, options.rounds)

    title = (
        f"NPBML, {options.net}({filters}), {options.size}x{options.size}, 5-way {options.shots}-shot, 15 queries"
    )
    title += f", {learner.settings.inner.steps} inner steps, meta-batch {options.meta_batch}"
    result = about(device, options, title=title, notes=notes, left_out=left_out)
    baseline = paper[0].ms if paper else math.nan
    rows: list[dict[str, Any]] = []
    for variant, from_images in [*((None, v) for v in paper), *zip(ready, stem, strict=True)]:
        row: dict[str, Any] = {"with_stem": from_images.record(), "times_with_stem": baseline / from_images.ms}
        if variant is not None:
            row |= {"prepared": variant.record(), "times_prepared": baseline / variant.ms}
        checked = [v for v in (variant, from_images) if v is not None]
        for name, expected in (("error", paper), ("error_double", double)):
            if expected:
                row[name] = max(relative_error(v.found, expected[0].found) for v in checked)
                row[f"{name}_by_group"] = errors_by_group(learner, from_images.found, expected[0].found)
        rows.append({"name": checked[0].name, **row})
    result["rows"], result["double"] = rows, double_errors(double)
    report(result, title)

    def draw(figure: Any) -> None:
        bars = [(v.name, v.ms) for v in [*paper, *stem, *ready]]
        draw_bars(figure, bars, f"{title}\n{result['device']}")

    save(options.out, f"metastep-{options.net}-{device.type}", result, draw)


def with_stem(learner: Learner) -> Make:
    """The frozen work of tasks, scores aside; unchecked, as that of a data set's tasks: so it can be recorded."""

    def make(scores: Tensor, tasks: Task) -> Ready:
        images = torch.cat([tasks.support_images, tasks.query_images], 1)
        counts = Counts.of_queries(tasks.support_labels.shape[1], tasks.query_labels.shape[1])
        prepared = prepare_tasks(learner, images, tasks.support_labels, counts, WAYS)
        return prepared._replace(scores=scores), tasks.query_labels

    return make


def report(result: dict[str, Any], title: str) -> None:
    print(f"\n{title}\non {result['device']}; times are medians of a whole meta-step with the optimiser's")
    print("prepared: from tasks whose frozen work is done; with stem: from images, frozen blocks included")
    print(f"x: as many times as fast as {PAPER}; error: of the whole meta-gradient, against {PAPER}\n")
    headings = ["", "prepared ms", "x", "peak MiB", "with stem ms", "x", "peak MiB", "first s"]
    headings += ["error", "error to double"]
    table = []
    for row in result["rows"]:
        ready, stem = row.get("prepared", {}), row["with_stem"]
        table.append(
            [
                *(row["name"], ready.get("ms"), row.get("times_prepared"), ready.get("peak_mib")),
                *(stem["ms"], row["times_with_stem"], stem["peak_mib"], (ready or stem)["first_s"]),
                *(row.get("error"), row.get("error_double")),
            ]
        )
    print_table(headings, table)
    print_double(result["double"], f"{PAPER}, double")
    print_remarks(result["notes"], result["left_out"])


class PaperStyle:
    """Meta-steps by `higher` on plain modules that have a learner's weights."""

    def __init__(self, higher: Any, learner: Learner, tasks: Task, scores: Tensor, stem_gradients: bool) -> None:
        """With `stem_gradients`, those of the frozen blocks are computed too, and not used: as where they are
        frozen by nothing but being left out of the optimisers."""
        settings, inner = learner.settings, learner.settings.inner
        self.higher, self.tasks, self.scores = higher, tasks, scores
        self.ways, self.steps = settings.ways, inner.steps
        self.adapted = list(learner.start(settings.ways))
        self.classifier = NpbmlClassifier(settings.backbone, list(block_widths(settings.backbone, settings.net)))
        self.losses = LossNetworks(settings.ways, len(self.adapted), settings.loss.hidden)
        for module, prefix in ((self.classifier, ""), (self.losses, "loss.")):
            module.to(scores.device, scores.dtype)
            take(module, learner, prefix)
        if stem_gradients:
            self.classifier.network.stem.requires_grad_()
        self.names = [name for name, _ in self.classifier.named_parameters()]
        named = dict(self.classifier.named_parameters())
        named |= {f"loss.{name}": parameter for name, parameter in self.losses.named_parameters()}
        self.meta = [named[name] for name, _ in learner.named_parameters()]
        self.sgd = torch.optim.SGD(
            [named[name] for name in self.adapted],
            lr=inner.lr,
            momentum=inner.momentum,
            nesterov=inner.nesterov,
            weight_decay=inner.weight_decay,
        )
        self.adam = torch.optim.Adam(self.meta, lr=0.0)

    def __call__(self) -> None:
        self.classifier.zero_grad()
        self.losses.zero_grad()
        for task, scores in zip(split_batch(self.tasks), self.scores, strict=True):
            (self.query_loss(task, scores) / len(self.scores)).backward()
        self.adam.step()

    def query_loss(self, task: Task, scores: Tensor) -> Tensor:
        """The loss of a task after adaptation."""
        images = torch.cat([task.support_images, task.query_images])
        with self.higher.innerloop_ctx(self.classifier, self.sgd, copy_initial_weights=False) as (fast, sgd):
            start = dict(zip(self.names, fast.parameters(), strict=True))
            start["head.weight"] = start["head.weight"].expand(self.ways, -1)
            start["head.bias"] = start["head.bias"].expand(self.ways)
            fast.update_params(list(start.values()))
            for _ in range(self.steps):
                logits = fast(images)
                theta = dict(zip(self.names, fast.parameters(), strict=True))
                adapted = [theta[name] for name in self.adapted]
                sgd.step(self.losses(logits, task.support_labels, scores, adapted))
            return F.cross_entropy(fast(task.query_images), task.query_labels)

    def gradient(self) -> Tensor:
        return flat(parameter.grad for parameter in self.meta)


def paper_variants(
    learner: Learner, tasks: Task, scores: Tensor, stem_gradients: bool, left_out: dict[str, str]
) -> tuple[list[Variant], list[Variant]]:
    """The paper's style as it is timed, the baseline first, and in double precision."""
    higher = try_import("higher", left_out)
    if higher is None:
        return [], []

    def variant(words: str, given: Task, tf32: bool = False, stem_gradients: bool = False) -> Variant:
        step = PaperStyle(higher, learner, given, scores.to(given.query_images.dtype), stem_gradients)
        return Variant(PAPER + words, step, step.gradient, tf32)

    timed = [variant("", tasks)]
    if stem_gradients:
        timed += [variant(", stem's gradients too", tasks, stem_gradients=True)]
    if scores.is_cuda:
        timed += [variant(", tf32", tasks, tf32=True)]
    exact = in_double(tasks)
    return timed, [variant(", double", exact), variant(", double, images nudged", nudged(exact))]


if __name__ == "__main__":
    main()
