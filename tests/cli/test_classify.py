"""Pictures are labelled by command."""

import csv
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import npbml
from npbml.lab import labelling

Npbml = Callable[..., Any]
COLOURS = {"blue": (20, 30, 220), "green": (30, 190, 40), "red": (220, 30, 20)}


def paint(path: Path, colour: str, seed: int, size: tuple[int, int] = (40, 30)) -> Path:
    """A noisy picture of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).normal(0, 25, (*size, 3))
    Image.fromarray(np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)).save(path)
    return path


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """few/ with two pictures of each of three colours, many/ with four of each, in class folders."""
    for colour in COLOURS:
        for number in range(6):
            part = "few" if number < 2 else "many"
            paint(tmp_path / part / colour / f"{colour}{number}.png", colour, number)
    return tmp_path


GIVEN = ("few", "many", "--learner", "cifar-fs-conv4", "--device", "cpu")


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_folder_is_labelled_with_accuracy_and_confusion(npbml_command: Npbml, folders: Path) -> None:
    said = npbml_command("classify", *GIVEN)
    assert said.code == 0 and said.error == "", said.error
    assert max(map(len, said.out.splitlines())) <= 80
    rows = [line.split() for line in said.out.splitlines() if ".png" in line]
    assert len(rows) == 12 and all(row[0].startswith(f"{row[1]}/") for row in rows)
    assert "accuracy: 100.0 %, 95 % interval 75.8 to 100.0, of 12 pictures" in said.out
    assert ["2", "green", ".", "4", ".", "100", "%"] in [line.split() for line in said.out.splitlines()]
    assert "12 pictures labelled" in said.out and "12 unlabelled ones helped" in said.out


def test_the_labels_are_those_of_the_classifier(npbml_command: Npbml, folders: Path) -> None:
    files = {part: sorted((folders / part).rglob("*.png")) for part in ("few", "many")}
    labels = [file.parent.name for file in files["few"]]
    learner = npbml.load("cifar-fs-conv4", device="cpu")
    for how, pool in (((), files["many"]), (("--alone",), None)):
        expected = npbml.FewShotClassifier(learner).fit(files["few"], labels, pool).predict_proba(files["many"])
        said = npbml_command("classify", *GIVEN, *how, "--out", "out.csv", "--overwrite")
        assert said.code == 0, said.error
        rows = rows_of(Path("out.csv"))
        assert [row["file"] for row in rows] == [str(file.relative_to(folders / "many")) for file in files["many"]]
        found = [[float(row[f"p({colour})"]) for colour in COLOURS] for row in rows]
        np.testing.assert_allclose(found, expected, atol=2e-4)


def test_more_unlabelled_pictures_are_the_pool_of_each_alone(npbml_command: Npbml, folders: Path) -> None:
    for number in range(5):
        paint(folders / "more" / "deep" / f"{number}.jpg", "red", 50 + number)
    said = npbml_command("classify", *GIVEN, "--alone", "--unlabelled", "more", "--out", "a.json")
    assert said.code == 0 and json.loads(Path("a.json").read_text())["unlabelled"] == 5, said.error
    said = npbml_command("classify", *GIVEN, "--unlabelled", "more", "--out", "b.json")
    assert said.code == 0 and json.loads(Path("b.json").read_text())["unlabelled"] == 17


def test_many_pictures_are_read_a_few_at_a_time_and_part_of_them_is_the_pool(
    npbml_command: Npbml, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        paint(folders / "many" / f"{number}.png", "blue", 100 + number)
    monkeypatch.setattr(labelling, "POOL", 10)
    seen: list[int] = []
    predict = npbml.FewShotClassifier.predict_proba

    def counting(self: Any, pictures: Any) -> Any:
        seen.append(len(pictures))
        return predict(self, pictures)

    monkeypatch.setattr(npbml.FewShotClassifier, "predict_proba", counting)
    monkeypatch.setattr(labelling.Reader.batches, "__defaults__", (8,))
    said = npbml_command("classify", *GIVEN, "--out", "out.json")
    assert said.code == 0 and "10 unlabelled ones of 52, drawn at random, helped" in said.out, said.error
    out = json.loads(Path("out.json").read_text())
    assert len(out["pictures"]) == 52 and out["unlabelled"] == 10 and sum(seen) == 52


def test_what_cannot_be_read_is_listed_and_what_is_no_picture_is_counted(
    npbml_command: Npbml, folders: Path
) -> None:
    many = folders / "many"
    whole = paint(many / "whole.jpg", "red", 9, (200, 200)).read_bytes()
    (many / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (many / "empty.jpg").write_bytes(b"")
    (many / "text.png").write_text("no picture")
    (many / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0")
    (many / "film.mp4").write_text("")
    (many / "notes").write_text("")
    (folders / "few" / "red" / "bad.jpg").write_text("no picture")
    os.rename(many / "whole.jpg", os.fsencode(many) + b'/caf\xe9, "1"\n.jpg')
    said = npbml_command("classify", *GIVEN)
    assert said.code == 0, said.error
    assert 'caf\\xe9, "1"\\n.jpg' in said.out
    lines = said.out.splitlines()
    start = lines.index("5 files could not be read and have no label:")
    listed = dict(line.strip().split(": ", 1) for line in lines[start + 1 : start + 6])
    assert listed["empty.jpg"] == "it is empty" and listed["text.png"] == "its format is unknown"
    assert "truncated" in listed["cut.jpg"] and "pip install pillow-heif" in listed["phone.heic"]
    assert "few/red/bad.jpg" in listed
    assert lines[-1] == "ignored, by their endings: 1 without an ending, 1 .mp4"
    said = npbml_command("classify", *GIVEN, "--out", "out.csv")
    assert said.code == 0 and 'caf\\xe9, "1"\n.jpg' in [row["file"] for row in rows_of(Path("out.csv"))]


def test_a_threshold_leaves_pictures_unknown_and_in_their_place(npbml_command: Npbml, folders: Path) -> None:
    said = npbml_command("classify", *GIVEN, "--out", "before.csv")
    best = sorted(float(row["probability"]) for row in rows_of(Path("before.csv")))
    limit = (best[5] + best[6]) / 2
    said = npbml_command(
        "classify", *GIVEN, "--threshold", limit, "--out", "out.csv", "--move", "--into", "sorted"
    )
    assert said.code == 0, said.error
    labels = [row["label"] for row in rows_of(Path("out.csv"))]
    assert labels.count("unknown") == 6 and "6 are unknown and stay" in said.out
    assert "of the 6 pictures that have a label: 50.0 % of 12" in said.out
    assert len(list(Path("many").rglob("*.png"))) == 6 == len(list(Path("sorted").rglob("*.png")))


@pytest.mark.parametrize("how", ["--move", "--link"])
def test_pictures_are_filed_only_when_it_is_no_dry_run(npbml_command: Npbml, folders: Path, how: str) -> None:
    before = sorted(Path("many").rglob("*"))
    said = npbml_command("classify", *GIVEN, how, "--into", "many/sorted", "--dry-run")
    assert said.code == 0 and "nothing was done" in said.out and sorted(Path("many").rglob("*")) == before
    assert "red/red3.png -> many/sorted/red/red3.png" in said.out
    for _ in range(2):  # the second time, what was filed is not taken for more pictures
        said = npbml_command("classify", *GIVEN, how, "--into", "many/sorted")
        if how == "--move" and _ == 1:
            assert said.code == 1 and "many has no pictures" in said.error
        else:
            assert said.code == 0, said.error
    filed = sorted(str(path) for path in Path("many/sorted").rglob("*.png"))
    assert filed == [f"many/sorted/{colour}/{colour}{number}.png" for colour in COLOURS for number in range(2, 6)]
    assert Path("many/red/red3.png").exists() is (how == "--link")


def test_a_contact_sheet_is_drawn(npbml_command: Npbml, folders: Path) -> None:
    said = npbml_command("classify", *GIVEN, "--sheet", "new/sheet.png")
    assert said.code == 0 and "contact sheet: new/sheet.png" in said.out, said.error
    with Image.open("new/sheet.png") as sheet:
        assert sheet.width > 1000 and sheet.height > 400


def test_a_classifier_is_saved_and_used_again(npbml_command: Npbml, folders: Path) -> None:
    said = npbml_command("classify", *GIVEN, "--save", "c.npbml", "--threshold", 0.9, "--out", "a.csv")
    assert said.code == 0, said.error
    said = npbml_command("classify", "--classifier", "c.npbml", "many", "--device", "cpu", "--out", "b.csv")
    assert said.code == 0 and "each by itself" in said.out, said.error
    assert rows_of(Path("a.csv")) == rows_of(Path("b.csv"))


def test_files_that_are_there_are_replaced_only_when_asked(npbml_command: Npbml, folders: Path) -> None:
    Path("labels.csv").write_text("years of work")
    said = npbml_command("classify", *GIVEN, "--out", "labels.csv")
    assert said.code == 1 and "labels.csv is there already: give --overwrite" in said.error
    assert Path("labels.csv").read_text() == "years of work"
    assert npbml_command("classify", *GIVEN, "--out", "labels.csv", "--overwrite").code == 0
    assert len(rows_of(Path("labels.csv"))) == 12


def test_labelled_pictures_do_not_count_in_the_accuracy(npbml_command: Npbml, folders: Path) -> None:
    said = npbml_command("classify", "few", "few", *GIVEN[2:])
    assert said.code == 0 and "6 pictures in class folders are among the labelled ones" in said.out
    assert "accuracy:" not in said.out
    said = npbml_command("classify", "few", ".", *GIVEN[2:], "--out", "all.csv")
    assert said.code == 0 and len(rows_of(Path("all.csv"))) == 12, "few/ lies below, and is labelled already"


def test_one_picture_can_be_labelled(npbml_command: Npbml, folders: Path) -> None:
    said = npbml_command("classify", "few", "many/red/red3.png", *GIVEN[2:])
    assert said.code == 0 and ["many/red/red3.png", "red"] in [line.split()[:2] for line in said.out.splitlines()]


@pytest.mark.parametrize("spelling", ["options", "equals"])
def test_the_options_of_earlier_versions_are_understood(
    npbml_command: Npbml, shared: Path, folders: Path, spelling: str
) -> None:
    named = {"run": shared / "done", "support": "few", "query": "many", "device": "cpu"}
    words = [f"--{name}={value}" for name, value in named.items()]
    if spelling == "options":
        words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    said = npbml_command("classify", *words)
    assert said.code == 0 and said.out.count(".png") == 12, said.error
    assert "up to 200 together: this learner compares them" in said.out


def test_a_learner_that_looks_at_all_pictures_takes_no_other_pool(
    npbml_command: Npbml, shared: Path, folders: Path
) -> None:
    for how in (("--alone",), ("--unlabelled", "few")):
        said = npbml_command("classify", "few", "many", "--learner", shared / "done", "--device", "cpu", *how)
        assert said.code == 2 and how[0] in said.error and "npbml-any" in said.error


WRONG: list[tuple[str, str]] = [
    ("", "Give two folders, FEW and MANY; here is none. For example: npbml classify few/ many/"),
    ("few", "Give two folders, FEW and MANY; here are 1"),
    ("few many more", "here are 3"),
    ("--classifier c.npbml few many", "Give a folder, MANY; here are 2"),
    ("--support few", "--support and --query go together"),
    ("few many --threshold 2", "--threshold is 2; it is a probability"),
    ("few many --move --link --into x", "--move or --link, not both"),
    ("few many --move", "Say where to move the pictures: --into FOLDER"),
    ("few many --into x", "--into needs --move or --link"),
    ("few many --dry-run", "neither is given"),
    ("few many --out labels.xlsx", "labels.xlsx must end in .csv or .json"),
    ("few many --sheet sheet.jpg", "sheet.jpg must end in .png"),
    ("--classifier c.npbml many --save d.npbml", "takes no --unlabelled, --save or --method"),
    ("nowhere many", "There is no folder nowhere"),
    ("few nowhere", "There is no picture or folder nowhere"),
    ("few many --unlabelled nowhere", "There is no picture or folder nowhere"),
    ("few many --learner nowhere", "There is no learner file or run folder nowhere"),
    ("many few/red --learner cifar-fs-conv4 --device gpu", "device takes auto, cpu, cuda or cuda:N, not 'gpu'"),
    ("few/red many", "few/red has no class folders"),
    ("one many", "one has one class folder, red. Give pictures of at least 2 classes"),
    ("few none", "none has no pictures. ignored, by their endings: 1 .txt"),
    ("few bad --learner cifar-fs-conv4", "No picture could be read. bad/a.jpg: it is empty."),
    ("worse many --learner cifar-fs-conv4", "None of the pictures of the class 'green' can be read"),
    ("--classifier few/red/red0.png many", "red0.png"),
    ("odd many --threshold 0.5", "A class is called unknown, as are answers below --threshold"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[arguments for arguments, _ in WRONG])
def test_what_cannot_be_done_is_said_in_a_sentence(
    npbml_command: Npbml, folders: Path, arguments: str, words: str
) -> None:
    paint(Path("one/red/a.png"), "red", 1)
    Path("none").mkdir()
    Path("none/a.txt").write_text("")
    Path("bad").mkdir()
    Path("bad/a.jpg").write_text("")
    paint(Path("worse/red/a.png"), "red", 1)
    Path("worse/green").mkdir()
    Path("worse/green/a.png").write_text("")
    for name in ("unknown", "red"):
        paint(Path(f"odd/{name}/a.png"), "red", 1)
    before = sorted(Path().rglob("*"))
    said = npbml_command("classify", *arguments.split())
    assert said.code in (1, 2) and words in " ".join(said.error.split()), said.error
    assert said.out == "" and "Traceback" not in said.error and sorted(Path().rglob("*")) == before


def test_progress_is_shown_on_a_terminal_and_not_among_the_labels(folders: Path) -> None:
    main, other = pty.openpty()
    script = "from npbml.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "classify", *GIVEN],
        stdout=subprocess.PIPE,
        stderr=other,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"},
    )
    os.close(other)
    shown = os.read(main, 10**6).decode()
    assert done.returncode == 0 and b"\x1b" not in done.stdout and b"accuracy: 100.0 %" in done.stdout
    assert "12/12" in shown and "label" in shown and "read" in shown
