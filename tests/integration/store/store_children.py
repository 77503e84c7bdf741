"""What the tests run in processes of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from extractor.store.faults import FaultyFileSystem
from extractor.store.lease import acquire


def write_until_killed(output: str, number: int, seed: int) -> None:
    """Writes a data set and dies by SIGKILL before call `number`, in the middle of its last write."""
    from store_support import kill_dataset

    def rule(call):
        if call.number >= number:
            os.kill(os.getpid(), signal.SIGKILL)
        # The last writes are short ones, so that the kill falls inside a file.
        near = call.name == "write_at" and number - call.number < 4 and call.num_bytes > 1
        return 1 + seed % (call.num_bytes - 1) if near else None

    kill_dataset().write(Path(output), files=FaultyFileSystem(rule), threads=4, with_manifest=False)


def hold(output: str, worker_stdin: int) -> None:
    """Takes a lease and obeys lines on stdin: `worker`, `release`, `end`."""
    lease = acquire(Path(output), "run-of-a-child")
    say(f"ready {os.getpid()}")
    for line in sys.stdin:
        match line.strip():
            case "worker":
                # It ends when the test closes its end of the pipe.
                worker = subprocess.Popen(
                    [sys.executable, "-c", "import sys; print('working', flush=True); sys.stdin.read()"],
                    stdin=worker_stdin,
                    pass_fds=[lease.lock_fd],
                )
                lease.add_worker(worker.pid)
            case "release":
                lease.release()
                say("released")
            case _:
                return


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    hold(sys.argv[1], int(sys.argv[2]))
