import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from extractor.errors import LeaseError
from extractor.folders import RunFolder
from extractor.protocol import api
from extractor.supervisor import place as module
from extractor.supervisor.place import Place


def listen(path):
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    return server


def test_a_second_supervisor_is_told_where_the_first_is(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.0)
    folder = RunFolder(tmp_path)
    with Place(folder) as first:
        with listen(first.socket), listen(first.readonly_socket):
            first.announce()
        with pytest.raises(LeaseError, match=f"already running: pid {os.getpid()} on ") as refused:
            Place(folder)

    assert refused.value.exit_code == 6
    assert refused.value.code == "already_running"


def test_the_lock_is_free_again_when_its_holder_was_killed(tmp_path):
    program = f"""
import sys
from pathlib import Path
from extractor.folders import RunFolder
from extractor.supervisor.place import Place
place = Place(RunFolder(Path({str(tmp_path)!r})))
print("locked", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"locked\n"
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()

    with Place(RunFolder(tmp_path)):
        pass


def test_what_a_dead_supervisor_left_is_removed_by_the_next(tmp_path):
    folder = RunFolder(tmp_path)
    with Place(folder) as dead:
        left = dead.socket
    listen(left).close()
    folder.supervisor.write_text("{}")

    with Place(folder) as place:
        assert not folder.supervisor.exists()
        with listen(place.socket):
            pass


def test_a_socket_that_somebody_else_made_in_the_meantime_stays(tmp_path):
    with Place(RunFolder(tmp_path)) as place:
        ours = [listen(place.socket), listen(place.readonly_socket)]
        place.announce()
        place.socket.unlink()
        theirs = listen(place.socket)
    for server in [*ours, theirs]:
        server.close()

    assert place.socket.exists()
    assert not place.readonly_socket.exists()


def test_a_run_folder_with_a_long_path_gets_a_short_socket_that_it_names(tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    with Place(RunFolder(deep)) as place:
        with listen(place.socket), listen(place.readonly_socket):
            place.announce()
        record = msgspec.json.decode(RunFolder(deep).supervisor.read_bytes(), type=api.SupervisorRecord)
        assert len(os.fsencode(record.socket)) <= module.MAX_SOCKET_PATH_BYTES
        assert record.socket == str(place.socket)

    assert not place.socket.parent.exists()


def test_of_many_that_come_at_once_one_gets_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.0)
    winners, losers = [], []
    barrier = threading.Barrier(8)

    def come():
        barrier.wait()
        try:
            winners.append(Place(RunFolder(tmp_path)))
        except LeaseError as error:
            losers.append(error)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners[0].__exit__(None, None, None)

    assert (len(winners), len(losers)) == (1, 7)


def test_a_lock_file_that_was_removed_under_a_living_supervisor_lets_nobody_in(tmp_path):
    program = f"""
import socket, sys
from pathlib import Path
from extractor.folders import RunFolder
from extractor.supervisor.place import Place
place = Place(RunFolder(Path({str(tmp_path)!r})))
servers = []
for path in (place.socket, place.readonly_socket):
    servers.append(socket.socket(socket.AF_UNIX))
    servers[-1].bind(str(path))
place.announce()
print("there", flush=True)
sys.stdin.read()
"""
    folder = RunFolder(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"there\n"
        before = folder.supervisor.read_bytes()
        folder.lock.unlink()
        with pytest.raises(LeaseError, match=f"already running: pid {holder.pid} "):
            Place(folder)
        record = msgspec.json.decode(before, type=api.SupervisorRecord)
        assert folder.supervisor.read_bytes() == before
        assert Path(record.socket).exists()
        holder.kill()
