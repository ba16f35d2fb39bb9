"""The learner `photos`: how its features are made, how it is trained, and what it is worth beside simple methods.

    python benchmarks/photos.py features --out features                  # a GPU needs 3 minutes
    python benchmarks/photos.py train --features features --out first.safetensors
    python benchmarks/photos.py train --features features --start first.safetensors --steps 300 --rates 0.5 \
        --out second.safetensors
    python benchmarks/photos.py train --features features --start first.safetensors --steps 240 --meta-batch 6 \
        --out third.safetensors
    python benchmarks/photos.py average --features features --learners first.safetensors second.safetensors \
        third.safetensors --out photos.safetensors
    python benchmarks/photos.py train --features features --domains mini-imagenet --out mini.safetensors
    python benchmarks/photos.py test --features features --learner photos --split test --out results/photos
    python benchmarks/photos.py unknown --features features --learner photos --out results/photos
    python benchmarks/photos.py omniglot --learner photos --out results/photos

Features are those of efficientnet-lite0, of the prepared data sets mini-imagenet and cifar-fs. In training, half
of the images of a class are shown as they are, and half in a random crop, many of them blurred, so that the rule
does not learn the blur of small images. `--domains` trains on one of the two, which shows how the rule does on the
other. `test` compares with nearest class means, logistic regression and soft k-means, on the same tasks and
features. `unknown` measures how well a threshold tells pictures of other classes; `omniglot` has tasks of 50
classes.
"""

import argparse
import itertools
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import npbml
from npbml.data.draws import check_shape, task_items
from npbml.data.sets import open_dataset
from npbml.data.tasks import ClassSet
from npbml.engine.calibration import best_temperature, expected_calibration_error, temperature_by_shape
from npbml.engine.evaluate import DRAWN_AT_ONCE, all_answers, evaluate, learner_answers
from npbml.engine.settings import EngineSettings
from npbml.engine.source import TaskSource
from npbml.json_files import write_json, write_whole
from npbml.lab.protocols import ENCODER
from npbml.learner.settings import ImageSpec, LearnerSettings
from npbml.methods import find_recipe
from npbml.nets.photographs import efficientnet_lite0 as ENCODER_NET
from npbml.parts import BACKBONES
from npbml.randomness import generator
from npbml.rule.settings import shape_sizes
from npbml.scorers.whiten import whitened_cosines
from npbml.settings import from_dict, merged
from npbml.shapes import read_shape
from npbml.stages.metatrain import MetaTrainer
from npbml.stages.projection import principal_map
from npbml.stages.settings import RateSettings, TrainSettings
from npbml.stages.setup import Setup

DOMAINS = ("mini-imagenet", "cifar-fs")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = (
    *("5x1", "5x5", "2x~3", "10x1", "10x~3", "5x~10", "20x~3", "10x~5", "20x~5"),
    *("5x1+75", "5x5+75", "3x1+15", "3x5+45", "10x1+150", "10x5+150", "16x1+240", "16x5+240"),
    *("5x1+~75", "5x5+~75", "2x~3+~30", "10x~3+~50", "5x~2+~5"),
)
ALONE, POOLS = ("5x1", "5x5"), ("5x1+75", "5x5+75", "5x1+~75", "5x5+~75")
# How answers depend on classes and examples; /15 queries of each class, none of which adaptation sees.
SIZES = (
    *("2x1", "3x1", "10x1", "20x1", "2x5", "3x5", "10x5", "20x5", "5x20/15", "2x50/15", "5x50/15"),
    *("2x~5", "5x~5", "10x~5", "20x~5"),
)
COSTS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # C of logistic regression on unit vectors
LONGEST_STEP = 0.7  # after training: those of 5-way tasks are shorter, those of 50-way tasks overshoot without it
RATES = RateSettings(theta=1e-4, omega=1e-4, phi=1e-2, psi=1e-4)
KMEANS = tuple(
    itertools.product(("plain", "centred", "whitened"), (5.0, 10.0, 20.0, 40.0), (0.0, 0.5, 1.0), (1.0, 3.0))
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("features", "train", "average", "test", "unknown", "omniglot"))
    parser.add_argument("--features", type=Path, help="the folder that `features` has written")
    parser.add_argument(
        "--domains", nargs="+", choices=DOMAINS, default=list(DOMAINS), help="to train on, or to test"
    )
    parser.add_argument("--start", type=Path, help="a learner to train further, in the place of a new one")
    parser.add_argument("--steps", type=int, default=560, help="meta-steps")
    parser.add_argument("--rates", type=float, default=1.0, help="times the meta rates")
    parser.add_argument("--meta-batch", type=int, default=4)
    parser.add_argument("--images", type=int, default=300, help="of a training class")
    parser.add_argument("--other-images", type=int, default=600, help="of a validation or test class")
    parser.add_argument("--learner", default="photos", help="a name or a file")
    parser.add_argument("--learners", nargs="+", help="of which `average` makes one")
    parser.add_argument("--split", choices=("val", "test"), default="test")
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument(
        "--size-tasks", type=int, default=100, help="tasks of each of the shapes beside 5-way ones"
    )
    parser.add_argument("--shapes", nargs="+", default=[*ALONE, *POOLS, *SIZES], help="of the tasks of `test`")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks = {"features": make_features, "train": train, "average": average, "test": test}
    tasks |= {"unknown": unknown, "omniglot": omniglot}
    tasks[options.what](options)


