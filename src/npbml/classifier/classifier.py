"""A classifier for a handful of labelled pictures, with the contract of scikit-learn."""

import math
import numbers
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from npbml.catalogue import load
from npbml.classifier.card import describe
from npbml.classifier.export import export_onnx
from npbml.classifier.file import load_classifier, save_classifier
from npbml.classifier.fitted import Fitted, Kept, answers_alone, fit_kept, keep
from npbml.classifier.hub import FILE, find_file, new_folder, upload, write_card
from npbml.classifier.labels import check_label, label_list
from npbml.classifier.leave_one_out import LeaveOneOut, leave_one_out
from npbml.classifier.reading import picture_names, pool_list, read_parts
from npbml.classifier.sklearn_base import UNUSED, BaseEstimator, ClassifierMixin, NotFittedError, TransformerMixin
from npbml.errors import DataError, NotFiniteError, RunError, SettingError
from npbml.learner.learner import Learner
from npbml.pictures import picture_list

FINAL_BATCHES = ("auto", "query", "joint")


class FewShotClassifier(ClassifierMixin, TransformerMixin, BaseEstimator):
    """Adapt a meta-trained learner to a few labelled pictures, then classify others.

    Pictures are a list of paths, PIL images, arrays or tensors, or one array or tensor [n, height, width],
    [n, height, width, channels] or [n, channels, height, width], of bytes or of floats in 0 to 1; of any size,
    grey or colour (see `npbml.pictures.read_picture`). Labels are hashable values of any kind, but not None or
    NaN; there are two classes or more, with any number of examples of each.

    A learner of `npbml-any`, such as those that come with the package, adapts in `fit` and then answers each
    picture by itself; unlabelled pictures of the same classes help it. Other learners normalise pictures together
    or look at those to be predicted: a prediction then depends on the pictures that are predicted with it, and
    adaptation happens in `predict`.

    Several threads can predict with one classifier: `fit`, `add` and `remove` replace what it knows as a whole,
    and predicting changes nothing.

    Parameters
    ----------
    learner : Learner, str or Path, default="photos"
        A meta-trained learner, the name of one that comes with the package (`npbml.shipped()`), the file of a
        learner, or a run folder. What is not a learner yet is loaded in `fit`.
    final_batch : {"auto", "query", "joint"}, default="auto"
        Of learners that normalise pictures together, what a prediction is normalised with: its batch alone
        ("query"), the labelled pictures too ("joint"), or what the learner was trained with, except for batches
        too small to be normalised by themselves, which are joined ("auto").
    batch_size : int, default=200
        How many pictures are read and predicted at a time at most.
    threshold : float or None, default=None
        Where the highest probability is lower than this, `predict` answers `unknown`. None: it always names a
        class.
    unknown : hashable, default="unknown"
        The answer in place of a class where `threshold` is not reached.
    device : str, default="auto"
        Where a learner that is loaded computes: auto (a GPU where there is one), cpu, cuda, or cuda:N.

    Attributes
    ----------
    classes_ : ndarray of shape (classes,)
        The labels, sorted where they can be.
    class_count_ : ndarray of shape (classes,)
        The number of labelled pictures of each class.
    learner_ : Learner
        The learner that was adapted.
    example_labels_ : ndarray of shape (n,)
        The labels of the labelled pictures.
    thumbnails_ : ndarray of shape (n, height, width, channels)
        Small copies of the labelled pictures, bytes; of no pixels in a classifier from a file without them.

    Examples
    --------
    >>> from PIL import Image
    >>> import npbml
    >>> colours = ["red", "green", "blue"]
    >>> pictures = [Image.new("RGB", (32, 32), colour) for colour in colours]
    >>> classifier = npbml.FewShotClassifier("cifar-fs-conv4", device="cpu")
    >>> classifier.fit(pictures, colours).predict([Image.new("RGB", (50, 40), "navy")])
    array(['blue'], dtype='<U5')
    >>> classifier.predict_proba(pictures).shape
    (3, 3)
    """

    # X and y of scikit-learn are called pictures and labels here; they are not metadata that could be routed.
    __metadata_request__fit: ClassVar = {"pictures": UNUSED, "labels": UNUSED}
    __metadata_request__score: ClassVar = {"pictures": UNUSED, "labels": UNUSED}
    __metadata_request__predict: ClassVar = {"pictures": UNUSED}
    __metadata_request__predict_proba: ClassVar = {"pictures": UNUSED}
    __metadata_request__decision_function: ClassVar = {"pictures": UNUSED}
    __metadata_request__transform: ClassVar = {"pictures": UNUSED}

    def __init__(
        self,
        learner: Learner | str | PathLike[str] = "photos",
        final_batch: Literal["auto", "query", "joint"] = "auto",
        batch_size: int = 200,
        threshold: float | None = None,
        unknown: Any = "unknown",
        device: str = "auto",
    ) -> None:
        self.learner = learner
        self.final_batch = final_batch
        self.batch_size = batch_size
        self.threshold = threshold
        self.unknown = unknown
        self.device = device

    def fit(self, pictures: Any, labels: Sequence[Any] | np.ndarray, unlabelled: Any | None = None) -> Self:
        """Adapt to labelled pictures, and to unlabelled ones where there are any.

        Parameters
        ----------
        pictures : n pictures
            The labelled pictures. One that is there twice counts twice.
        labels : sequence of length n
            Their labels, at least two of them different.
        unlabelled : pictures or None, default=None
            Pictures of the same classes without a label: the more, the better. Those to be predicted may be among
            them; those that are labelled too count once, as labelled.

        Returns
        -------
        FewShotClassifier
            Itself.

        Raises
        ------
        DataError
            A picture or a label cannot be used, one picture has two labels, or the learner cannot take this
            number of classes.
        SettingError
            A parameter is out of range.
        RunError
            The learner cannot be loaded.
        """
        self._check_parameters()
        given = picture_list(pictures)
        labels = label_list(labels, len(given))
        pool = pool_list(unlabelled)
        learner = self._loaded()
        if pool:
            _check_pool(learner)
        self._take(fit_kept(learner, self._kept(learner, given), labels, self._kept_pool(learner, pool)))
        return self

    def fit_transform(
        self, pictures: Any, labels: Sequence[Any] | np.ndarray, unlabelled: Any | None = None
    ) -> np.ndarray:
        """Return `fit(pictures, labels, unlabelled).transform(pictures)`."""
        given = picture_list(pictures)
        return self.fit(given, labels, unlabelled).transform(given)

    def add(self, pictures: Any, labels: Sequence[Any] | np.ndarray, unlabelled: Any | None = None) -> Self:
        """Learn from more pictures, and correct labels; the classifier adapts anew to all that it knows.

        A picture that it knows already, by its content, gets the label that is given now. Labels may name new
        classes. The result is that of `fit` with all the pictures at once.

        Parameters
        ----------
        pictures : n pictures
            More labelled pictures, or some of those it has.
        labels : sequence of length n
            Their labels.
        unlabelled : pictures or None, default=None
            More unlabelled pictures.

        Returns
        -------
        FewShotClassifier
            Itself.

        Examples
        --------
        >>> from PIL import Image
        >>> import npbml
        >>> red, green, blue = (Image.new("RGB", (32, 32), colour) for colour in ("red", "green", "blue"))
        >>> classifier = npbml.FewShotClassifier("cifar-fs-conv4").fit([red, green], ["warm", "warmer"])
        >>> classifier.add([green, blue], ["cold", "cold"]).classes_
        array(['cold', 'warm'], dtype='<U4')
        """
        self._check_parameters()
        fitted, given = self._fitted_or_refuse(), picture_list(pictures)
        labels = label_list(labels, len(given))
        pool = pool_list(unlabelled)
        if pool:
            _check_pool(fitted.learner)
        new = self._kept(fitted.learner, given)
        label_of: dict[bytes, Any] = {}
        for number, (key, label) in enumerate(zip(new.keys(), labels, strict=True)):
            if label_of.setdefault(key, label) != label:
                raise DataError(
                    f"{new.names[number] or f'Image {number}'} is there twice, with the labels {label_of[key]!r} "
                    f"and {label!r}: remove one of them."
                )
        known = fitted.labelled.keys()
        old = [label_of.get(key, fitted.classes[c]) for key, c in zip(known, fitted.codes, strict=True)]
        fresh = [place for place, key in enumerate(new.keys()) if key not in set(known)]
        every = old + [labels[place] for place in fresh]
        more = self._kept_pool(fitted.learner, pool)
        self._take(
            fit_kept(fitted.learner, fitted.labelled.joined(new.take(fresh)), every, fitted.pool.joined(more))
        )
        return self

    def remove(self, pictures: Any) -> Self:
        """Forget labelled pictures, by their content; the classifier adapts anew to the others.

        A class whose last example is removed is a class no more.

        Parameters
        ----------
        pictures : pictures
            Some of the labelled pictures.

        Returns
        -------
        FewShotClassifier
            Itself.

        Raises
        ------
        DataError
            A picture is not among the labelled ones, or fewer than two classes would be left.
        """
        self._check_parameters()
        fitted, given = self._fitted_or_refuse(), picture_list(pictures)
        wrong, known = self._kept(fitted.learner, given).keys(), fitted.labelled.keys()
        for number, (key, name) in enumerate(zip(wrong, picture_names(given), strict=True)):
            if key not in set(known):
                raise DataError(f"{name or f'Image {number}'} is not among the labelled pictures.")
        left = [place for place, key in enumerate(known) if key not in set(wrong)]
        labels = [fitted.classes[fitted.codes[place]] for place in left]
        if len(set(labels)) < 2:
            raise DataError("Pictures of at least 2 classes must be left.")
        self._take(fit_kept(fitted.learner, fitted.labelled.take(left), labels, fitted.pool))
        return self

    def predict(self, pictures: Any) -> np.ndarray:
        """Return the label of each picture.

        Parameters
        ----------
        pictures : n pictures
            The pictures to be classified.

        Returns
        -------
        ndarray of shape (n,)
            Their labels; `unknown` where the highest probability is below `threshold`.
        """
        fitted = self._fitted_or_refuse()
        probabilities = _probabilities(self._batches(fitted, pictures, self._logits))
        answers = fitted.labels[probabilities.argmax(1)]
        if self.threshold is None:
            return answers
        known = probabilities.max(1) >= self.threshold
        if answers.dtype.kind == "U" and isinstance(self.unknown, str):
            return np.where(known, answers, self.unknown)
        answers = answers.astype(object)
        for place in np.flatnonzero(~known):
            answers[place] = self.unknown
        return answers

    def predict_proba(self, pictures: Any) -> np.ndarray:
        """Return the probability of each class.

        Parameters
        ----------
        pictures : n pictures
            The pictures to be classified.

        Returns
        -------
        ndarray of shape (n, classes)
            Probabilities, in the order of `classes_`.
        """
        return _probabilities(self._batches(self._fitted_or_refuse(), pictures, self._logits))

    def decision_function(self, pictures: Any) -> np.ndarray:
        """Return the logits, of which `predict_proba` is the softmax.

        Parameters
        ----------
        pictures : n pictures
            The pictures to be classified.

        Returns
        -------
        ndarray of shape (n, classes), or (n,) for two classes
            Logits in the order of `classes_`; of two classes, the second minus the first.
        """
        logits = self._batches(self._fitted_or_refuse(), pictures, self._logits)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def transform(self, pictures: Any) -> np.ndarray:
        """Return the adapted embedding of each picture.

        Parameters
        ----------
        pictures : n pictures
            Pictures of any classes.

        Returns
        -------
        ndarray of shape (n, width)
            Embeddings: what the adapted network gives to its last, linear layer.
        """
        return self._batches(self._fitted_or_refuse(), pictures, Fitted.embeddings)

    def score(self, pictures: Any, labels: Sequence[Any] | np.ndarray) -> float:
        """Return the share of pictures whose label is predicted.

        Parameters
        ----------
        pictures : n pictures
            The pictures to be classified.
        labels : sequence of length n
            Their true labels; `unknown` where a picture is of none of the classes.

        Returns
        -------
        float
            Accuracy, from 0 to 1.
        """
        self._fitted_or_refuse()
        given = picture_list(pictures)
        labels = label_list(labels, len(given))
        predicted = self.predict(given).tolist()
        return float(np.mean([one == other for one, other in zip(predicted, labels, strict=True)]))

    def leave_one_out(self) -> LeaveOneOut:
        """Estimate the accuracy from the labelled pictures, and name those that look mislabelled.

        Each picture of a class with at least two different examples is predicted by a classifier that is adapted
        without it. Classes with a single example are not covered. `threshold` is not applied. This adapts as often
        as there are pictures.

        Returns
        -------
        LeaveOneOut
            `accuracy`, `pictures` (one by one), `mislabelled` and `not_covered`; `print` shows a summary.

        Examples
        --------
        >>> from PIL import Image
        >>> import npbml
        >>> colours = ["red", "darkred", "blue", "navy"]
        >>> pictures = [Image.new("RGB", (32, 32), colour) for colour in colours]
        >>> classifier = npbml.FewShotClassifier("cifar-fs-conv4")
        >>> print(classifier.fit(pictures, ["warm", "warm", "cold", "cold"]).leave_one_out())
        4 of 4 pictures are predicted right without themselves.
        """
        return leave_one_out(self._fitted_or_refuse())

    def save(self, path: str | PathLike[str], thumbnails: bool = False) -> None:
        """Write the classifier to one file, from which `load` reads it again.

        The file has the classes, the adapted parameters, the features of the pictures (so that `add` works after
        loading), the learner, a card and a digest of it all; safetensors and JSON, nothing that is executed. The
        weights of an encoder of one's own or of an extra are not in it: they are found by the encoder's name, and
        compared.

        Parameters
        ----------
        path : str or Path
            The file, such as `flowers.npbml`. It is replaced as a whole, or not at all.
        thumbnails : bool, default=False
            Whether small copies of the labelled pictures are kept in it.

        Raises
        ------
        DataError
            A class is not named by a string, a number, a boolean or a tuple of them.
        RunError
            The file cannot be written.

        Examples
        --------
        >>> import tempfile
        >>> from PIL import Image
        >>> import npbml
        >>> pictures = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
        >>> classifier = npbml.FewShotClassifier("cifar-fs-conv4").fit(pictures, ["red", "blue"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     classifier.save(f"{folder}/colours.npbml")
        ...     again = npbml.FewShotClassifier.load(f"{folder}/colours.npbml")
        >>> again.predict(pictures)
        array(['red', 'blue'], dtype='<U4')
        """
        save_classifier(
            self._fitted_or_refuse(), Path(path), self._kept_parameters(), self._learner_name(), thumbnails
        )

    @classmethod
    def load(cls, path: str | PathLike[str], device: str = "auto") -> Self:
        """Read a classifier from the file that `save` has written.

        Parameters
        ----------
        path : str or Path
            The file.
        device : str, default="auto"
            Where it computes: auto (a GPU where there is one), cpu, cuda, or cuda:N.

        Returns
        -------
        FewShotClassifier
            The classifier, fitted. Its parameter `learner` is the learner in the file.

        Raises
        ------
        RunError
            The file is not there, is damaged, or does not hold a classifier.
        """
        fitted, parameters = load_classifier(Path(path), device)
        classifier = cls(fitted.learner, **parameters, device=device)
        try:
            classifier._check_parameters()
            classifier._take(fitted)
        except SettingError as error:
            raise RunError(f"{path} is damaged or not a classifier of npbml: {error}") from None
        return classifier

    def export(self, path: str | PathLike[str]) -> None:
        """Write the classifier as an ONNX file, for programs without npbml (extra `onnx`).

        The network takes images, float32 [n, channels, size, size] in 0 to 1, and gives their probabilities
        [n, classes]; n may be any number. What has to be done to a picture before, and the classes, are in the
        file's metadata as JSON, `preprocessing` and `classes`. Pictures must be resized by Pillow, as npbml does:
        ONNX's own resizing gives other pixels.

        Parameters
        ----------
        path : str or Path
            The file, such as `flowers.onnx`. It is replaced as a whole, or not at all.

        Raises
        ------
        SettingError
            The learner's answers depend on the pictures that are predicted together.
        RunError
            The extra is missing, or the file cannot be written.
        """
        export_onnx(self._fitted_or_refuse(), Path(path))

    def card(self) -> str:
        """Return what the classifier was made from, as Markdown.

        Returns
        -------
        str
            The card that `save` and `save_pretrained` write.
        """
        return describe(self._fitted_or_refuse(), self._learner_name(), self.threshold)

    def save_pretrained(self, save_directory: str | PathLike[str], thumbnails: bool = False) -> None:
        """Write the classifier and its card, README.md, to a folder.

        Parameters
        ----------
        save_directory : str or Path
            The folder; it is made if it is not there.
        thumbnails : bool, default=False
            Whether small copies of the labelled pictures are kept in it.
        """
        folder = Path(save_directory)
        self.save(folder / FILE, thumbnails)
        write_card(folder, self.card())

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str], device: str = "auto", **options: Any
    ) -> Self:
        """Read a classifier from a folder of `save_pretrained`, or from the Hugging Face Hub (extra `hub`).

        Parameters
        ----------
        pretrained_model_name_or_path : str or Path
            A folder, or a repository of the Hub, such as `someone/flowers`.
        device : str, default="auto"
            Where it computes.
        **options : dict
            Of `huggingface_hub.hf_hub_download`: revision, token, cache_dir, local_files_only and others.

        Returns
        -------
        FewShotClassifier
            The classifier, fitted.
        """
        return cls.load(find_file(pretrained_model_name_or_path, **options), device)

    def push_to_hub(
        self,
        repo_id: str,
        commit_message: str = "A classifier of npbml",
        private: bool | None = None,
        token: str | None = None,
        thumbnails: bool = False,
        **options: Any,
    ) -> str:
        """Upload the classifier and its card to the Hugging Face Hub (extra `hub`).

        Parameters
        ----------
        repo_id : str
            The repository, such as `someone/flowers`; it is made if it is not there.
        commit_message : str, default="A classifier of npbml"
            What the commit says.
        private : bool or None, default=None
            Whether a new repository is private; None: what the account says.
        token : str or None, default=None
            By default the one that `hf auth login` has kept.
        thumbnails : bool, default=False
            Whether small copies of the labelled pictures are uploaded with it.
        **options : dict
            Of `huggingface_hub.HfApi.upload_folder`: revision, create_pr and others.

        Returns
        -------
        str
            The address of the repository.
        """
        with new_folder() as folder:
            self.save_pretrained(folder, thumbnails)
            return upload(Path(folder), repo_id, commit_message, private, token, **options)

    def set_params(self, **params: Any) -> Self:
        """Set parameters of the constructor by name.

        Parameters
        ----------
        **params : dict
            Parameters; they are checked when they are used.

        Returns
        -------
        FewShotClassifier
            Itself.
        """
        for name in params:
            if name not in self.get_params():
                raise SettingError(
                    f"FewShotClassifier has no parameter {name!r}; it has {', '.join(self.get_params())}."
                )
        super().set_params(**params)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True  # pictures, not rows of numbers
        return tags

    def _check_parameters(self) -> None:
        if self.final_batch not in FINAL_BATCHES:
            raise SettingError(f"final_batch is {self.final_batch!r}; it must be {', '.join(FINAL_BATCHES)}.")
        if not _is_number(self.batch_size, numbers.Integral) or self.batch_size < 1:
            raise SettingError(f"batch_size is {self.batch_size!r}; it must be a whole number of at least 1.")
        threshold = self.threshold
        if threshold is not None and not (_is_number(threshold, numbers.Real) and 0 <= threshold <= 1):
            raise SettingError(f"threshold is {threshold!r}; it must be None or a number from 0 to 1.")
        try:
            check_label(self.unknown, "unknown")
        except DataError as error:
            raise SettingError(str(error).partition(":")[0] + ": give it a name, such as 'unknown'.") from None

    def _check_unknown(self, classes: Sequence[Any]) -> None:
        if self.threshold is not None and self.unknown in classes:
            raise SettingError(
                f"A class is called {self.unknown!r}, as are answers below the threshold: set unknown to another "
                "name."
            )

    def _loaded(self) -> Learner:
        learner = self.learner
        if not isinstance(learner, Learner):
            if not isinstance(learner, str | PathLike) or not str(learner):
                raise SettingError(
                    f"learner is of type {type(learner).__name__}; it must be a Learner, the name of one that "
                    "comes with the package, a file or a run folder."
                )
            if not isinstance(self.device, str):
                raise SettingError(f"device takes auto, cpu, cuda or cuda:N, not {self.device!r}.")
            learner = load(learner if isinstance(learner, str) else Path(learner), device=self.device)
        if learner.settings.target != "classes":
            raise SettingError("This learner predicts values, and not classes of pictures: choose another.")
        return learner

    def _fitted_or_refuse(self) -> Fitted:
        fitted: Fitted | None = getattr(self, "_fitted", None)
        if fitted is None:
            raise NotFittedError("This classifier has no labelled pictures yet: call fit(pictures, labels) first.")
        self._check_parameters()
        self._check_unknown(fitted.classes)
        return fitted

    def _kept_parameters(self) -> dict[str, Any]:
        """The parameters that a file keeps: those that are not about the learner."""
        threshold = None if self.threshold is None else float(self.threshold)
        size = int(self.batch_size)
        return {
            "final_batch": self.final_batch,
            "batch_size": size,
            "threshold": threshold,
            "unknown": self.unknown,
        }

    def _learner_name(self) -> str:
        return "of its own" if isinstance(self.learner, Learner) else Path(self.learner).name

    def _take(self, fitted: Fitted) -> None:
        """Keep what was found, all of it or nothing."""
        self._check_unknown(fitted.classes)
        self._fitted = fitted
        self.classes_, self.class_count_ = fitted.labels.copy(), np.array(fitted.counts)
        self.learner_, self.example_labels_ = fitted.learner, self.classes_[list(fitted.codes)]
        self.thumbnails_ = fitted.labelled.thumbnails.permute(0, 2, 3, 1).numpy()

    def _kept(self, learner: Learner, pictures: list[Any], thumbnails: bool = True) -> Kept:
        """The pictures as they are kept; they are read in parts."""
        names, kept = picture_names(pictures), None
        for part in read_parts(pictures, learner.images, self.batch_size):
            first = 0 if kept is None else len(kept)
            new = keep(learner, part, names[first : first + len(part)], thumbnails)
            kept = new if kept is None else kept.joined(new)
        assert kept is not None
        return kept

    def _kept_pool(self, learner: Learner, pictures: list[Any]) -> Kept:
        if pictures:
            return self._kept(learner, pictures, thumbnails=False)
        nothing = torch.zeros(0, learner.images.channels, learner.images.size, learner.images.size)
        return keep(learner, nothing.to(torch.uint8), (), thumbnails=False)

    def _logits(self, fitted: Fitted, images: Tensor) -> Tensor:
        return fitted.logits(images, self.final_batch)

    def _batches(self, fitted: Fitted, pictures: Any, answer: Callable[[Fitted, Tensor], Tensor]) -> np.ndarray:
        """What `answer` says of all the pictures, which are read in parts."""
        parts = read_parts(picture_list(pictures), fitted.learner.images, self.batch_size)
        answers = np.concatenate([answer(fitted, part).cpu().numpy() for part in parts])
        if not np.isfinite(answers).all():
            bad = int(np.flatnonzero(~np.isfinite(answers).all(1))[0])
            raise NotFiniteError(f"The answer for image {bad} is not finite: the learner cannot be used for it.")
        return answers


def _probabilities(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(-1).numpy()


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and not math.isnan(value)  # type: ignore[arg-type]


def _check_pool(learner: Learner) -> None:
    if not answers_alone(learner):
        raise DataError(
            "This learner takes the pictures to be predicted for its unlabelled ones, and no others: call fit "
            "without unlabelled, and predict many pictures in one call."
        )
