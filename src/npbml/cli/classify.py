"""The command that labels pictures."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from npbml.cli.arguments import Arguments
from npbml.cli.options import method_name, parse
from npbml.cli.screen import console, errors, note, say
from npbml.errors import RunError, SettingError
from npbml.lab.schema import override
from npbml.report.labels import (
    WIDEST,
    Row,
    accuracy_words,
    check_ending,
    confusion_table,
    counts_table,
    ignored_words,
    labels_table,
    one_line,
    printable,
    write_labels,
)
from npbml.report.words import duration

if TYPE_CHECKING:  # they import torch or Pillow, which a refused command does without
    from npbml.data.search import Found
    from npbml.lab.labelling import Classifier, Labels, Reader
    from npbml.learner.settings import ImageSpec

LISTED = 40  # files that are named, of those that cannot be read or are filed


@dataclass(frozen=True)
class ClassifyOptions:
    """What labels which pictures, and what becomes of the labels."""

    folders: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FEW MANY", help_behavior_hint="")
    ] = ()
    """FEW has a folder of pictures for each class; MANY those to be labelled, at any depth, or one picture."""
    learner: Annotated[str, tyro.conf.arg(metavar="NAME|FILE|RUN", help_behavior_hint="(default: photos)")] = (
        "photos"
    )
    """A learner that comes with npbml (photos, cifar-fs-conv4), the file of one, or a run folder."""
    method: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Of a run folder, which of its methods; by default the one that it recommends."""
    classifier: Annotated[str | None, tyro.conf.arg(metavar="FILE.npbml", help_behavior_hint="")] = None
    """A classifier that was saved, in place of FEW and --learner."""
    save: Annotated[str | None, tyro.conf.arg(metavar="FILE.npbml", help_behavior_hint="")] = None
    """Save the fitted classifier."""
    alone: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="")] = False
    """Label each picture by itself. Otherwise those of MANY help, as unlabelled pictures of the same classes."""
    unlabelled: Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """More pictures of these classes, which help without being labelled."""
    threshold: Annotated[float | None, tyro.conf.arg(metavar="P", help_behavior_hint="")] = None
    """Label a picture `unknown` where no class has this probability."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the labels with all probabilities to a file that ends in .csv or .json."""
    sheet: Annotated[str | None, tyro.conf.arg(metavar="FILE.png", help_behavior_hint="")] = None
    """Draw a contact sheet of the pictures whose label is least certain."""
    move: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="")] = False
    """Move pictures into class folders below --into. A name that is taken gets a number; unknown ones stay."""
    link: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="")] = False
    """The same with symbolic links; the pictures stay where they are."""
    into: Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Where --move and --link make the class folders."""
    dry_run: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="")] = False
    """Show what --move or --link would do, and do not do it."""
    overwrite: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="")] = False
    """Replace the files of --out, --sheet and --save where they are there already."""
    device: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: auto)")] = "auto"
    """auto (a GPU where there is one), cpu, cuda, or cuda:N."""


def classify(arguments: list[str]) -> None:
    """Label a folder of pictures by a few labelled examples of each class."""
    options = parse(ClassifyOptions, "classify", classify, _by_todays_names(arguments))
    few, many = _folders(options)
    _check(options)
    from npbml.data.search import Found, find_classes, find_pictures

    into = Path(options.into) if options.into else None
    classes = find_classes(few) if few else {}
    if len(classes) == 1:
        raise RunError(f"{few} has one class folder, {next(iter(classes))}. Give pictures of at least 2 classes.")
    if options.threshold is not None and "unknown" in classes:
        raise RunError("A class is called unknown, as are answers below --threshold: rename its folder.")
    # What is labelled already, or was filed by an earlier command, is not labelled again.
    queries = find_pictures(many, [folder for folder in (few, into) if folder])
    unlabelled = find_pictures(Path(options.unlabelled)) if options.unlabelled else Found()
    if not queries.files:
        raise RunError(f"{many} has no pictures.{_passed_over([queries])}")
    started = time.monotonic()
    with warnings.catch_warnings(), _progress() as tick:
        warnings.simplefilter("ignore")  # of Pillow's, about large or odd pictures
        classifier, labels, reader = _label(options, classes, queries, unlabelled, tick)
    rows = _rows(many, labels)
    _show(options, rows, labels)
    _show_accuracy(many, rows, labels, classes)
    helped = _helped(labels, len(unlabelled.files) + (0 if options.alone else len(queries.files)))
    say(f"{len(rows):,} pictures labelled in {duration(time.monotonic() - started)}{helped}")
    if options.save:
        classifier.save(options.save)  # type: ignore[attr-defined]  # others are refused
        say(f"classifier: {options.save}")
    if options.out:
        _write(options, many, rows, labels, reader, queries)
    if options.sheet:
        _draw(Path(options.sheet), rows, labels)
    failed = _file(options, many, rows, labels) if into else 0
    found = [*classes.values(), queries, unlabelled]
    unreadable = {file: why for one in found for file, why in one.unreadable.items()} | reader.unreadable
    _list(f"{len(unreadable):,} files could not be read and have no label:", many, unreadable)
    if words := _passed_over(found):
        say(words.strip())
    if failed:
        raise RunError(f"{failed:,} pictures could not be {'moved' if options.move else 'linked'}: see above.")


def _by_todays_names(arguments: list[str]) -> list[str]:
    """The arguments with the options that were there before the two folders stood by themselves."""
    support, given = Arguments(arguments).take_each("support")
    query, given = given.take_each("query")
    if (support or query) and not given.asks_help:
        if not (support and query):
            raise SettingError("--support and --query go together: give both, or the two folders by themselves.")
        given = Arguments([support[-1], query[-1], *given.words])
    return [f"--learner{word.removeprefix('--run')}" if _is_run(word) else word for word in given.words]


def _is_run(word: str) -> bool:
    return word == "--run" or word.startswith("--run=")


def _folders(options: ClassifyOptions) -> tuple[Path | None, Path]:
    """The folder of labelled pictures, where there is no saved classifier, and the one to be labelled."""
    wanted = ("MANY",) if options.classifier else ("FEW", "MANY")
    if len(options.folders) != len(wanted):
        given = f"here are {len(options.folders)}" if options.folders else "here is none"
        kind = "a folder" if options.classifier else "two folders"
        example = "--classifier flowers.npbml many/" if options.classifier else "few/ many/"
        raise SettingError(f"Give {kind}, {' and '.join(wanted)}; {given}. For example: npbml classify {example}")
    return (None if options.classifier else Path(options.folders[0])), Path(options.folders[-1])


def _check(options: ClassifyOptions) -> None:
    """Refuse options that make no sense, before anything is read."""
    if options.threshold is not None and not 0 <= options.threshold <= 1:
        raise SettingError(f"--threshold is {options.threshold:g}; it is a probability, in 0 to 1.")
    if options.move and options.link:
        raise SettingError("Give --move or --link, not both.")
    if (options.move or options.link) and not options.into:
        raise SettingError(f"Say where to {'move' if options.move else 'link'} the pictures: --into FOLDER.")
    if options.into and not (options.move or options.link):
        raise SettingError("--into needs --move or --link.")
    if options.dry_run and not options.into:
        raise SettingError("--dry-run shows what --move or --link would do, and neither is given.")
    if options.classifier and (options.unlabelled or options.save or options.method):
        raise SettingError(
            "A saved classifier is used as it is: --classifier takes no --unlabelled, --save or --method."
        )
    if options.into and Path(options.into).exists() and not Path(options.into).is_dir():
        raise SettingError(f"--into {options.into} is a file; it takes a folder.")
    for name, endings in (("out", (".csv", ".json")), ("sheet", (".png",)), ("save", (".npbml",))):
        if not (path := getattr(options, name)):
            continue
        check_ending(Path(path), endings)
        if Path(path).is_dir():
            raise SettingError(f"--{name} {path} is a folder; it takes a file.")
        if Path(path).exists() and not options.overwrite:
            raise RunError(f"{path} is there already: give --overwrite to replace it, or another name.")


def _label(
    options: ClassifyOptions, classes: "dict[str, Found]", queries: "Found", unlabelled: "Found", tick: Any
) -> "tuple[Classifier, Labels, Reader]":
    from npbml.classifier import FewShotClassifier
    from npbml.lab.labelling import BATCH, TOGETHER, Reader, label_pictures, predict_pictures

    if options.classifier:
        saved = FewShotClassifier.load(options.classifier, options.device)
        if options.threshold is not None:
            saved.set_params(threshold=options.threshold)
        reader = Reader(saved.learner_.images)
        size = BATCH if saved.learner_.settings.needs_no_pool else TOGETHER
        return saved, predict_pictures(saved, reader, queries.files, tick=tick, size=size), reader
    classifier, images, together = _classifier(options, len(classes))
    reader, files = Reader(images), {name: found.files for name, found in classes.items()}
    labels = label_pictures(
        classifier, reader, files, queries.files, unlabelled.files, options.alone, together, tick
    )
    return classifier, labels, reader


def _classifier(options: ClassifyOptions, ways: int) -> "tuple[Classifier, ImageSpec, bool]":
    """The classifier that is to be fitted, the images it takes, and whether it answers pictures together."""
    from npbml.catalogue import load
    from npbml.classifier import FewShotClassifier
    from npbml.lab.labelling import BATCH, TOGETHER
    from npbml.lab.prototypes import PROTOTYPES, PrototypeClassifier
    from npbml.lab.recommendation import recommended

    method = options.method and method_name(options.method)
    if method is None and Path(options.learner).is_dir() and (method := recommended(Path(options.learner))):
        note(f"{options.learner} recommends {method}: --method chooses another.")
    if method == PROTOTYPES:
        from npbml.lab.run import Run
        from npbml.lab.run_folder import read_config

        if options.save:
            raise SettingError(
                "Nearest class means cannot be saved as a classifier: choose a --method that is trained."
            )
        config = override(read_config(Path(options.learner)), {"device": options.device})
        run = Run(options.learner, config)
        return PrototypeClassifier(run, options.threshold), run.images, True
    learner = load(options.learner, method, options.device)
    learner.check_ways(ways)
    together = not learner.settings.needs_no_pool
    size = TOGETHER if together else BATCH
    return FewShotClassifier(learner, batch_size=size, threshold=options.threshold), learner.images, together


def _rows(many: Path, labels: "Labels") -> list[Row]:
    return [
        Row(_name(many, file), printable(label), probabilities.tolist())
        for file, label, probabilities in zip(labels.files, labels.names, labels.probabilities, strict=True)
    ]


def _name(many: Path, file: Path) -> str:
    """A file's name below the folder of pictures; others by their path."""
    return printable(file.relative_to(many) if many != file and file.is_relative_to(many) else file)