def make_features(options: argparse.Namespace) -> None:
    """Write float16 [classes, images, 1280] for each data set and split."""
    options.out.mkdir(parents=True, exist_ok=True)
    for domain, split in itertools.product(DOMAINS, ("train", "val", "test")):
        classes, found = open_dataset(domain).classes(split), []
        for number in range(len(classes)):
            start, count = int(classes.starts[number]), int(classes.counts[number])
            images = classes.images[start : start + count].to(DEVICE).float()
            plain = options.images // 2 if split == "train" else min(count, options.other_images)
            seen = [_features(part) for part in images[:plain].split(100)]
            if split == "train":
                random = generator(0, "views", number)
                seen += [_features(_view(part, random)) for part in images[plain : options.images].split(6)]
            found.append(torch.cat(seen).half().cpu().numpy())
        np.save(options.out / f"{domain}-{split}.npy", np.stack(found))
        print(domain, split, np.stack(found).shape, flush=True)


def _features(images: Tensor) -> Tensor:
    """Images [n, 3, h, w] with values to 255 -> features [n, 1280]"""
    mean, std = (
        torch.tensor(part, device=images.device)[:, None, None] for part in (ENCODER_NET.mean, ENCODER_NET.std)
    )
    return ENCODER_NET.features((images / 255 - mean) / std).flatten(1)


def _view(images: Tensor, random: torch.Generator) -> Tensor:
    """A crop of 0.35 to 1 of the area, half of them mirrored, four in ten of larger images blurred."""
    side = images.shape[-1]
    area, ratio, top, left, blur, mirror = torch.rand(6, generator=random).tolist()
    area, ratio = 0.35 + 0.65 * area, (3 / 4) ** (1 - 2 * ratio)
    height, width = (min(side, max(8, round(side * value**0.5))) for value in (area / ratio, area * ratio))
    top, left = int(top * (side - height + 1)), int(left * (side - width + 1))
    found = images[..., top : top + height, left : left + width]
    if blur < 0.4 and side > 40:
        small = int(24 + blur / 0.4 * (side - 24))
        found = F.interpolate(found, (small, small), mode="bilinear", antialias=True)
    return found.flip(3) if mirror < 0.5 else found


class Features(TaskSource):
    """Tasks of one shape from features [classes, images, 1280] that are known already."""

    def __init__(self, learner: Any, features: Tensor, classes: ClassSet, shape: str) -> None:
        self.learner, self.classes, self.shape = learner, classes, read_shape(shape)
        check_shape(classes, self.shape)
        self.precision, self.say, self.known = "float32", print, {"features": features}

    @property
    def key(self) -> Any:
        return self.shape, id(self.classes)


