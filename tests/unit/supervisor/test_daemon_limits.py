"""How many files the supervisor may have open."""

import resource

import pytest

from extractor.supervisor import daemon

MANY = 1 << 20
UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to"),
    [
        (1024, 4096, 4096),
        (1024, MANY, 65_536),
        (1024, UNLIMITED, 65_536),
        (4096, 4096, 4096),
        (MANY, MANY, MANY),
        (UNLIMITED, UNLIMITED, UNLIMITED),
    ],
)
def test_the_limit_of_open_files_is_raised_and_never_lowered(monkeypatch, soft, hard, raised_to):
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    daemon._raise_descriptor_limit()
    assert limits[resource.RLIMIT_NOFILE] == (raised_to, hard)


def test_a_limit_that_may_not_be_raised_stays(monkeypatch):
    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    daemon._raise_descriptor_limit()
