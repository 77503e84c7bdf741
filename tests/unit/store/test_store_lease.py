import errno
import fcntl
import os
from dataclasses import dataclass, field

import msgspec
import pytest

from extractor.errors import AccessError, LeaseBusyError, LeaseError, StoreError
from extractor.processes import ProcessIdentity, RealMachine, is_alive, own_identity
from extractor.store import lease, names
from extractor.store.lease import LeaseRecord, acquire, read_lease


@dataclass
class FakeMachine:
    """A host with a process table and a clock of its own."""

    name: str = "node-a"
    boot: str = "boot-1"
    processes: dict[int, int] = field(default_factory=lambda: {os.getpid(): 500})
    time: float = 1000.0
    on_wait: object = None
    waited: float = 0.0

    def host(self) -> str:
        return self.name

    def boot_id(self) -> str:
        return self.boot

    def start_ticks(self, pid: int) -> int | None:
        return self.processes.get(pid)

    def now_utc(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.waited += seconds
        self.time += seconds
        if self.on_wait is not None:
            self.on_wait()


def left_by(output, **changes) -> LeaseRecord:
    """A lease that some process left behind."""
    fields = {
        "token": "old",
        "run": "other-run",
        "host": "node-a",
        "boot_id": "boot-1",
        "holder": ProcessIdentity(4242, 77),
        "heartbeat_utc": 990.0,
    }
    record = LeaseRecord(**(fields | changes))
    output.mkdir(exist_ok=True)
    (output / names.LEASE).write_bytes(msgspec.json.encode(record))
    return record


def lock_of_somebody(output) -> int:
    """The lock as another process would hold it: through an open file of its own."""
    output.mkdir(exist_ok=True)
    fd = os.open(output / names.LEASE_LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(_fd, _operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lease.fcntl, "flock", refuse)


def test_a_fresh_folder_is_taken_and_given_back(tmp_path):
    output = tmp_path / "new" / "out"
    held = acquire(output, "run-1", machine=FakeMachine())
    assert read_lease(output) == held.record
    assert held.record.run == "run-1"
    assert os.get_inheritable(held.lock_fd)
    held.release()
    held.release()
    assert read_lease(output) is None
    acquire(output, "run-2", machine=FakeMachine()).release()


def test_a_folder_that_stayed_empty_is_removed_with_its_lock_when_asked(tmp_path):
    output = tmp_path / "out"
    acquire(output, "run-1").release(remove_if_empty=True)
    assert not output.exists()


def test_a_folder_with_anything_in_it_is_not_removed(tmp_path):
    held = acquire(tmp_path / "out", "run-1")
    (tmp_path / "out" / "dataset.json").write_text("{}")
    held.release(remove_if_empty=True)
    assert (tmp_path / "out" / names.LEASE_LOCK).exists()
    assert (tmp_path / "out" / "dataset.json").exists()


def test_a_lock_file_that_was_removed_while_waiting_is_taken_anew(tmp_path):
    output = tmp_path / "out"
    left_by(output)
    descriptor = os.open(output / names.LEASE_LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    def remove_and_unlock():
        (output / names.LEASE_LOCK).unlink(missing_ok=True)
        fcntl.flock(descriptor, fcntl.LOCK_UN)

    machine = FakeMachine(on_wait=remove_and_unlock)
    held = acquire(output, "run-2", machine=machine, wait_seconds=60)
    os.close(descriptor)
    assert os.path.samestat(os.fstat(held.lock_fd), (output / names.LEASE_LOCK).stat())
    held.release()


def test_a_living_holder_is_named(tmp_path):
    machine = FakeMachine()
    machine.processes[4242] = 77
    left_by(tmp_path)
    with pytest.raises(LeaseError, match="run other-run, pid 4242 on node-a") as caught:
        acquire(tmp_path, "mine", machine=machine)
    assert not isinstance(caught.value, LeaseBusyError)
    assert caught.value.exit_code == 6


def test_this_process_cannot_take_a_folder_twice(tmp_path):
    held = acquire(tmp_path, "one", machine=FakeMachine())
    with pytest.raises(LeaseError, match="run one"):
        acquire(tmp_path, "two", machine=FakeMachine())
    assert read_lease(tmp_path) == held.record
    held.release()


@pytest.mark.parametrize(
    "changes",
    [{}, {"boot_id": "boot-0"}, {"heartbeat_utc": 0.0}],
    ids=["dead pid", "other boot", "dead pid, old heartbeat"],
)
def test_a_holder_that_cannot_be_alive_is_taken_over(tmp_path, changes):
    left_by(tmp_path, **changes)
    held = acquire(tmp_path, "mine", machine=FakeMachine())
    assert read_lease(tmp_path) == held.record
    held.release()


def test_a_pid_that_was_given_to_another_process_is_not_the_holder(tmp_path):
    machine = FakeMachine()
    machine.processes[4242] = 9999
    left_by(tmp_path)
    acquire(tmp_path, "mine", machine=machine).release()


def test_a_pid_that_runs_on_another_boot_is_not_the_holder(tmp_path):
    machine = FakeMachine(boot="boot-2")
    machine.processes[4242] = 77
    left_by(tmp_path)
    acquire(tmp_path, "mine", machine=machine).release()


def test_a_fresh_heartbeat_from_another_node_is_respected(tmp_path):
    left_by(tmp_path, host="node-b", boot_id="boot-9")
    with pytest.raises(LeaseError, match="run is on node node-b"):
        acquire(tmp_path, "mine", machine=FakeMachine())


def test_a_clock_that_is_behind_does_not_make_another_node_stale(tmp_path):
    left_by(tmp_path, host="node-b", heartbeat_utc=5000.0)
    with pytest.raises(LeaseError, match="run is on node node-b"):
        acquire(tmp_path, "mine", machine=FakeMachine())


def test_another_node_that_was_silent_for_too_long_is_taken_over(tmp_path):
    left_by(tmp_path, host="node-b", heartbeat_utc=1000.0 - 121)
    acquire(tmp_path, "mine", machine=FakeMachine()).release()


def test_a_silent_node_that_still_holds_the_lock_is_not_taken_over(tmp_path):
    left_by(tmp_path, host="node-b", heartbeat_utc=0.0)
    fd = lock_of_somebody(tmp_path)
    with pytest.raises(LeaseError, match="run is on node node-b"):
        acquire(tmp_path, "mine", machine=FakeMachine())
    os.close(fd)


def test_a_worker_that_outlives_its_holder_is_busy(tmp_path):
    left_by(tmp_path)
    fd = lock_of_somebody(tmp_path)
    with pytest.raises(LeaseBusyError, match="its worker finishes a shard") as caught:
        acquire(tmp_path, "mine", machine=FakeMachine())
    assert caught.value.exit_code == 75
    os.close(fd)


def test_waiting_ends_when_the_worker_is_through(tmp_path):
    left_by(tmp_path)
    fd = lock_of_somebody(tmp_path)
    machine = FakeMachine()
    machine.on_wait = lambda: machine.waited >= 2 and os.close(fd) if machine.waited == 2 else None
    acquire(tmp_path, "mine", machine=machine, wait_seconds=60).release()
    assert machine.waited == 2


def test_waiting_ends_at_the_deadline(tmp_path):
    left_by(tmp_path)
    fd = lock_of_somebody(tmp_path)
    machine = FakeMachine()
    with pytest.raises(LeaseBusyError):
        acquire(tmp_path, "mine", machine=machine, wait_seconds=3)
    assert machine.waited == 3
    os.close(fd)


def test_nobody_waits_for_a_living_holder(tmp_path):
    machine = FakeMachine()
    machine.processes[4242] = 77
    left_by(tmp_path)
    with pytest.raises(LeaseError):
        acquire(tmp_path, "mine", machine=machine, wait_seconds=60)
    assert machine.waited == 0


def test_a_lock_without_a_lease_is_a_run_that_just_starts(tmp_path):
    fd = lock_of_somebody(tmp_path)
    with pytest.raises(LeaseBusyError, match="just starting or ending"):
        acquire(tmp_path, "mine", machine=FakeMachine())
    os.close(fd)


def test_a_refused_run_leaves_the_lock_to_others(tmp_path):
    left_by(tmp_path, host="node-b")
    with pytest.raises(LeaseError):
        acquire(tmp_path, "mine", machine=FakeMachine())
    (tmp_path / names.LEASE).unlink()
    acquire(tmp_path, "mine", machine=FakeMachine()).release()


def test_a_lease_that_says_nothing_is_replaced(tmp_path):
    (tmp_path / names.LEASE).write_bytes(b"{")
    acquire(tmp_path, "mine", machine=FakeMachine()).release()


def test_the_heartbeat_moves_and_keeps_the_rest(tmp_path):
    machine = FakeMachine()
    held = acquire(tmp_path, "mine", machine=machine)
    machine.time = 1030.0
    held.heartbeat()
    assert read_lease(tmp_path) == msgspec.structs.replace(held.record, heartbeat_utc=1030.0)
    held.release()


def test_a_lease_that_was_taken_over_is_neither_refreshed_nor_removed(tmp_path):
    held = acquire(tmp_path, "mine", machine=FakeMachine())
    other = left_by(tmp_path, host="node-b")
    with pytest.raises(LeaseError, match="taken over") as caught:
        held.heartbeat()
    assert caught.value.code == "lease_lost"
    held.release()
    assert read_lease(tmp_path) == other


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_heartbeat_decides(tmp_path):
    held = acquire(tmp_path, "mine", machine=FakeMachine())
    assert held.lock_fd is None
    with pytest.raises(LeaseError, match="run mine"):
        acquire(tmp_path, "other", machine=FakeMachine())
    held.release()
    acquire(tmp_path, "other", machine=FakeMachine()).release()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_worker_that_was_named_keeps_the_folder(tmp_path):
    machine = FakeMachine()
    machine.processes |= {4242: 77, 4243: 78}
    held = acquire(tmp_path, "mine", machine=machine)
    held.add_worker(4243)
    del machine.processes[os.getpid()]
    with pytest.raises(LeaseBusyError):
        acquire(tmp_path, "other", machine=machine)
    del machine.processes[4243]
    acquire(tmp_path, "other", machine=machine).release()


def test_a_folder_that_may_not_be_written_is_an_access_error(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(lease.os, "open", refuse)
    with pytest.raises(AccessError, match="Permission denied") as caught:
        acquire(tmp_path, "mine", machine=FakeMachine())
    assert caught.value.exit_code == 5


def test_a_file_system_that_fails_while_locking_is_named(tmp_path, monkeypatch):
    def fail(_fd, _operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(lease.fcntl, "flock", fail)
    with pytest.raises(StoreError, match=r"lease\.lock: cannot be locked: Input/output error"):
        acquire(tmp_path, "mine", machine=FakeMachine())


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be written"):
        acquire(tmp_path / "out", "mine", machine=FakeMachine())


def test_the_real_machine_knows_this_process():
    machine = RealMachine()
    assert is_alive(machine, own_identity(machine))
    assert not is_alive(machine, ProcessIdentity(os.getpid(), 1))
    assert machine.start_ticks(2**22 + 1) is None
    assert machine.boot_id()
    assert machine.host()