class Data:
    """The features of a split of each domain, as classes."""

    def __init__(self, folder: Path, split: str, domains: list[str]) -> None:
        self.features: dict[str, Tensor] = {}
        self.classes: dict[str, ClassSet] = {}
        for domain in domains:
            found = torch.from_numpy(np.load(folder / f"{domain}-{split}.npy"))
            (count, each), names = found.shape[:2], tuple(map(str, range(len(found))))
            starts, none = torch.arange(count) * each, torch.zeros(count * each, 3, 1, 1, dtype=torch.uint8)
            self.features[domain] = found.flatten(0, 1).float()[..., None, None].to(DEVICE)
            classes = ClassSet(none, starts, torch.full((count,), each), names, torch.zeros(3), torch.ones(3))
            self.classes[domain] = classes.to(DEVICE)

    def source(self, learner: Any, domain: str, shape: str) -> Features:
        return Features(learner, self.features[domain], self.classes[domain], shape)


def train(options: argparse.Namespace) -> None:
    """Meta-train, and fit the temperatures on validation tasks."""
    data, val = Data(options.features, "train", options.domains), Data(options.features, "val", list(DOMAINS))
    learner = _first(data) if options.start is None else _further(npbml.load(options.start, device=str(DEVICE)))
    settings = TrainSettings(
        steps=options.steps,
        meta_batch=options.meta_batch,
        lr=RateSettings(**{name: options.rates * rate for name, rate in asdict(RATES).items()}),
        schedule="cosine",
        clip="norm",
        clip_at=3.0,
        max_skipped=30,
    )
    engine = EngineSettings(cuda_graph="off", compile="off", tasks="vmap")
    sources = [data.source(learner, domain, shape) for domain in options.domains for shape in SHAPES]
    judged = [val.source(learner, domain, "5x1") for domain in DOMAINS]
    trainer = MetaTrainer(
        Setup(learner.settings, 1, 15, 0, engine, DEVICE), settings, "npbml-any", learner, sources, judged
    )
    for step in range(options.steps):
        found = trainer.step(step)
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {found.get('loss', float('nan')):.3f}", flush=True)
    _save(learner, val, options.out)


def average(options: argparse.Namespace) -> None:
    """The mean of the weights of learners that were trained further from one start."""
    learners = [npbml.load(path, device=str(DEVICE)) for path in options.learners]
    mean, states = _further(learners[-1]), [learner.state_dict() for learner in learners]
    state = mean.state_dict()
    of_weights = {name for name, tensor in state.items() if tensor.is_floating_point()}
    mean.load_state_dict(state | {name: torch.stack([one[name] for one in states]).mean(0) for name in of_weights})
    _save(mean, Data(options.features, "val", list(DOMAINS)), options.out)


def _save(learner: npbml.Learner, val: Data, path: Path) -> None:
    bounded = _changed(learner, inner=replace(learner.settings.inner, max_step=LONGEST_STEP))
    npbml.save_learner(_calibrated(bounded, val), path, {"method": "npbml-any"})


def _first(data: Data) -> npbml.Learner:
    """A learner whose tail is the map to the principal components of the features."""
    own = {"backbone": "efficientnet-lite0", "shapes": list(SHAPES), "film": {"enabled": False}}
    own |= {"scorer": {"kind": "soft-kmeans", "whiten": True}, "loss": {"class_weights": "classes"}}
    rule = merged(find_recipe("npbml-any").rule, ENCODER, own)
    rule.pop("pretrain"), rule.pop("train")
    facts = BACKBONES.part("efficientnet-lite0").facts
    images = ImageSpec(3, facts["size"], facts["mean"], facts["std"])
    learner = npbml.Learner(from_dict(LearnerSettings, rule, LearnerSettings()), images).to(DEVICE)
    block: Any = learner.network.tail.blocks[0]
    every = torch.cat([part.flatten(1) for part in data.features.values()])
    with torch.no_grad():
        weight, bias, _ = principal_map(every, len(block.block.weight))
        block.block.weight.copy_(weight[..., None, None])
        block.block.bias.copy_(bias)
        learner.network.stem.blocks[0].centre.copy_(every.mean(0)[:, None, None])  # type: ignore[union-attr, operator]
    return learner


