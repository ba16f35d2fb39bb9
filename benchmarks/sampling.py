"""How many tasks a second are drawn from images in memory: python benchmarks/sampling.py [--device cuda]

Random bytes stand in for mini-ImageNet's training split: 64 classes of 600 images, 84x84, three channels.
"""

import argparse
import time
from collections.abc import Callable

import torch

from npbml.data.tasks import ClassSet
from npbml.randomness import generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=84)
    options = parser.parse_args()
    counts = torch.full((64,), 600)
    images = torch.randint(0, 256, (int(counts.sum()), 3, options.size, options.size), dtype=torch.uint8)
    names = tuple(str(number) for number in range(64))
    classes = ClassSet(
        images, counts.cumsum(0) - counts, counts, names, torch.full((3,), 0.5), torch.full((3,), 0.25)
    )
    classes = classes.to(options.device)
    print(
        f"5-way 5-shot tasks with 15 queries of {options.size}x{options.size}, tasks a second, on {options.device}"
    )
    print(f"{'meta-batch':>10} {'draw':>8} {'bytes':>8} {'normalised':>10}")
    for tasks in (1, 4, 16, 64):
        drawn = _rate(lambda seed, n=tasks: classes.draw(n, 5, 5, 15, generator(seed)), tasks)
        bytes_ = _rate(lambda seed, n=tasks: classes.sample(n, 5, 5, 15, generator(seed)), tasks)
        floats = _rate(lambda seed, n=tasks: classes.sample(n, 5, 5, 15, generator(seed), classes.batch), tasks)
        print(f"{tasks:>10} {drawn:>8.0f} {bytes_:>8.0f} {floats:>10.0f}", flush=True)


def _rate(make: Callable[[int], object], tasks: int, seconds: float = 2.0) -> float:
    """Tasks a second of make(seed), which makes `tasks` of them."""
    make(0)
    _wait()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        make(count)
        count += 1
    _wait()
    return count * tasks / (time.perf_counter() - started)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
