"""Runs of the product in this process; the worker is a real process with real SGLang on the CPU."""

import io

import pytest

from extractor import config as configs
from extractor.commands import extract as extraction
from extractor.commands.output import Output
from tests.support import small_models


@pytest.fixture(autouse=True, scope="session")
def own_folders(tmp_path_factory):
    """Run folders and prepared data sets of the tests stay out of the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A function that makes a small model once: kind, dtype -> folder."""
    made = {}

    def make(kind, dtype="float32"):
        if (kind, dtype) not in made:
            made[kind, dtype] = small_models.make(tmp_path_factory.mktemp(f"{kind}-{dtype}"), kind, dtype)
        return made[kind, dtype]

    return make


@pytest.fixture
def talks(tmp_path):
    """A function that writes conversations: lengths -> file."""
    return lambda lengths, name="talks.jsonl": small_models.conversations(tmp_path / name, list(lengths))


@pytest.fixture
def extract():
    """A function that runs the product: tree of run.toml, launcher -> (result, text shown)."""

    def run(tree, launcher=None):
        text = io.StringIO()
        out = Output(as_json=False, stdout=text, stderr=text)
        config = configs.build(tree, source="test")
        try:
            result = extraction.extract(config, out=out, stop=extraction.StopSignals(), launcher=launcher)
        except BaseException as error:
            error.add_note(text.getvalue()[-3000:])
            raise
        return result, text.getvalue()

    return run
