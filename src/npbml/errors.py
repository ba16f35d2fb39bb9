"""Errors that speak to the user: what was given, what was expected, what to do."""


class NpbmlError(Exception):
    """Anything the user can put right. The command line prints its message alone, without a traceback."""


class SettingError(NpbmlError):
    """A setting that is unknown, of the wrong kind, out of range, or at odds with another."""


class DataError(NpbmlError):
    """Images or labels that cannot be used as they are."""


class RunError(NpbmlError):
    """A run folder that cannot be used, or a stage that cannot go on."""


class NotFiniteError(RunError):
    """A gradient with NaN or infinity in it."""


class Stopped(Exception):
    """The user asked the run to stop; everything up to `step` is saved."""

    def __init__(self, stage: str, step: int, number: int) -> None:
        super().__init__(f"Stopped in {stage} after step {step}; it is saved.")
        self.number = number
