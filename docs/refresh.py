"""Put the results and pictures of finished runs into the README, and into that of the results.

python docs/refresh.py runs RUN [RUN ...]   a row for each run of `npbml run --seed N`; pictures of the first
python docs/refresh.py comparison RUN       the table and picture of an `npbml compare`
python docs/refresh.py regression RUN       the table of an `npbml compare --dataset sinusoid`
python docs/refresh.py results FOLDER       the cells of NPBML among the results of `npbml reproduce`
python docs/refresh.py common RUN [RUN ...] each `npbml compare` of all systems, in results/README.md
"""

import json
import shutil
import sys
from pathlib import Path

from npbml.report.tables import summary
from npbml.reproduce import read_results

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
RESULTS = DOCS.parent / "results"


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


def put(kind: str, lines: list[str], file: Path = README) -> None:
    """Replace what stands between the two marks of that kind."""
    begin, end = f"<!-- python docs/refresh.py {kind} -->", f"<!-- end of {kind} -->"
    before, _, rest = file.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    file.write_text(before + "\n".join([begin, *lines, end]) + after, encoding="utf-8")


def put_common(run: Path) -> None:
    """The table of a comparison, and its picture, which is kept beside the results."""
    first = json.loads((run / "comparison.json").read_text())[0]
    name = f"common-{first['dataset']}-{first['shots']}shot"
    shutil.copy(run / "pictures" / "comparison.png", RESULTS / f"{name}.png")
    lines = [*comparison_table(run), "", f"![accuracy and time of every method]({name}.png)"]
    put(f"common, {first['shots']}-shot", lines, RESULTS / "README.md")


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
    lines = [
        f"{ways}{first['shots']}-shot {first['dataset']}, {first['backbone']}, {first['protocol']} protocol, "
        f"seed {first['seed']}, {first['tasks']} test tasks, on {first['device']}:",
        "",
        f"| method | validation at the start | after | test {measure}{unit} | minus {first['method']} "
        "| ms a meta-step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        start, after = (form.format(row[name]) if name in row else "" for name in ("start", "validation"))
        cells = [row["method"], start, after, f"{form.format(row[measure])} ± {form.format(row['ci95'])}"]
        difference = row.get("difference")
        sign = form.replace(":", ":+")
        cells.append(
            f"{sign.format(difference['mean'])} ± {form.format(difference['ci95'])}" if difference else ""
        )
        cells.append(f"{row['step_ms']:.0f}" if "step_ms" in row else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
