"""The cells of the paper's tables as jobs: what is run for each, where, and the file of its result."""

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from npbml.errors import RunError, SettingError
from npbml.json_files import read_json, write_json
from npbml.lab.identity import differences, from_file, to_file
from npbml.lab.paper import VARIATIONS, TableCell
from npbml.lab.protocols import preset
from npbml.lab.run_folder import RunFolder
from npbml.lab.schema import Config, method_config, override
from npbml.measures import Calibration, Figure
from npbml.settings import from_dict, leaves, merged


@dataclass(frozen=True)
class Job:
    """One cell, run with one seed under one protocol."""

    cell: TableCell
    config: Config
    folder: Path
    """The run folder. Cells that differ in the method alone share it, and with it the encoder."""
    file: Path
    """The file of the result."""

    @property
    def title(self) -> str:
        cell, config = self.cell, self.config
        where = f"{cell.dataset}, {cell.backbone}, {cell.shots}-shot"
        return f"{cell.name}, {where}, {config.protocol}, seed {config.seed}"

    def done(self) -> bool:
        """Whether there is a result, over as many test tasks as are asked for."""
        if not self.file.exists():
            return False
        result = read_result(self.file)
        changed = differences(method_config(self.config, self.cell.method), _config_of(self.file))
        _refuse(f"{self.file} has a result with", changed, "results")
        return result.tasks >= self.config.test.tasks

    def check_folder(self) -> None:
        """Refuse a run folder that was begun with other settings."""
        folder = RunFolder(self.folder)
        if folder.there:
            _refuse(f"{self.folder} is a run with", differences(self.config, folder.config()), "runs")

    def keep(self, record: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Write the result: the record of the test, and all that it came from."""
        result = {
            **record,
            "variation": self.cell.variation,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "environment": dict(environment),
            "config": to_file(method_config(self.config, self.cell.method)),
        }
        write_json(self.file, result)


def plan(cell: TableCell, protocol: str, seed: int, settings: Mapping[str, Any], runs: Path, results: Path) -> Job:
    """The job of a cell; `settings` are nested tables on top of the protocol's."""

    config = configured(cell, protocol, seed, settings)
    place = f"{Path(cell.dataset).name}-{cell.backbone}-{config.learner.ways}way-{cell.shots}shot"
    shared = override(config, {"method": "npbml"}) == configured(
        replace(cell, method="npbml"), protocol, seed, settings
    )
    words = [place, "" if shared else cell.method, cell.variation, protocol, f"seed{seed}"]
    folder = runs / "-".join(word for word in words if word)
    return Job(cell, config, folder, results / f"{place}-{cell.name}-{protocol}-seed{seed}.json")


def configured(cell: TableCell, protocol: str, seed: int, settings: Mapping[str, Any]) -> Config:
    """The settings of a cell's run: the protocol's, what the cell varies in them, and `settings` on top."""
    own = merged(VARIATIONS[cell.variation], {"seed": seed, "baselines": []}, settings)
    return override(preset(protocol, cell.dataset, cell.backbone, cell.method, cell.shots), own)


def _refuse(what: str, changed: list[str], option: str) -> None:
    if changed:
        more = " and more" if len(changed) > 4 else ""
        raise RunError(
            f"{what} another {', '.join(changed[:4])}{more}: give the same settings, or choose another folder "
            f"with --{option}."
        )


def grouped_by_folder(jobs: Iterable[Job]) -> dict[Path, list[Job]]:
    """The jobs of each run folder."""
    members: dict[Path, list[Job]] = {}
    for job in jobs:
        members.setdefault(job.folder, []).append(job)
    return members


@dataclass(frozen=True)
class Result:
    """What a report needs of a result file."""

    method: str
    variation: str
    dataset: str
    backbone: str
    shots: int
    protocol: str
    seed: int
    tasks: int
    accuracy: float
    ci95: float
    scores: Figure | None = None
    """Of the scores that the learner is given of query items, where it asks for them, with no learner."""
    calibration: Calibration | None = None
    """How good the probabilities are; older results do not say it."""
    scores_calibration: Calibration | None = None
    """The same of the scores."""
    changed: str = ""
    """The settings that are not those which the protocol has now, in words."""

    @property
    def cell(self) -> TableCell:
        """The cell, without what the paper says of it."""
        where = (self.dataset, self.backbone, self.shots)
        return TableCell(self.method, self.method, *where, variation=self.variation)


def read_result(path: Path) -> Result:
    data = read_json(path)
    names = [field.name for field in fields(Result) if field.default is MISSING]
    try:
        result = from_dict(Result, {name: data[name] for name in names})
        scores = data.get("scores")
        return replace(
            result,
            scores=Figure(scores["accuracy"], scores["ci95"]) if scores else None,
            calibration=Calibration.of(data),
            scores_calibration=Calibration.of(scores or {}),
            changed=_changes(result, _config_of(path)),
        )
    except KeyError as error:
        raise RunError(f"{path} is damaged or not a result of `npbml reproduce`: it has no {error}.") from None
    except (TypeError, SettingError) as error:
        raise RunError(f"{path} is damaged or not a result of `npbml reproduce`: {error}") from None


def read_results(folder: Path) -> list[Result]:
    """Every result in a folder."""
    if not folder.is_dir():
        raise RunError(f"There is no folder {folder}: `npbml reproduce` fills one with results.")
    return [read_result(path) for path in sorted(folder.glob("*.json"))]


def _changes(result: Result, config: Config) -> str:
    now = method_config(configured(result.cell, result.protocol, result.seed, {}), result.method)
    values = {leaf.name: leaf.value for leaf in leaves(config)}
    # Without scores it does not matter how they would be found.
    scored = config.learner.loss.has("needs_scores") or config.pretrain.distill
    unread = () if scored else ("scorer.", "scorer_training.", "loss.score_weight")
    changed = [name for name in differences(config, now) if not name.startswith(unread)]
    return ", ".join(f"{name}={values[name]}" for name in changed)


def _config_of(path: Path) -> Config:
    """The whole configuration that a result came from."""
    try:
        return from_file(read_json(path)["config"])
    except (KeyError, TypeError, SettingError) as error:
        raise RunError(f"{path} is damaged or of another version of npbml: {error}") from None


def commit() -> str | None:
    """The commit of npbml's own checkout, where it is run from one; -dirty where its files are changed."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(*words: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
