"""What is told of a stage while it runs."""

from collections.abc import Mapping


class Observer:
    """Told what happens while a stage runs; does nothing by itself."""

    def begin(self, stage: str, steps: int, done: int) -> None: ...

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def validated(self, step: int, value: str) -> None: ...

    def said(self, words: str) -> None: ...

    def end(self, note: str) -> None: ...