def _show(options: ClassifyOptions, rows: list[Row], labels: "Labels") -> None:
    if options.out or options.into:  # each label is elsewhere
        console.print(counts_table(rows, [printable(name) for name in labels.classes]))
    else:
        console.print(labels_table(rows))
    console.print()


def _show_accuracy(many: Path, rows: list[Row], labels: "Labels", classes: "dict[str, Found]") -> None:
    """Where pictures lie in folders that are named as classes: how many of their labels are right."""
    from npbml.lab.labelling import UNKNOWN

    shown = {file.resolve() for found in classes.values() for file in found.files}
    names, truth, given, known = set(labels.classes), [], [], 0
    for file, row in zip(labels.files, rows, strict=True):
        folder = file.relative_to(many).parts[0] if file != many else ""
        if folder in names and file.resolve() in shown:
            known += 1
        elif folder in names:
            truth.append(printable(folder))
            given.append(row.label)
    if known:
        say(f"{known:,} pictures in class folders are among the labelled ones: they do not count in the accuracy.")
    if truth:
        say("what the pictures of each class were taken for:" if len(names) <= WIDEST else "most often confused:")
        console.print(confusion_table(truth, given, [printable(name) for name in labels.classes], UNKNOWN))
        say(accuracy_words(truth, given, UNKNOWN))


