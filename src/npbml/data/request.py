"""What a run asks of a data set."""

from typing import NamedTuple


class Request(NamedTuple):
    """Which data set, and for tasks of what size."""

    name: str
    ways: int
    shots: int
    queries: int
    size: int | None = None  # of the images; the data set's own if not given
    channels: int | None = None  # of the user's own pictures; colour if any picture is, if not given
