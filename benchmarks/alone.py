"""What a learner's answers are worth by the number of query images that are predicted at once.

python benchmarks/alone.py --learner cifar-fs-conv4 --dataset cifar-fs

Beside it, nearest class means (by angle) on the embeddings of the learner's own pre-trained encoder, which answer
each image by itself. The learner is one that scores by such embeddings. Prints a table, saves nothing.
"""

import argparse

import torch
from torch import Tensor

import npbml
from npbml.data.image_data import shown_to
from npbml.data.sets import open_dataset
from npbml.engine.evaluate import over_tasks
from npbml.learner.prepare import embeddings, normalised
from npbml.measures import ACCURACY
from npbml.randomness import generator

BALANCED = 15  # query images of each class


@torch.no_grad()
def right(learner: npbml.Learner, task: npbml.Task, count: int) -> tuple[float, float]:
    """The share of right answers to the first `count` query images: the learner's, and that of class means."""
    some = task._replace(query_images=task.query_images[:count], query_labels=task.query_labels[:count])

    def share(scores: Tensor) -> float:
        return (scores.argmax(-1) == some.query_labels).double().mean().item()

    support, query = (
        torch.nn.functional.normalize(embeddings(learner, normalised(learner, images)), dim=1)
        for images in (some.support_images, some.query_images)
    )
    members = (some.support_labels == torch.arange(learner.settings.ways).unsqueeze(-1)).to(support)
    means = torch.nn.functional.normalize(members @ support, dim=1)
    return share(learner.predict(some)), share(query @ means.T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learner", default="cifar-fs-conv4")
    parser.add_argument("--dataset", default="cifar-fs")
    parser.add_argument("--shots", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=500)
    options = parser.parse_args()
    learner = npbml.load(options.learner, device="cpu")
    ways = learner.settings.ways
    classes = shown_to(open_dataset(options.dataset).classes("test"), learner.images)
    print(f"{ways}-way {options.shots}-shot {options.dataset}, {options.learner}, {options.tasks} test tasks")
    for count in (1, ways, ways * BALANCED):
        found = []
        for number in range(options.tasks):
            random = generator(0, "alone", number)
            batch = classes.sample(1, ways, options.shots, BALANCED, random)
            support, labels, query, answers = (part[0] for part in batch)
            order = torch.randperm(len(query), generator=random)
            found.append(right(learner, npbml.Task(support, labels, query[order], answers[order]), count))
        mine, means = (over_tasks(ACCURACY, torch.tensor(values)) for values in zip(*found, strict=True))
        print(
            f"{count:3} at once: learner {mine.mean:.1f} +- {mine.ci95:.1f}, "
            f"class means {means.mean:.1f} +- {means.ci95:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
