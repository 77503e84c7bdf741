"""Times of the supervisor that let a lost wake-up be seen, and do not let a test wait."""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from extractor.supervisor import core, engine_control, lease_keeper


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than any deadline of a test: what is not woken stands still.
    monkeypatch.setattr(core, "POLL_S", 60.0)
    monkeypatch.setattr(core, "BACKOFF_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(lease_keeper, "LEASE_POLL_S", 0.01)
    # The death of a thread cannot be noticed in any other way.
    monkeypatch.setattr(engine_control, "LISTEN_S", 0.01)


@pytest.fixture(autouse=True, scope="session")
def quick_collections() -> Iterator[None]:
    """Each run is looked through for errors that nobody retrieved; not all the libraries with it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        yield Path(name)
