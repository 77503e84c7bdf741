"""Panels of the machine: GPUs, or why there are none, processor and memory, the disk and its forecast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from console import words
from console.widgets.lines import Line, Role, Span, fitted, line
from console.widgets.signs import bar
from console.widgets.view import MISSED_INTERVALS, View, age_of, age_words, facts, title
from extractor.protocol.api import Unavailable
from extractor.quantities import bytes_words, duration_words

if TYPE_CHECKING:
    from extractor.protocol.api import Disk, Gpu, Host, ReplicaInfo, Snapshot, Telemetry

NARROW_GPUS = 8
BAR_CELLS = 8
NARROW_MODEL_CELLS = 30
_BRANDS = ("NVIDIA ",)


def gpus(view: View, width: int) -> list[Line]:
    """One row per GPU; without any, why, and the processors instead."""
    snapshot = view.snapshot
    if snapshot is None or snapshot.telemetry is None:
        return [title("GPUs", width, view.signs), line((" not read yet", "dim"))]
    telemetry = snapshot.telemetry
    age = age_of(view, telemetry.sampled_utc, telemetry.interval_s)
    if isinstance(telemetry.gpus, Unavailable):
        return [
            title("Machine", width, view.signs, right=age),
            line(
                (
                    f" no GPU to show: {words.unavailable_words(telemetry.gpus)}",
                    "warn" if _wants_gpu(snapshot) else "",
                )
            ),
            _host(view, telemetry.host),
            *_replicas(view, snapshot.replicas),
        ]
    models = line((_models(telemetry.gpus), "dim"))
    if not view.wide:
        models = fitted(models, NARROW_MODEL_CELLS, more=view.signs.more)
    middle = (*models, *line((_preset(view, snapshot), "dim")))
    shown = telemetry.gpus if view.wide else telemetry.gpus[:NARROW_GPUS]
    rows = [_gpu(view, gpu, telemetry) for gpu in shown]
    if len(shown) < len(telemetry.gpus):
        rows[-1] = line(
            (f" {len(telemetry.gpus) - len(shown) + 1} more GPUs: a taller terminal shows them", "dim")
        )
    below = [_host(view, telemetry.host), *_replicas(view, snapshot.replicas)] if view.wide else []
    return [title("GPUs", width, view.signs, middle=middle, right=age), *rows, *below]


def _wants_gpu(snapshot: Snapshot) -> bool:
    return snapshot.run.device.startswith("cuda")


def _models(gpus: tuple[Gpu, ...]) -> str:
    names = list(dict.fromkeys(gpu.name for gpu in gpus))
    short = names[0] if len(names) == 1 else f"{len(names)} models"
    for brand in _BRANDS:
        short = short.removeprefix(brand)
    return f"{len(gpus)} x {short}"


def _preset(view: View, snapshot: Snapshot) -> str:
    return f"{view.signs.dot}NCCL {snapshot.run.nccl_preset}" if snapshot.run.nccl_preset != "none" else ""


def _gpu(view: View, gpu: Gpu, telemetry: Telemetry) -> Line:
    rank = f"r{gpu.rank}" if gpu.rank else "-"
    busy = gpu.busy_percent
    share = 0.0 if isinstance(busy, Unavailable) else busy / 100
    percent = f"{_number(busy)} %"
    memory = f"{_gigabytes(gpu.memory_used_bytes)}/{_gigabytes(gpu.memory_total_bytes)} GB"
    limit = f"/{_number(gpu.power_limit_watts)}" if view.wide else ""
    power = f"{_number(gpu.power_watts)}{limit} W"
    heat = f"{_number(gpu.temperature_celsius)} {view.signs.degree}"
    wide = 2 if view.wide else 0
    return line(
        f" {gpu.index:>2} {rank:<5}",
        (bar(share, BAR_CELLS + 4 * wide, view.signs), "good" if gpu.rank else "dim"),
        f"{percent:>6}{' ' * wide}",
        f"{memory:>16}{' ' * wide}",
        f"{power:>{12 if view.wide else 8}}{' ' * wide}",
        f"{heat:>7}  ",
        _note(view, gpu, telemetry),
    )


def _note(view: View, gpu: Gpu, telemetry: Telemetry) -> Span:
    age_s = view.now_utc - gpu.sampled_utc
    if not view.is_stale and age_s > MISSED_INTERVALS * telemetry.interval_s:
        return Span(f"{view.signs.warning} STALE {age_words(age_s).removesuffix(' ago')}", "warn")
    missing = next(
        (
            f"{what}: {words.unavailable_words(value)}"
            for what, value in (
                ("busy", gpu.busy_percent),
                ("memory", gpu.memory_used_bytes),
                ("power", gpu.power_watts),
            )
            if isinstance(value, Unavailable)
        ),
        "",
    )
    if missing:
        return Span(f"{view.signs.warning} {missing}", "warn")
    return Span("" if gpu.rank else "not of this run", "dim")


def _number(value: float | Unavailable) -> str:
    return "?" if isinstance(value, Unavailable) else f"{value:.0f}"


def _gigabytes(value: float | Unavailable) -> str:
    return "?" if isinstance(value, Unavailable) else f"{value / 1e9:.1f}"


def _host(view: View, host: Host | Unavailable) -> Line:
    if isinstance(host, Unavailable):
        return line((f" processors: {words.unavailable_words(host)}", "dim"))
    memory = f"{bytes_words(host.memory_used_bytes)} of {bytes_words(host.memory_total_bytes)}"
    processors = f"CPU {host.cpu_percent:.0f} % of {host.num_cpus}"
    return (Span(" "), *facts(view, processors, f"load {host.load_1m:.1f}", f"memory {memory}"))


def _replicas(view: View, replicas: tuple[ReplicaInfo, ...]) -> list[Line]:
    shown = [replica for replica in replicas if replica.phase != "none"][:2]
    rows = [
        (
            Span(" "),
            *facts(
                view,
                f"replica {replica.name} {replica.phase}",
                f"pid {replica.pid}" if replica.pid else "",
                f"shard {replica.shard:,}" if replica.shard is not None else "",
                (f"restarted {replica.restarts} times", "warn") if replica.restarts else "",
                f"loaded in {duration_words(replica.load_s)}" if replica.load_s else "",
            ),
        )
        for replica in shown
    ]
    if len(replicas) > 2:
        rows.append(line((f" {len(shown)} of {len(replicas)} replicas", "dim")))
    return rows


def nccl(view: View, width: int) -> list[Line]:
    """What NCCL is told, and what of it came from the shell; nothing for a run without."""
    del width
    snapshot = view.snapshot
    variables = snapshot.run.environment if snapshot else ()
    if not view.wide or not variables:
        return []
    shown = ((f"{v.name.removeprefix('NCCL_')}={v.value}", v.origin) for v in variables)
    parts: list[tuple[str, Role]] = [
        (text if origin == "preset" else f"{text} ({origin})", "warn" if origin == "shell" else "dim")
        for text, origin in shown
    ]
    preset = f" NCCL preset {snapshot.run.nccl_preset}: " if snapshot else ""
    return [(Span(preset), *facts(view, *parts))]


def disk(view: View, width: int) -> list[Line]:
    """Used, free, needed, and whether that is enough."""
    snapshot = view.snapshot
    found = snapshot.disk if snapshot else None
    head = title(
        f"Disk {found.path}" if found and view.wide else "Disk", width, view.signs, right=age_of(view)
    )
    if found is None:
        return (
            [head, line((" not known yet", "dim"))] if view.wide else [line((" disk: not known yet", "dim"))]
        )
    if snapshot is None or snapshot.progress is None:
        # What the run needs and keeps free is not known yet: zeros would read like facts.
        return _unprepared(view, head, found)
    role: Role = "good" if found.is_enough else "bad"
    if not view.wide:
        return [
            (
                Span(" disk "),
                *facts(
                    view,
                    f"{bytes_words(found.free_bytes)} free",
                    f"needs {bytes_words(found.needed_bytes)}",
                    (found.verdict, role),
                ),
            )
        ]
    used = f"used {bytes_words(found.used_bytes)} of {bytes_words(found.total_bytes)}"
    return [
        head,
        (Span(" "), *facts(view, used, f"free {bytes_words(found.free_bytes)}")),
        (
            Span(" "),
            *facts(
                view,
                f"this run {bytes_words(found.run_bytes)}",
                f"needs {bytes_words(found.needed_bytes)} more",
            ),
        ),
        line(" ", (found.verdict, role)),
        line((f" {_full(found)}", "dim")),
    ]


def _unprepared(view: View, head: Line, found: Disk) -> list[Line]:
    free = f"{bytes_words(found.free_bytes)} free"
    if not view.wide:
        return [(Span(" disk "), *facts(view, free, (found.verdict, "dim")))]
    used = f"used {bytes_words(found.used_bytes)} of {bytes_words(found.total_bytes)}"
    return [head, (Span(" "), *facts(view, used, free)), line((f" {found.verdict}", "dim"))]


def _full(found: Disk) -> str:
    reserve = f"reserve {bytes_words(found.reserve_bytes)}: holds there"
    if found.full_in_s is None:
        return reserve
    return f"full in {duration_words(found.full_in_s)} at this rate; {reserve}"
