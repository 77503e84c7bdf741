"""Who a user and a process is."""

import os
import pwd

from extractor.processes import user_name


def test_a_user_is_called_by_name_and_one_without_a_name_by_number(monkeypatch):
    known = {os.getuid(): pwd.struct_passwd(("ops1", "x", os.getuid(), 0, "", "/", "/bin/sh"))}
    # As the C library does it: a KeyError for whom it does not know.
    monkeypatch.setattr(pwd, "getpwuid", known.__getitem__)
    assert user_name(os.getuid()) == "ops1"
    assert user_name(os.getuid() + 1) == f"uid {os.getuid() + 1}"
