"""The command that labels pictures."""

from dataclasses import dataclass
from pathlib import Path

from npbml.cli.options import method_name, parse
from npbml.cli.screen import console
from npbml.report.terminal import labels_table


@dataclass(frozen=True)
class ClassifyOptions:
    """Which learner, and which pictures."""

    run: str
    """A run folder with a meta-trained learner, or a learner that comes along: cifar-fs-conv4."""
    support: str
    """A folder of class folders: the labelled pictures."""
    query: str
    """A folder of pictures to be labelled, or one picture."""
    unlabelled: str | None = None
    """A folder of more pictures of these classes, without labels, which help; it may be that of --query."""
    method: str | None = None
    """Which of the run's methods; its own by default."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, or cuda:N."""


def classify(arguments: list[str]) -> None:
    """Label your own pictures with a meta-trained learner and a few labelled examples."""
    options = parse(ClassifyOptions, "classify", classify, arguments)
    from npbml.catalogue import load
    from npbml.classifier import FewShotClassifier
    from npbml.data.folder import read_class_folders, read_pictures

    labelled, queries = read_class_folders(Path(options.support)), read_pictures(Path(options.query))
    pool = [] if options.unlabelled is None else list(read_pictures(Path(options.unlabelled)).values())
    learner = load(options.run, options.method and method_name(options.method), options.device)
    pictures = [picture for members in labelled.values() for picture in members]
    labels = [name for name, members in labelled.items() for _ in members]
    classifier = FewShotClassifier(learner).fit(pictures, labels, pool)
    probabilities = classifier.predict_proba(list(queries.values()))
    console.print(labels_table(list(queries), list(classifier.classes_), probabilities))
