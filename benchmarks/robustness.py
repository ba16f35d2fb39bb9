"""Whether every answer is finite: a learner on many tasks of random shapes, of real and of random images.

python benchmarks/robustness.py --learner cifar-fs-conv4 --dataset cifar-fs --tasks 100000

Shapes have 2 to 20 classes, 1 to 6 labelled items of each, also unequal numbers, and pools of 0 to 60 items, also
unbalanced. A third of the tasks has real images, a third images of random bytes, a third images of one colour,
many of them equal. Prints how many answers were not finite, or not probabilities; saves nothing. Several processes
share the work where each has a --seed of its own.
"""

import argparse
import time
from dataclasses import replace

import torch
from torch import Tensor

import npbml
from npbml.data.image_data import shown_to
from npbml.data.sets import open_dataset
from npbml.data.tasks import ClassSet
from npbml.engine.execute import Executor
from npbml.engine.source import TaskSource
from npbml.randomness import generator
from npbml.shapes import Shape

TOGETHER = 40  # tasks of one shape at once


def random_shape(random: torch.Generator) -> Shape:
    """A shape, drawn uniformly in each of its numbers."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    ways, shots, unequal_pool = number(2, 20), number(1, 6), bool(number(0, 1))
    pool = number(1, 60) if number(0, 3) else 0
    pool = pool if unequal_pool else pool // ways * ways
    return Shape(ways, shots, pool, number(1, 2), bool(number(0, 1)), unequal_pool and pool > 0)


def kinds(classes: ClassSet, random: torch.Generator) -> dict[str, ClassSet]:
    """The classes with real images, with random bytes, and with images of one colour."""
    count, channels, size, _ = classes.images.shape
    noise = torch.randint(0, 256, classes.images.shape, generator=random, dtype=torch.uint8)
    flat = torch.randint(0, 4, (count, channels, 1, 1), generator=random, dtype=torch.uint8) * 85
    return {
        "real": classes,
        "random bytes": replace(classes, images=noise),
        "one colour": replace(classes, images=flat.expand(-1, -1, size, size).contiguous()),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learner", default="cifar-fs-conv4")
    parser.add_argument("--dataset", default="cifar-fs")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    learner, random = npbml.load(options.learner, device=options.device), generator(options.seed, "robustness")
    classes = shown_to(open_dataset(options.dataset).classes("test"), learner.images)
    of_kind = [images.to(learner.mean.device) for images in kinds(classes, random).values()]
    executor, cache, done, wrong, started = Executor(learner), {}, 0, 0, time.monotonic()
    while done < options.tasks:
        images = of_kind[done // TOGETHER % len(of_kind)]
        source = TaskSource(learner, images, random_shape(random), cache=cache)
        prepared, _ = source.prepare(source.draw(TOGETHER, random))
        wrong += not_probabilities(executor.logits(prepared))
        done += TOGETHER
        if done % (250 * TOGETHER) == 0:
            print(
                f"{done} tasks, {wrong} wrong, {(time.monotonic() - started) / done * 1000:.1f} ms a task",
                flush=True,
            )
    print(f"{done} tasks of random shapes, seed {options.seed}: {wrong} with an answer that is no probability")


def not_probabilities(logits: Tensor) -> int:
    """In how many tasks [tasks, queries, ways] an answer is not finite, or does not sum to one."""
    found = logits.softmax(-1)
    good = logits.isfinite().all(-1) & ((found.sum(-1) - 1).abs() < 1e-4)
    return int((~good.all(-1)).sum())


if __name__ == "__main__":
    main()
