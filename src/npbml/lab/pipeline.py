"""The pipeline of a run: its stages in order, and the tests of its methods."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from npbml.engine.distributed import on_rank_zero
from npbml.errors import SettingError
from npbml.json_files import read_json, write_whole
from npbml.lab.run import Run
from npbml.lab.run_folder import RunFolder
from npbml.lab.schema import check_method, method_config
from npbml.lab.shape_tests import try_baselines
from npbml.lab.stages import METATRAIN, SCORER, needed, spec_of, stage_value
from npbml.lab.testing import test_method
from npbml.lab.trainers import make_trainer
from npbml.lab.weights import pretrained_network, read_learner
from npbml.learner.file import about_learner
from npbml.learner.learner import Learner
from npbml.measures import Figure
from npbml.nets.network import Network
from npbml.settings import to_dict
from npbml.stages.loop import run_stage
from npbml.stages.stage import Stage


class Pipeline(Run):
    """A run whose stages can be trained and whose methods can be tested."""

    def needs(self, methods: Iterable[str]) -> list[str]:
        """The stages that must be done before these methods can be trained, or tested, in their order."""
        return needed(self.config, methods)

    def stage(self, name: str) -> Stage:
        """A stage of this run as a value: a shared one, or the meta-training of a method by its name."""
        return stage_value(self.config, name, lambda: make_trainer(self, name))

    def run(self, name: str) -> dict[str, Any]:
        """Train a stage to its end, or go on, or do nothing where that is done. Returns its summary."""
        stage, meta = self.stage(name), spec_of(name) is METATRAIN
        if meta:
            check_method(self.config, name)
            on_rank_zero(lambda: self.folder.keep_recipe(name))
        elif name == SCORER.name and not self.config.learner.scorer.trains:
            raise SettingError(
                f"scorer.kind={self.config.learner.scorer.kind} scores by the pre-trained encoder: there is "
                "nothing to train."
            )
        for earlier in stage.after:
            self.stage(earlier).summary(self.folder.path)  # or an error that says how to make it
        about = {"images": to_dict(self.images)}
        if meta:
            about = about_learner(method_config(self.config, name).learner, self.images)
        with self._peak_memory(meta):
            return run_stage(stage, self.folder.path, self.observer, about, self.config.checkpoint_seconds)

    @contextmanager
    def _peak_memory(self, wanted: bool) -> Iterator[None]:
        """Say how much of a GPU's memory a block took at most."""
        if self.device.type != "cuda" or not wanted:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30
        self.observer.said(f"GPU memory in use at most: {peak:.2f} GiB.")

    def take_over(self, name: str, folders: Iterable[Path]) -> None:
        """Copy a stage from the first of these run folders that has done it with the same settings and images."""
        on_rank_zero(lambda: self._take_over(self.stage(name), folders))

    def _take_over(self, stage: Stage, folders: Iterable[Path]) -> None:
        own = self.folder / stage.name
        for folder in folders if not stage.done(self.folder.path) else ():
            other = folder / stage.name
            if (
                stage.done(folder)
                and read_json(other / "done.json").get("fingerprint") == stage.fingerprint
                and RunFolder(folder).checksum() == self.data.checksum
            ):
                for name in (stage.weights, "metrics.jsonl", "done.json"):  # the last one says that all are there
                    if name != "metrics.jsonl" or (other / name).exists():
                        write_whole(own / name, (other / name).read_bytes())
                (own / "checkpoint.safetensors").unlink(missing_ok=True)
                self.observer.said(f"{stage.name}: taken over from {folder}")
                return

    def test(
        self, method: str, tick: Callable[[int], None] = lambda count: None, dataset: str | None = None
    ) -> dict[str, Any]:
        """Test a method on meta-test tasks, those of another `dataset` if given, and keep its record."""
        return test_method(self, method, tick, dataset)

    def test_baselines(self, tick: Callable[[int], None] = lambda count: None) -> dict[str, dict[str, Any]]:
        """Test nearest class means and soft k-means on the shapes of test.shapes."""
        return try_baselines(self, tick)

    def learner(self, method: str | None = None) -> Learner:
        """The meta-trained learner of a method, the run's own by default; of an ensemble, the best."""
        return read_learner(self, method or self.config.method)

    def learners(self, method: str) -> list[Learner]:
        """The states of a method that were kept, the best on validation first."""
        kept = self.stage(method).summary(self.folder.path)["kept"]
        return [read_learner(self, method, rank) for rank in range(kept)]

    def pretrained_network(self) -> Network:
        """The pre-trained encoder, normalising as in meta-learning."""
        return pretrained_network(self)

    def paired_difference(self, method: str, other: str, dataset: str) -> Figure | None:
        """How much more accurate `method` is than `other`, over the test tasks that both were given."""
        return self.records.difference(self.measure, method, other, dataset)