def _further(learner: npbml.Learner) -> npbml.Learner:
    """A trained learner as training has it: with no temperature, and with long steps."""
    settings, new = learner.settings, from_dict(LearnerSettings, find_recipe("npbml-any").rule, LearnerSettings())
    return _changed(
        learner,
        head=replace(settings.head, temperature=1.0, temperature_by_shape=new.head.temperature_by_shape),
        inner=replace(settings.inner, max_step=new.inner.max_step),
        loss=replace(settings.loss, class_weights="classes"),
        shapes=SHAPES,
    )


def _changed(learner: npbml.Learner, **changes: Any) -> npbml.Learner:
    """The learner with other settings and the same weights."""
    made = npbml.Learner(replace(learner.settings, **changes), learner.images)
    made.load_state_dict(learner.state_dict())
    return made.to(DEVICE)


def _calibrated(learner: npbml.Learner, val: Data, tasks: int = 25) -> npbml.Learner:
    """The learner with a temperature, and its slopes in the shape, of the least log loss on validation tasks."""
    best, sizes = [], []
    for shape in (shape for shape in SHAPES if read_shape(shape).ways <= 16):
        found = []
        for domain in DOMAINS:
            source = val.source(learner, domain, shape)
            batch_size = max(1, 500 // (source.shape.support + source.shape.scored))
            answers = learner_answers(learner, source)
            found.append(all_answers(answers, source.draw, tasks, batch_size, 0, "validation"))
        best.append(best_temperature(*map(list, zip(*found, strict=True))))  # type: ignore[arg-type]
        sizes.append(shape_sizes(source.shape.ways, source.shape.support, source.shape.pool))
    temperature, slopes = temperature_by_shape(best, sizes)
    head = replace(learner.settings.head, temperature=temperature, temperature_by_shape=slopes)
    return _changed(learner, head=head)


def test(options: argparse.Namespace) -> None:
    """Tables of the learner beside simple methods, whose numbers are chosen on validation tasks."""
    learner = npbml.load(options.learner, device=str(DEVICE))
    val, data = (Data(options.features, split, list(DOMAINS)) for split in ("val", options.split))
    rows: dict[str, dict[str, Any]] = {}
    fixed = best_kmeans(val, 100)
    cost = {shots: best_cost(val, shots, 60) for shots in (1, 5)}
    print(f"soft k-means: {KMEANS[fixed]}; C of logistic regression: {cost}", flush=True)
    for domain, shape in itertools.product(options.domains, options.shapes):
        tasks = options.tasks if shape in ALONE + POOLS else options.size_tasks
        source = data.source(learner, domain, shape)
        batch_size = max(1, 800 // (source.shape.support + source.shape.scored))
        found = evaluate(learner_answers(learner, source), source.draw, tasks, batch_size, 0, options.split)
        per_task, others = found.per_task.numpy(), {}
        if source.shape.pool:
            others["soft k-means"] = np.concatenate(
                [kmeans(*task, (KMEANS[fixed],))[0] for task in _tasks(source, tasks, options.split)]
            )
        else:
            each = list(_tasks(source, tasks, options.split))
            others["nearest means"] = np.array([nearest_means(*task) for task in each])
            c = cost[1 if source.shape.shots == 1 else 5]
            others["logistic regression"] = np.array([logistic_regression(*task, (c,))[0] for task in each])
        rows[f"{domain} {shape}"] = _row(per_task, others, expected_calibration_error(found.bins).item())  # type: ignore[arg-type]
        print(domain, shape, rows[f"{domain} {shape}"], flush=True)
        about = {"learner": options.learner, "soft k-means": KMEANS[fixed], "C": cost, "rows": rows}
        name = "-".join([options.split, *options.domains])
        write_json(options.out / f"{name}.json", json.loads(json.dumps(about)))
        write_whole(options.out / f"{name}.md", ("\n".join(_table(rows)) + "\n").encode())


@torch.no_grad()
def unknown(options: argparse.Namespace) -> None:
    """How well the confidence of an answer tells pictures of other classes, and wrong answers."""
    learner, data = (
        npbml.load(options.learner, device=str(DEVICE)),
        Data(options.features, options.split, list(DOMAINS)),
    )
    shares, lines = (1.0, 0.9, 0.8, 0.5), []
    for domain, shape in itertools.product(DOMAINS, ALONE):
        source, features = data.source(learner, domain, shape), data.features[domain]
        each, areas, right = len(features) // len(data.classes[domain]), [], []
        for start in range(0, options.size_tasks, DRAWN_AT_ONCE):
            random = generator(0, "unknown", start)
            drawn = source.draw(DRAWN_AT_ONCE, random)[: options.size_tasks - start]
            for support, labels, query, answers in zip(*task_items(source.shape, drawn), strict=True):
                theta = learner.adapt_features(features[support], labels, features[:0])
                inside = torch.isin(torch.arange(len(features)) // each, (support // each).cpu())
                outside = (~inside).nonzero().flatten()
                others = outside[torch.randint(len(outside), (len(query),), generator=random)].to(DEVICE)
                known, foreign = (
                    learner.answer_features(theta, features[part]).softmax(-1).max(-1) for part in (query, others)
                )
                below = (foreign.values[:, None] < known.values).double()
                ties = (foreign.values[:, None] == known.values).double()
                areas.append((below + ties / 2).mean().item())
                order = known.values.argsort(descending=True)
                good = (known.indices == answers).double()[order]
                right.append([good[: round(share * len(good))].mean().item() for share in shares])
        accuracy = [f"{100 * value:.1f}" for value in np.mean(right, 0)]
        lines.append(f"| {domain} {shape} | {np.mean(areas):.3f} | {' | '.join(accuracy)} | {len(areas)} |")
        print(lines[-1], flush=True)
    head = ["data set, shape", "AUROC", *(f"{100 * share:.0f} % answered" for share in shares), "tasks"]
    table = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *lines]
    write_whole(options.out / "unknown.md", ("\n".join(table) + "\n").encode())


def omniglot(options: argparse.Namespace) -> None:
    """50 classes of drawn characters, which neither the encoder nor the rule has learned from."""
    learner, store = npbml.load(options.learner, device=str(DEVICE)), open_dataset("omniglot").classes("test")
    chosen = torch.randperm(len(store), generator=generator(0, "omniglot"))[:150]
    found = []
    for number in chosen.tolist():
        start = int(store.starts[number])
        images = store.images[start : start + 10].to(DEVICE).float().expand(-1, 3, -1, -1)
        found.append(_features(images).half().cpu().numpy())
    np.save(options.out / "omniglot-test.npy", np.stack(found))
    data, lines = Data(options.out, "test", ["omniglot"]), []
    (options.out / "omniglot-test.npy").unlink()
    for shape in ("50x1/5", "50x5/5"):
        source, tasks = data.source(learner, "omniglot", shape), min(options.size_tasks, 30)
        mine = evaluate(learner_answers(learner, source), source.draw, tasks, 1, 0, "test")
        each = list(_tasks(source, tasks, "test"))
        others = {"nearest means": np.array([nearest_means(*task) for task in each])}
        others["logistic regression"] = np.array([logistic_regression(*task, (1.0,))[0] for task in each])
        row = _row(mine.per_task.numpy(), others, expected_calibration_error(mine.bins).item())  # type: ignore[arg-type]
        lines += list(_table({f"omniglot {shape}": row}))[2 if lines else 0 :]
        print(row, flush=True)
    write_whole(options.out / "omniglot.md", ("\n".join(lines) + "\n").encode())


def _row(mine: np.ndarray, others: dict[str, np.ndarray], ece: float) -> dict[str, Any]:
    best = max(others, key=lambda name: others[name].mean())
    row: dict[str, Any] = {"tasks": len(mine), "photos": _figure(mine), "ece": round(ece, 1)}
    row |= {name: _figure(values) for name, values in others.items()}
    return row | {"better of these": best, "difference": _figure(mine - others[best])}


def _figure(values: np.ndarray) -> list[float]:
    return [round(100 * float(values.mean()), 2), round(196 * float(values.std(ddof=1)) / len(values) ** 0.5, 2)]


def _table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    names = ("photos", "nearest means", "logistic regression", "soft k-means", "difference")
    yield f"| data set, shape | {' | '.join(names)} | ECE | tasks |"
    yield "| --- " * (len(names) + 3) + "|"
    for name, row in rows.items():
        cells = [f"{row[part][0]:.2f} ± {row[part][1]:.2f}" if part in row else "-" for part in names]
        yield f"| {name} | {' | '.join(cells)} | {row['ece']} | {row['tasks']} |"


def _tasks(source: Features, tasks: int, purpose: str) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Unit vectors and labels of support and queries, of the tasks that `evaluate` draws."""
    vectors = F.normalize(source.known["features"].flatten(1), dim=1)
    for start in range(0, tasks, DRAWN_AT_ONCE):
        drawn = source.draw(DRAWN_AT_ONCE, generator(0, purpose, start))[: tasks - start]
        for one in zip(*task_items(source.shape, drawn), strict=True):
            support, labels, query, query_labels = one
            yield vectors[support], labels, vectors[query], query_labels


def nearest_means(support: Tensor, labels: Tensor, query: Tensor, query_labels: Tensor) -> float:
    """Accuracy by the largest cosine to a class mean."""
    members = F.one_hot(labels).to(support.dtype)
    means = F.normalize((members / members.sum(0)).T @ support, dim=1)
    return ((query @ means.T).argmax(1) == query_labels).double().mean().item()


def logistic_regression(
    support: Tensor, labels: Tensor, query: Tensor, query_labels: Tensor, costs: tuple[float, ...]
) -> list[float]:
    """Accuracy for each C."""
    from sklearn.linear_model import LogisticRegression

    x, y, z, right = (part.cpu().numpy() for part in (support, labels, query, query_labels))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            float(
                (
                    LogisticRegression(C=c, max_iter=200, class_weight="balanced").fit(x, y).predict(z) == right
                ).mean()
            )
            for c in costs
        ]


def best_cost(val: Data, shots: int, tasks: int) -> float:
    """C by accuracy on validation tasks."""
    each = [
        logistic_regression(*task, COSTS)
        for domain in DOMAINS
        for task in _tasks(val.source(None, domain, f"5x{shots}"), tasks, "validation")
    ]
    return COSTS[int(np.mean(each, 0).argmax())]


def kmeans(
    support: Tensor,
    labels: Tensor,
    query: Tensor,
    query_labels: Tensor,
    choices: tuple[Any, ...],
    rounds: int = 10,
) -> np.ndarray:
    """Accuracy of soft k-means over support and queries, [choices, 1] (METHODS 19.4 with fixed numbers)."""
    items, members = torch.cat([support, query]).double(), F.one_hot(labels).double()
    pool, ways, found = len(query), members.shape[1], []
    unit = F.normalize(items - items.mean(0), dim=1)
    angles = {"plain": lambda: items @ items.T, "centred": lambda: unit @ unit.T}
    angles["whitened"] = lambda: whitened_cosines(unit)
    kinds = {kind: angles[kind]() for kind in {choice[0] for choice in choices}}
    for kind, temperature, prior, weight in choices:
        sums = torch.cat([members, members.new_zeros(pool, ways)])
        scores = sums[:0]
        for number in range(rounds + 1):
            products = kinds[kind] @ sums
            lengths = (sums * products).sum(0).clamp_min(1e-12).sqrt()
            logits = temperature * products[len(members) :] / lengths
            if number:
                logits = logits + prior * ((scores.sum(0) + 1) / (pool + ways)).log()
            scores = logits.softmax(-1)
            sums = torch.cat([weight * members, scores])
        found.append([(logits.argmax(1) == query_labels).double().mean().item()])
    return np.array(found)


def best_kmeans(val: Data, tasks: int) -> int:
    """The choice with the best mean accuracy on validation tasks, over both domains and all kinds of pools."""
    each = [
        np.mean(
            [kmeans(*task, KMEANS) for task in _tasks(val.source(None, domain, shape), tasks, "validation")], 0
        )
        for domain in DOMAINS
        for shape in POOLS
    ]
    return int(np.mean(each, 0).argmax())


if __name__ == "__main__":
    main()
