"""The processes in which a supervisor has a run prepared and concluded: `python -m extractor.commands.tasks`.

They load what the supervisor must not (tokenizers, pyarrow). Each speaks in JSON lines on stdout
(`extractor.supervisor.prepared_run`), keeps stderr for its log, and ends at once when the supervisor is gone.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from extractor import config as configs
from extractor.commands import job as jobs
from extractor.commands.conclude import conclude
from extractor.commands.output import Output
from extractor.dataset.prepared import PreparedDataset
from extractor.errors import BugError, TapdeckError
from extractor.folders import RunFolder
from extractor.plan import plan_shards
from extractor.store import listing
from extractor.supervisor import prepared_run
from extractor.supervisor.prepared_run import (
    Concluded,
    Note,
    Prepared,
    PreparedRun,
    TaskFailed,
    TaskMessage,
    encode_message,
)


class _Messages(Output):
    """Notes go to the supervisor, which shows them."""

    def __init__(self) -> None:
        # Libraries that print must not break the line protocol: they get stderr.
        self._pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
        sys.stdout = sys.stderr
        super().__init__(as_json=True, stdout=io.StringIO(), stderr=io.StringIO())

    def note(self, text: str) -> None:
        """A line of progress."""
        self.tell(Note(text))

    def line(self, text: str = "") -> None:
        """As `note`."""
        self.tell(Note(text))

    def tell(self, message: TaskMessage) -> None:
        """Sends one message."""
        self._pipe.write(encode_message(message) + b"\n")


def prepare(folder: RunFolder, out: _Messages) -> None:
    """Checks, prepares and plans the run, and leaves `job.json`. The output's lease is held by the supervisor.

    Raises:
        TapdeckError: the run is refused.
    """
    job = jobs.make(configs.load(folder.config), out=out, show_taps=False)
    jobs.require_same_data_set(job)
    listing.clean_parts(job.output)
    found = jobs.scan_output(job)
    jobs.check_disk(job, found)
    records = found.done.values()
    prepared_run.write(
        folder.job,
        PreparedRun(
            spec=jobs.engine_spec(job, ""),
            manifest=job.manifest,
            shard_tokens=tuple(shard.num_tokens for shard in job.shards),
            shard_samples=tuple(len(shard.samples) for shard in job.shards),
            done=tuple(sorted(found.done)),
            done_bytes=sum(file.bytes for record in records for file in record.files.values()),
            quarantined=sum(len(record.quarantined) for record in records),
            bytes_per_token=job.size.bytes_per_token,
            reserve_bytes=job.config.output.reserve_bytes,
            ids_after=tuple(job.facts.taps.ids("after")),
            ids_before=tuple(job.facts.taps.ids("before")),
            notes=tuple(jobs.describe_damages(found)),
        ),
    )
    out.tell(Prepared())


def end(folder: RunFolder, out: _Messages) -> None:
    """Writes the lists of the data set.

    Raises:
        TapdeckError: the data set cannot be read or written.
    """
    run = prepared_run.read(folder.job)
    samples = PreparedDataset.open(Path(run.spec.prepared))
    shards = plan_shards(samples.lengths[: run.spec.num_samples].tolist(), run.spec.geometry)
    conclusion, _ = conclude(Path(run.spec.output), shards, run.manifest, samples, run.spec.taps.names)
    out.tell(Concluded(conclusion))


TASKS: dict[str, Any] = {"prepare": prepare, "conclude": end}


def main(argv: list[str]) -> int:
    """Entry point of the process.

    Args:
        argv: name of the task, run folder.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_supervisor(os.environ.pop("TAPDECK_LIFELINE_FD", None))
    out = _Messages()
    try:
        TASKS[argv[0]](RunFolder(Path(argv[1])), out)
    except TapdeckError as error:
        out.tell(TaskFailed(error.code, error.exit_code, error.message, error.remedy))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the border of the process: everything is reported
        traceback.print_exc()
        out.tell(TaskFailed(BugError.code, 1, f"{type(error).__name__}: {error}", "please report this"))
        return 1
    return 0


def _end_with_supervisor(lifeline: str | None) -> None:
    if lifeline is None:
        return
    fd = int(lifeline)

    def watch() -> None:
        # Nobody ever writes into it: when the read returns, the other end is closed.
        os.read(fd, 1)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