def _helped(labels: "Labels", found: int) -> str:
    """How many unlabelled pictures the classifier has adapted to."""
    from npbml.lab.labelling import POOL, TOGETHER

    if labels.together:
        return f", up to {TOGETHER} together: this learner compares them"
    if not labels.pool:
        return ", each by itself"
    drawn = f" of {found:,}, drawn at random," if found > POOL else ""
    return f"; {labels.pool:,} unlabelled ones{drawn} helped"


def _write(
    options: ClassifyOptions, many: Path, rows: list[Row], labels: "Labels", reader: "Reader", queries: "Found"
) -> None:
    about = {
        "learner": options.classifier or options.learner,
        "unlabelled": labels.pool,
        "threshold": labels.threshold,
        "ignored": {printable(ending): count for ending, count in sorted(queries.ignored.items())},
        "unreadable": [
            {"file": _name(many, file), "reason": why} for file, why in sorted(reader.unreadable.items())
        ],
    }
    path = Path(options.out or "")
    write_labels(path, rows, [printable(name) for name in labels.classes], about)
    say(f"labels: {path}")


def _draw(path: Path, rows: list[Row], labels: "Labels") -> None:
    from npbml.report.sheet import COUNT, Uncertain, draw_sheet, write_sheet

    order = labels.best.argsort(kind="stable")[:COUNT]
    classes = [printable(name) for name in labels.classes]
    pictures = []
    for place in order:
        row = rows[place]
        first, second = labels.probabilities[place].argsort()[::-1][:2]
        pictures.append(
            Uncertain(
                labels.files[place],
                row.name,
                classes[first],
                row.probabilities[first],
                classes[second],
                row.probabilities[second],
            )
        )
    count = f"the {len(pictures)} least certain of {len(rows):,} pictures" if len(rows) > 1 else "1 picture"
    write_sheet(path, draw_sheet(pictures, count))
    say(f"contact sheet: {path}")


