import tomllib

import pytest

from extractor import config as configs
from extractor.commands.start import as_toml

TREES = {
    "small": {"model": {"path": "/m"}, "data": {"files": ["/d.jsonl"]}, "output": {"dir": "/o"}},
    "all": {
        "model": {
            "path": "hub/id",
            "revision": "main",
            "dtype": "bfloat16",
            "device": "cuda",
            "mem_fraction": 0.8,
            "attention_backend": "fa3",
            "sglang": {"page_size": 1, "nested": {"a": [1, 2.5, "x"]}, "flag": True},
        },
        "data": {
            "files": ['/a "quoted" name.jsonl', "/b.jsonl"],
            "template_args": {"enable_thinking": False},
            "mask": {"turns": "last"},
            "max_len": 100,
            "limit": 5,
            "seed": 3,
        },
        "taps": {"layers": [1, 2], "embed": True},
        "output": {"dir": "/o", "reserve_bytes": 0},
        "batch": {"max_tokens": 512},
        "nccl": {"preset": "pcie-blackwell", "env": {"NCCL_DEBUG": "INFO"}},
    },
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_configuration_survives_the_run_folder(tree):
    config = configs.build(tree, source="test")

    assert configs.build(tomllib.loads(as_toml(config)), source="run.toml") == config
