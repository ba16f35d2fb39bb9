"""Put the results and pictures of finished runs into the README: python docs/refresh.py RUN [RUN ...]

The table has a row for each run, made by `npbml run --seed N`; the pictures are those of the first.
"""

import json
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
BEGIN, END = "<!-- results: python docs/refresh.py -->", "<!-- end of results -->"


def main() -> None:
    runs = [Path(name) for name in sys.argv[1:]]
    if not runs:
        sys.exit(__doc__)
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
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(before + "\n".join([BEGIN, *lines, END]) + after, encoding="utf-8")
    (DOCS / "pictures").mkdir(exist_ok=True)
    for name in ("tasks", "loss"):
        shutil.copy(runs[0] / "pictures" / f"{name}.png", DOCS / "pictures" / f"{name}.png")


if __name__ == "__main__":
    main()