def _file(options: ClassifyOptions, many: Path, rows: list[Row], labels: "Labels") -> int:
    """Move or link the pictures, or show where they would go. Returns how many could not be filed."""
    from npbml.lab.filing import file_pictures, plan_filing
    from npbml.lab.labelling import UNKNOWN

    known = {file: name for file, name in zip(labels.files, labels.names, strict=True) if name != UNKNOWN}
    planned = plan_filing(known, Path(options.into or ""))
    there = f", {len(known) - len(planned):,} are there already" if len(known) > len(planned) else ""
    stay = f", {len(rows) - len(known):,} are unknown and stay" if len(known) < len(rows) else ""
    done = "moved" if options.move else "linked"
    if options.dry_run:
        for file, target in planned.items():
            say(f"{one_line(_name(many, file))} -> {one_line(printable(target))}")
        say(f"{len(planned):,} pictures would be {done}{there}{stay}; nothing was done.")
        return 0
    filed = file_pictures(planned, "move" if options.move else "link")
    copied = f", {filed.copied:,} of them copied, since links are not possible there" if filed.copied else ""
    numbered = sum(target.name != file.name for file, target in filed.done.items())
    taken = f", {numbered:,} with a number, since their name was taken" if numbered else ""
    say(f"{len(filed.done):,} pictures {done} into {options.into}{taken}{copied}{there}{stay}")
    _list(f"{len(filed.failed):,} pictures could not be {done}:", many, filed.failed)
    return len(filed.failed)


def _list(heading: str, many: Path, reasons: dict[Path, str]) -> None:
    """Files, each with a reason; of very many, the first."""
    if not reasons:
        return
    say(heading)
    for file, why in sorted(reasons.items())[:LISTED]:
        say(f"  {one_line(_name(many, file))}: {one_line(why)}")
    if len(reasons) > LISTED:
        say(f"  and {len(reasons) - LISTED:,} more")


def _passed_over(found: "list[Found]") -> str:
    """The files that are no pictures by their endings, in words."""
    ignored = sum((one.ignored for one in found[1:]), found[0].ignored.copy())
    return f" ignored, by their endings: {ignored_words(ignored)}" if ignored else ""


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on the error stream, where that is a terminal: what is read or labelled."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<6}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as progress:
        bars: dict[str, Any] = {}

        def tick(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)

        yield tick
