"""The errors that specattn raises, one type per cause."""

from __future__ import annotations


class SpecAttnError(Exception):
    """Base of every error specattn raises on purpose."""


class UnsupportedError(SpecAttnError):
    """A backend cannot serve a configuration.

    Parameters
    ----------
    subject : str
        What was asked for, e.g. ``"backend 'triton'"``.
    reasons : sequence of str
        One line per reason; never empty.
    """

    def __init__(self, subject: str, reasons: list[str] | tuple[str, ...]) -> None:
        self.subject = subject
        self.reasons = tuple(reasons)
        super().__init__(f"{subject}: {'; '.join(self.reasons)}")


class CapacityError(SpecAttnError):
    """Request rows, KV slots, context columns or graph memory are used up."""


class CaptureError(SpecAttnError):
    """A forward failed while it was recorded.

    Parameters
    ----------
    mode : str
        The mode.
    bucket : int
        The batch size.
    cause : BaseException
        What failed first.
    """

    def __init__(self, mode: str, bucket: int, cause: BaseException) -> None:
        self.mode, self.bucket = mode, bucket
        super().__init__(
            f"capturing {mode} for a batch of {bucket} failed: {type(cause).__name__}: {cause}"
        )


class CaptureMismatch(SpecAttnError):
    """A graph would replay over other buffers than it was captured with.

    Parameters
    ----------
    field : str
        The first field that differs.
    expected, got : object
        Its value at capture and now.
    """

    def __init__(self, field: str, expected: object, got: object) -> None:
        self.field = field
        super().__init__(
            f"{field} changed since capture: expected {expected}, got {got}; put it back, or "
            "capture over what there is now"
        )


class TreeError(SpecAttnError):
    """A draft tree has a cycle, missing parent or foreign index."""


class ModelError(SpecAttnError):
    """A model cannot be loaded, or target and draft do not fit.

    Parameters
    ----------
    argument : str
        The argument to blame, as the user wrote it (``"target"``, ``"draft"``).
    message : str
        One line: what is wrong and what would be right.
    """

    def __init__(self, argument: str, message: str) -> None:
        self.argument = argument
        super().__init__(message)


class RankError(SpecAttnError):
    """Ranks that share a target's weights were given different things to do.

    Parameters
    ----------
    what : str
        What has to be the same on all ranks.
    ranks : sequence of int
        The ranks where it is not what it is on rank 0.
    """

    def __init__(self, what: str, ranks: list[int]) -> None:
        self.what, self.ranks = what, ranks
        super().__init__(
            f"{what} must be the same on all ranks of a sharded target, but on "
            f"rank {', '.join(map(str, ranks))} they are not those of rank 0"
        )


class NotCapturedError(SpecAttnError):
    """A forward mode should replay that was never captured.

    Parameters
    ----------
    mode : str
        The mode asked for.
    captured : list of str
        The modes that can be replayed.
    """

    def __init__(self, mode: str, captured: list[str]) -> None:
        self.mode = mode
        have = ", ".join(captured) or "none"
        super().__init__(
            f"mode {mode!r} was never captured (captured: {have}); call capture for it first"
        )
