"""The card of a classifier: what it was made from and what it is good for, as text."""

from npbml.classifier.fitted import Fitted
from npbml.version import __version__

MOST_CLASSES = 50  # that are listed one by one


def describe(fitted: Fitted, learner: str, threshold: float | None) -> str:
    """Return the card as Markdown.

    Args:
        fitted: What the classifier knows.
        learner: What its learner is called.
        threshold: Below which confidence its answers are unknown.
    """
    images, settings = fitted.learner.images, fitted.learner.settings
    counts = list(zip(fitted.classes, fitted.counts, strict=True))
    rows = [f"| {_cell(label)} | {count} |" for label, count in counts[:MOST_CLASSES]]
    if len(counts) > MOST_CLASSES:
        rows.append(f"| {len(counts) - MOST_CLASSES} more | {sum(count for _, count in counts[MOST_CLASSES:])} |")
    alone = fitted.theta is not None
    lines = [
        f"# A classifier of pictures in {len(counts)} classes",
        "",
        f"Made by npbml {__version__} from {len(fitted.labelled)} labelled pictures and {len(fitted.pool)} "
        "unlabelled ones:",
        "",
        "| class | labelled pictures |",
        "| --- | --- |",
        *rows,
        "",
        f"It is the learner `{_cell(learner)}` (backbone {settings.backbone}), adapted to them. Pictures are "
        f"resized to {images.size}x{images.size} pixels, {'grey' if images.channels == 1 else 'RGB'}. "
        + ("Each is answered by itself." if alone else "Answers depend on the pictures predicted together."),
        "",
        "A picture of none of these classes still gets one of them"
        + (
            ": no threshold is set, below which answers would be unknown."
            if threshold is None
            else f", unless its probability is below {threshold:g}: then the answer is unknown."
        ),
        "Its accuracy was not measured: `leave_one_out()` estimates it from its own pictures.",
        "",
        "```python",
        "import npbml",
        "",
        'classifier = npbml.FewShotClassifier.load("classifier.npbml")',
        'classifier.predict(["picture.jpg"])',
        "```",
        "",
    ]
    return "\n".join(lines)


def _cell(value: object) -> str:
    """A value in a line of Markdown: nothing in it can end a cell, a line or a piece of code."""
    text = " ".join(str(value).split())
    for sign in "\\`|<>[]":
        text = text.replace(sign, "\\" + sign if sign not in "`<>" else "'")
    return text
