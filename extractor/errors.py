"""The errors that tapdeck raises on purpose.

Every one says what happened, to which object, and what to do next. `code` is stable and meant for
programs; `exit_code` is what the command line ends with (see `docs/architecture.md`, "Exit codes").

    TapdeckError
    |-- ConfigError        run.toml or a flag is wrong; nothing was read or written          2
    |-- PreflightError     the run cannot work as asked; refused before weights are read     2
    |   |-- DiskSpaceError     the output would not fit                                      1
    |   `-- AccessError        a file or folder may not be read or written                   5
    |-- ArgumentError      an argument of the Python API is wrong (a ValueError)             2
    |   `-- ModelNotFoundError a folder or hub id that is not there (an OSError, too)        2
    |-- DatasetError       the input is not usable (too many rejects, no sample left)        1
    |-- LeaseError         another run owns the output, or the output is another run's       6
    |   `-- LeaseBusyError     its owner is gone and its worker still finishes a shard      75
    |-- StoreError         a file of a data set is damaged or missing                        1
    |-- NoRunError         there is no such run, or nothing supervises it                    3
    |-- UnreachableError   its supervisor is there and does not answer                       4
    |-- RefusedError       the supervisor refused: read-only                                 5
    |-- ConflictError      the supervisor refused: the run has changed, or cannot do that    6
    |-- EngineError        the engine ended the run                                          7
    |   |-- CaptureError       what SGLang returned is not what was asked for                7
    |   |-- ProofError         the start-up proof failed                                     7
    |   |-- GeneratorError     a HiddenStatesGenerator cannot go on (a RuntimeError)         7
    |   `-- RanksDisagreeError two ranks of a replica have computed different states         7
    |-- NvmlError          the GPU driver refused; never leaves the telemetry                -
    `-- BugError           cannot happen; please report                                      1
"""

from __future__ import annotations


class TapdeckError(Exception):
    """Base of all errors raised on purpose."""

    code = "error"
    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        code: str | None = None,
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message if remedy is None else f"{message}\n  What to do: {remedy}")
        self.message = message
        self.remedy = remedy
        if code is not None:
            self.code = code
        if exit_code is not None:
            self.exit_code = exit_code


class ConfigError(TapdeckError):
    """A key or value of run.toml, `--set` or a flag is wrong."""

    code = "config"
    exit_code = 2


class PreflightError(TapdeckError):
    """The run cannot work as asked. Raised before weights are read; nothing was changed."""

    code = "preflight"
    exit_code = 2


class DiskSpaceError(PreflightError):
    """The output would not fit on its file system."""

    code = "disk_space"
    exit_code = 1


class AccessError(PreflightError):
    """A file or folder may not be read or written."""

    code = "access"
    exit_code = 5


class ArgumentError(TapdeckError, ValueError):
    """An argument of the Python API is wrong; nothing was loaded or computed."""

    code = "argument"
    exit_code = 2


class ModelNotFoundError(ArgumentError, OSError):
    """There is no such model folder, and no such model in the local cache."""

    code = "model_not_found"


class DatasetError(TapdeckError):
    """The input data cannot be used."""

    code = "dataset"


class LeaseError(TapdeckError):
    """The output folder belongs to another run, or to another configuration of this one."""

    code = "lease"
    exit_code = 6


class LeaseBusyError(LeaseError):
    """The owner of the output is gone, but its worker still finishes the shard in hand."""

    code = "lease_busy"
    exit_code = 75


class StoreError(TapdeckError):
    """A file of a data set is damaged, missing or not what its manifest says."""

    code = "store"


class NoRunError(TapdeckError):
    """No run of that name is known, or no supervisor runs for it."""

    code = "no_run"
    exit_code = 3


class UnreachableError(TapdeckError):
    """The supervisor's process is there, but it does not answer."""

    code = "unreachable"
    exit_code = 4


class RefusedError(TapdeckError):
    """The supervisor refused an action of a read-only client."""

    code = "read_only"
    exit_code = 5


class ConflictError(TapdeckError):
    """The supervisor refused an action: somebody else was faster, or the state does not allow it."""

    code = "conflict"
    exit_code = 6


class EngineError(TapdeckError):
    """The engine ended the run."""

    code = "engine"
    exit_code = 7


class CaptureError(EngineError):
    """What SGLang returned for a batch is not what was asked for."""

    code = "capture"


class RanksDisagreeError(EngineError):
    """Two ranks of a replica have computed different states, or judge the same ones differently."""

    code = "ranks_disagree"


class ProofError(EngineError):
    """The start-up proof failed: the states captured are not the boundaries asked for."""

    code = "proof"


class GeneratorError(EngineError, RuntimeError):
    """A `HiddenStatesGenerator` has no result: its engine has ended, it is closed, or the states are not usable."""

    code = "generator"


class BugError(TapdeckError):
    """An impossible case. Please report it."""

    code = "bug"
