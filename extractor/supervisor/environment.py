"""The environment a rank is started with, and where each of its NCCL and CUDA variables comes from.

Pure. A variable in run.toml wins over the preset, and both win over the shell. What was inherited from the
shell is kept, but listed, since it changes the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from extractor.config import NCCL_PRESETS
from extractor.protocol.api import Variable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extractor.config import NcclSection

Origin = Literal["shell", "preset", "run.toml"]
WATCHED_PREFIXES = ("NCCL_", "CUDA_", "SGLANG_", "TORCH_NCCL_")


def worker_environment(
    shell: Mapping[str, str],
    nccl: NcclSection,
    *,
    device: str,
    package_root: str,
    gpus: Sequence[int] | None = None,
) -> tuple[dict[str, str], list[Variable]]:
    """The full environment of a rank, and the variables to show and record.

    Args:
        shell: the environment of the command.
        nccl: `[nccl]` of run.toml.
        device: where the model runs.
        package_root: folder that holds the `extractor` package; a rank must import this very one.
        gpus: `model.gpus`; None: those that the shell lets one see.
    """
    origins: dict[str, Origin] = {name: "shell" for name in shell if name.startswith(WATCHED_PREFIXES)}
    environment = dict(shell)
    layers: tuple[tuple[Origin, Mapping[str, str]], ...] = (
        ("preset", NCCL_PRESETS[nccl.preset]),
        ("run.toml", nccl.env | _visible(gpus)),
    )
    for origin, values in layers:
        environment |= values
        origins |= dict.fromkeys(values, origin)
    # The model is a local folder, always: nothing may ask a hub.
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        # Threads that spin at the barrier of every layer starve each other as soon as something else runs:
        # beside two busy processes on two cores, 84 tokens/s with spinning and 302 without.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    inherited = [path for path in shell.get("PYTHONPATH", "").split(":") if path and path != package_root]
    environment["PYTHONPATH"] = ":".join([*inherited, package_root])
    listed = [Variable(name, environment[name], origin) for name, origin in sorted(origins.items())]
    return environment, listed


def _visible(gpus: Sequence[int] | None) -> dict[str, str]:
    if gpus is None:
        return {}
    # Without the order CUDA counts the fastest GPU first, and nvidia-smi by bus.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
