"""A desk with runs and command outcomes that a test gives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from console.desk import Outcome, RunRow
from console.feed import Heard
from tests.support import console_snapshots
from tests.support.fake_feed import FakeFeed

ESTIMATE = {
    "run": console_snapshots.NAME,
    "model": "moonshotai/Kimi-K2.5",
    "output": f"/data/{console_snapshots.NAME}",
    "device": "cuda",
    "dtype": "bfloat16",
    "samples": 15_000,
    "tokens": 30_000_000,
    "supervised_tokens": 21_000_000,
    "rejected": 12,
    "num_shards": 2_310,
    "shards_done": 0,
    "taps": ["layer_002", "layer_030", "layer_058", "final"],
    "ids_after": [2, 30, 58, 60],
    "ids_before": [3, 31, 59, 61],
    "bytes_per_token": 57_349,
    "total_bytes": 1_720_000_000_000,
    "needed_bytes": 1_720_000_000_000,
    "free_bytes": 2_310_000_000_000,
    "reserve_bytes": 100_000_000_000,
    "fits": True,
    "nccl_preset": "pcie-blackwell",
    "environment": [
        {"name": "NCCL_PROTO", "value": "LL", "origin": "preset"},
        {"name": "NCCL_DEBUG", "value": "INFO", "origin": "shell"},
    ],
}
STARTED = {"run": console_snapshots.NAME, "folder": f"/state/{console_snapshots.NAME}", "pid": 4411}


def as_output(found: dict[str, object]) -> Outcome:
    return Outcome(0, msgspec.json.encode(found), ())


def some_runs() -> list[RunRow]:
    return [
        RunRow("kimi-k25-eagle3", Path("/state/kimi"), is_live=True, snapshot=console_snapshots.running()),
        RunRow("glm-demo", Path("/state/glm"), is_live=False, snapshot=console_snapshots.failed()),
        RunRow("qwen-lost", Path("/state/qwen"), is_live=False, snapshot=console_snapshots.running()),
        RunRow("fresh", Path("/state/fresh"), is_live=True, snapshot=None),
    ]


@dataclass
class FakeDesk:
    """Attributes:
    outcomes: of the commands, in their order.
    asked: the commands that were run.
    opened: folders of the runs that were attached to.
    """

    rows: list[RunRow] = field(default_factory=some_runs)
    outcomes: list[Outcome] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    opened: list[Path] = field(default_factory=list)
    told: tuple[str, ...] = ()

    async def runs(self) -> list[RunRow]:
        return self.rows

    def open(self, path: Path) -> FakeFeed:
        self.opened.append(path)
        return FakeFeed(Heard(console_snapshots.running()))

    async def command(self, arguments, tell) -> Outcome:
        self.asked.append(tuple(arguments))
        for text in self.told:
            tell(text)
        return self.outcomes.pop(0)
