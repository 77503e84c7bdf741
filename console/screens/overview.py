"""The overview: everything an operator must know in five seconds. Draws views, asks for nothing itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from textual.containers import Container

from console.screens.base import RunScreen
from console.widgets import machine_panels, run_panels, work_panels
from console.widgets.key_line import key_line
from console.widgets.panel import Panel
from console.widgets.view_panel import FilledPanel, ViewPanel

if TYPE_CHECKING:
    from textual.app import ComposeResult


class OverviewScreen(RunScreen):
    """State, progress, disk, GPUs, shards and events of one run."""

    CSS_PATH = Path(__file__).with_name("overview.tcss")

    def compose(self) -> ComposeResult:
        """The panels, in the order of importance: the narrow layout shows them so."""
        ascii_only = self.signs.ascii_only
        yield ViewPanel(run_panels.header, id="header", ascii_only=ascii_only)
        yield ViewPanel(run_panels.reason, id="reason", ascii_only=ascii_only)
        with Container(id="upper"):
            yield ViewPanel(run_panels.progress, id="progress", ascii_only=ascii_only)
            yield ViewPanel(machine_panels.disk, id="disk", ascii_only=ascii_only)
        yield ViewPanel(machine_panels.gpus, id="gpus", ascii_only=ascii_only)
        yield ViewPanel(machine_panels.nccl, id="nccl", ascii_only=ascii_only)
        with Container(id="lower"):
            yield FilledPanel(work_panels.shards, id="shards", ascii_only=ascii_only)
            yield FilledPanel(work_panels.events, id="events", ascii_only=ascii_only)
        yield ViewPanel(run_panels.taps, id="taps", ascii_only=ascii_only)
        yield Panel(id="notice", ascii_only=ascii_only)
        yield ViewPanel(key_line, id="keys", ascii_only=ascii_only)
