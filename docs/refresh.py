"""Put the results and pictures of finished runs into the documents.

python docs/refresh.py runs RUN [RUN ...]   a row for each run of `npbml run --seed N`, in README.md; pictures of
                                            the first
python docs/refresh.py comparison RUN       the table and picture of an `npbml compare`, in docs/methods.md
python docs/refresh.py regression RUN       the table of an `npbml compare --dataset sinusoid`, in docs/methods.md
python docs/refresh.py results FOLDER       the cells of NPBML among the results of `npbml reproduce`, in
                                            results/README.md
python docs/refresh.py common RUN [RUN ...] each `npbml compare` of all systems, in results/README.md

A block stands between `<!-- python docs/refresh.py KIND -->` and `<!-- end of KIND -->`.
"""

import json
import shutil
import sys
from pathlib import Path

from npbml.lab.reproduce import read_results
from npbml.measures import Calibration
from npbml.report.tables import summary
from npbml.report.words import CALIBRATION, calibration_texts

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "results"
# The document in which each generated block stands.
BLOCKS = {
    "runs": DOCS.parent / "README.md",
    "comparison": DOCS / "methods.md",
    "regression": DOCS / "methods.md",
    "results": RESULTS / "README.md",
    "common, 1-shot": RESULTS / "README.md",
    "common, 5-shot": RESULTS / "README.md",
}


def main() -> None:
    kind, runs = (sys.argv[1:] or [""])[0], [Path(name) for name in sys.argv[2:]]
    if kind not in ("runs", "comparison", "regression", "results", "common") or not runs:
        sys.exit(__doc__)
    if kind == "common":
        for run in runs:
            put_common(run)
        return
    if kind == "results":
        put("results", summary(read_results(runs[0])))
        return
    if kind == "runs":
        put("runs", runs_table(runs))
        pictures = {name: runs[0] / "pictures" / f"{name}.png" for name in ("tasks", "loss")}
    else:
        put(kind, comparison_table(runs[0]))
        pictures = {"comparison": runs[0] / "pictures" / "comparison.png"} if kind == "comparison" else {}
    (DOCS / "pictures").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        shutil.copy(picture, DOCS / "pictures" / f"{name}.png")


def put(kind: str, lines: list[str], file: Path | None = None) -> None:
    """Replace what stands between the two marks of that kind in its document."""
    if kind not in BLOCKS:
        sys.exit(f"No document has a block {kind!r}: {', '.join(BLOCKS)}.")
    file = file or BLOCKS[kind]
    begin, end = marks(kind)
    before, begun, rest = file.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        sys.exit(f"{file} has no block {kind!r}: it needs the lines {begin} and {end}.")
    file.write_text(before + "\n".join([begin, *lines, end]) + after, encoding="utf-8")


def marks(kind: str) -> tuple[str, str]:
    """The lines before and after a generated block."""
    return f"<!-- python docs/refresh.py {kind} -->", f"<!-- end of {kind} -->"


def put_common(run: Path) -> None:
    """The table of a comparison, and its picture, which is kept beside the results."""
    first = json.loads((run / "comparison.json").read_text())[0]
    name = f"common-{first['dataset']}-{first['shots']}shot"
    shutil.copy(run / "pictures" / "comparison.png", RESULTS / f"{name}.png")
    lines = [*comparison_table(run), "", f"![accuracy and time of every method]({name}.png)"]
    put(f"common, {first['shots']}-shot", lines)


def runs_table(runs: list[Path]) -> list[str]:
    records = [
        {record["method"]: record for record in json.loads((run / "results.json").read_text())} for run in runs
    ]
    methods = list(records[0])
    first = records[0][methods[0]]
    lines = [
        f"{first['ways']}-way {first['shots']}-shot {first['dataset']}: accuracy in percent, 95 % interval "
        f"over {first['tasks']} test tasks, on {first['device']}:",
        "",
        f"| seed | {' | '.join(methods)} |",
        f"| --- |{' --- |' * len(methods)}",
    ]
    for run in records:
        cells = [f"{run[method]['accuracy']:.2f} ± {run[method]['ci95']:.2f}" for method in methods]
        lines.append(f"| {run[methods[0]]['seed']} | {' | '.join(cells)} |")
    return lines


def comparison_table(run: Path) -> list[str]:
    rows = json.loads((run / "comparison.json").read_text())
    first = rows[0]
    measure, form = ("accuracy", "{:.2f}") if "accuracy" in first else ("squared error", "{:.3f}")
    unit, ways = (", %", f"{first['ways']}-way ") if measure == "accuracy" else ("", "")
    calibrated = any(Calibration.of(row) for row in rows)
    headings = "".join(f" {name} |" for name in CALIBRATION) if calibrated else ""
    lines = [
        f"{ways}{first['shots']}-shot {first['dataset']}, {first['backbone']}, {first['protocol']} protocol, "
        f"seed {first['seed']}, {first['tasks']} test tasks, on {first['device']}:",
        "",
        f"| method | validation at the start | after | test {measure}{unit} | minus {first['method']} "
        f"|{headings} ms a meta-step |",
        "| --- | --- | --- | --- | --- |" + " --- |" * (3 if calibrated else 1),
    ]
    for row in rows:
        start, after = (form.format(row[name]) if name in row else "" for name in ("start", "validation"))
        cells = [row["method"], start, after, f"{form.format(row[measure])} ± {form.format(row['ci95'])}"]
        difference = row.get("difference")
        sign = form.replace(":", ":+")
        cells.append(
            f"{sign.format(difference['mean'])} ± {form.format(difference['ci95'])}" if difference else ""
        )
        cells += calibration_texts(Calibration.of(row)) if calibrated else ()
        cells.append(f"{row['step_ms']:.0f}" if "step_ms" in row else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
