"""`HiddenStatesGenerator`: token ids in, hidden states out, for programs that write files themselves.

The drop-in for `VllmHiddenStatesGenerator` of speculators 0.4.0.1 (its source is what names, defaults and errors here
were compared with). The engine runs in a process of its own, so nothing of SGLang or CUDA is in the caller's.

Shapes: S tokens of an input, K states per input, T tokens of a batch, H hidden size.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from functools import cached_property
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypedDict, cast, get_args

import torch

from extractor import checkpoint, families, preflight, sglang_args, taps, token_inputs
from extractor.config import DEFAULT_MAX_TOKENS, NCCL_PRESETS, NcclSection
from extractor.errors import (
    ArgumentError,
    BugError,
    ConfigError,
    GeneratorError,
    ModelNotFoundError,
    PreflightError,
)
from extractor.plan import Geometry
from extractor.protocol import Dtype, EngineSpec
from extractor.states_client import StatesClient
from extractor.supervisor.environment import worker_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt

    from extractor.checkpoint import Checkpoint
    from extractor.preflight import Device
    from extractor.taps import TapSelection

_log = logging.getLogger(__name__)

PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
MAX_SEQUENCES = 64
"""Inputs in one batch, at most: SGLang reserves memory for each, however short it is."""
HOST_BUFFERS = 3
"""In the engine's process, in full batches: the next one finds room wherever that lies which is handed over."""
TORCHRUN_VARIABLES = frozenset(
    f"{prefix}{name}" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")
) | {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
"""In them the caller is one of several processes; the engine would look for the others."""


class HiddenStates(TypedDict):
    """The result for one input.

    Attributes:
        input_ids: int64 [S], cut to `max_model_len - 1` tokens.
        hidden_states: [S, H] after each layer, in ascending order of the layers.
        loss_mask: None, for the caller to fill in.
    """

    input_ids: torch.Tensor
    hidden_states: list[torch.Tensor]
    loss_mask: None


class HiddenStatesGenerator:
    """Hidden states of chosen layers for token ids, by prefill alone.

    Example:
        generator = HiddenStatesGenerator("/models/Qwen3-8B", layer_ids=[2, 18, 33, 35])
        for result in generator.generate([[1, 2, 3], [4, 5]]):
            torch.save(result, ...)

    A layer id v means the residual stream after decoder layer v, before the next layer's norm; for the last layer,
    before the final norm. Loading ends with a proof that what is captured is that. Close the generator, or use it as a
    context manager, to free the GPU; that also happens when it is garbage collected, when the program ends, and when
    the program is killed. One call is computed at a time; further threads wait. A forked process cannot use it.

    What differs from the older class, on purpose:

    * Results are in the order of the inputs. There the eleventh and further ones of a call were not (they were
      sorted as strings).
    * "auto" is the dtype that config.json declares. There float32 models ran in a narrower one.
    * An empty tensor, an empty input, a token id outside the vocabulary and an empty list of layers are a
      ValueError. There they were other errors, or no error.
    * States that are not finite, or all zero, are a `GeneratorError` that names the inputs, unless `check_values` is
      false.
    * A selection without the last layer gives a warning: trainers take the last state of the list for the model's
      last one.
    * A model is a folder, or a hub id in the local cache: nothing is downloaded. `trust_remote_code` is false unless
      it is asked for.
    * A sequence is never split: a `max_num_batched_tokens` below its length counts as that length.

    As there, equal ids count once, inputs are cut to `max_model_len - 1` tokens, and the states are contiguous tensors
    on the CPU in the model's dtype, each with memory of its own.

    Attributes:
        model_path: as given.
        layer_ids: as given, or the default `[2, n//2, n-3, n-1]` for a model of n layers.
        tensor_parallel_size: as given.
        tokenizer: the model's, loaded by transformers when it is first asked for.
    """

    def __init__(  # noqa: PLR0917 -- as many may be given by position to the older class
        self,
        model_path: str | os.PathLike[str],
        layer_ids: Sequence[int] | None = None,
        max_model_len: int = 2048,
        gpu_memory_utilization: float = 0.8,
        tensor_parallel_size: int = 1,
        max_num_batched_tokens: int | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        attention_backend: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        nccl_preset: str = "none",
        nccl_env: Mapping[str, str] | None = None,
        sglang: Mapping[str, Any] | None = None,
        allow_unverified_sglang: bool = False,
        check_values: bool = True,
    ) -> None:
        """Loads the model and proves the capture; blocking, seconds to minutes.

        Args:
            model_path: folder of the model, or a hub id that is in the local cache.
            layer_ids: "after layer" ids, 0..n-1, in any order; None takes the default.
            max_model_len: inputs are cut to one token less.
            gpu_memory_utilization: upper bound on the share of GPU memory, over 0 and up to 1.
            tensor_parallel_size: GPUs over which each layer is split.
            max_num_batched_tokens: token budget of a batch; None takes 8192, or `max_model_len` where that is more.
            dtype: precision of computation and results: "auto", "bfloat16", "float16" or "float32".
            device: "auto", "cuda" or "cpu". Which GPU: CUDA_VISIBLE_DEVICES.
            attention_backend: of SGLang; None leaves the choice to it.
            trust_remote_code: run code that is in the model's folder.
            revision: branch, tag or commit of a hub id.
            nccl_preset: "none" or "pcie-blackwell", see `[nccl]` of run.toml.
            nccl_env: NCCL variables of the engine's process; they win over the preset and over the environment.
            sglang: further `ServerArgs` fields.
            allow_unverified_sglang: run on a SGLang release that was never verified.
            check_values: refuse results that are not finite, or all zero.

        Raises:
            ArgumentError: (a ValueError) an argument is wrong, or the model is not supported. Nothing was loaded.
            ModelNotFoundError: (also an OSError) there is no such model.
            GeneratorError: (a RuntimeError) the engine did not load the model, or its capture is not proven.
        """
        self.model_path = model_path
        self.tensor_parallel_size = tensor_parallel_size
        self._trust_remote_code = trust_remote_code
        self._check_values = check_values
        self._lock = threading.Lock()
        _check_parallel(tensor_parallel_size)
        self._max_len = _max_len(max_model_len)
        model = _read_model(os.fspath(model_path), revision, max_model_len)
        self._folder = model.folder
        self.layer_ids = default_layer_ids(model.num_layers) if layer_ids is None else [*layer_ids]
        budget = _budget(max_num_batched_tokens, max_model_len)
        spec = EngineSpec(
            model_folder=str(model.folder),
            trust_remote_code=trust_remote_code,
            allow_unverified_sglang=allow_unverified_sglang,
            dtype=_dtype(dtype, model),
            device=_device(device),
            attention_backend=attention_backend,
            mem_fraction=_mem_fraction(gpu_memory_utilization),
            sglang_args=_sglang_args(sglang or {}),
            taps=select_taps(self.layer_ids, model.num_layers),
            hidden_size=model.hidden_size,
            store_dtype=_dtype(dtype, model),
            # No shards here: the second figure is the longest input.
            geometry=Geometry(max_tokens=budget, shard_tokens=self._max_len),
            max_batch_samples=min(MAX_SEQUENCES, budget),
            prepared="",
            num_samples=0,
            output="",
            fingerprint="",
            replica="0",
            writer_threads=1,
            buffers=HOST_BUFFERS,
            endpoint="",
        )
        self._spec = spec
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._client = _start(spec, self._dtype, _nccl(nccl_preset, nccl_env or {}))
        # Also at the end of the program, and when the rest of this fails.
        self._finalizer = weakref.finalize(self, self._client.close)
        try:
            ready = self._client.wait_until_ready()
        except BaseException as error:
            self._finalizer()
            if isinstance(error, GeneratorError) and error.exit_code == ArgumentError.exit_code:
                # What only the installed SGLang can tell, for example a setting that it does not have.
                raise ArgumentError(error.message, remedy=error.remedy, code=error.code) from error
            raise
        _log.info(
            "%s: %d states per token, %s on %s, loaded in %.1f s",
            model.folder,
            len(spec.taps.taps),
            spec.dtype,
            spec.device,
            ready.load_s,
        )

    def generate(self, token_ids: Sequence[Sequence[int]] | torch.Tensor) -> list[HiddenStates]:
        """The hidden states of all inputs.

        Inputs are packed into batches by their tokens, without padding. What is held besides the results does not
        grow with the number of inputs: the states of one batch, and of two more in the engine's process.

        Args:
            token_ids: token ids of each input, or a tensor [inputs, tokens] of any integer dtype on any device.

        Returns:
            One result per input, in the same order. The tensors stay valid after `close`.

        Raises:
            ArgumentError: (a ValueError) no input, an empty one, or a token id that is not in the vocabulary.
            TypeError: not sequences of integers.
            GeneratorError: (a RuntimeError) the engine failed or died, and the generator cannot be used any more; it is
                closed, or of another process; or the states of some inputs cannot be used.
        """
        self._client.require_usable()
        sequences = token_inputs.as_sequences(
            token_ids, max_tokens=self._max_len, vocab_size=self._client.vocab_size
        )
        with self._lock:
            return self._generate(sequences)

    def close(self) -> None:
        """Ends the engine and frees its memory. Any number of times."""
        self._finalizer()

    def __enter__(self) -> Self:
        """The generator itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            self._folder, local_files_only=True, trust_remote_code=self._trust_remote_code
        )

    def _generate(self, sequences: Sequence[npt.NDArray[np.int32]]) -> list[HiddenStates]:
        batches = list(
            token_inputs.pack(
                [len(ids) for ids in sequences],
                max_tokens=self._spec.geometry.max_tokens,
                max_sequences=self._spec.max_batch_samples,
            )
        )
        results: list[HiddenStates | None] = [None] * len(sequences)
        refused: dict[int, str] = {}
        computed = self._client.compute([[sequences[i] for i in batch] for batch in batches])
        for batch, report in zip(batches, computed, strict=True):
            lengths = [len(sequences[i]) for i in batch]
            if report.num_tokens != sum(lengths) or len(report.verdicts) != len(batch):
                raise BugError(f"{report.num_tokens} rows came back of {sum(lengths)} tokens")
            states_KTH = self._view(report.num_tokens)
            rows = torch.split(states_KTH, lengths, dim=1)
            for i, verdict, rows_KSH in zip(batch, report.verdicts, rows, strict=True):
                results[i] = {
                    "input_ids": torch.from_numpy(sequences[i]).long(),
                    "hidden_states": [state_SH.clone() for state_SH in rows_KSH],
                    "loss_mask": None,
                }
                if verdict is not None:
                    refused[i] = verdict
        if refused and self._check_values:
            _refuse(refused)
        return [_present(result) for result in results]

    def _view(self, num_tokens: int) -> torch.Tensor:
        """The states of the batch in hand, [K, T, H]; valid until the next one."""
        shape = len(self._spec.taps.taps), num_tokens, self._spec.hidden_size
        count = shape[0] * shape[1] * shape[2]
        return torch.frombuffer(self._client.shared, dtype=self._dtype, count=count).view(shape)


def default_layer_ids(num_layers: int) -> list[int]:
    """What the older class takes when no layers are named, for a model of n layers."""
    return [2, num_layers // 2, num_layers - 3, num_layers - 1]


def select_taps(layer_ids: Sequence[int], num_layers: int) -> TapSelection:
    """The taps of "after layer" ids in any order; equal ones count once.

    Raises:
        ArgumentError: there is none, or one is not a layer of the model.
        TypeError: an id is not an integer.
    """
    ids = sorted({index(layer) for layer in layer_ids})
    if not ids:
        raise ArgumentError("layer_ids is empty", remedy="name at least one layer", code="layer_out_of_range")
    for layer in ids:
        if not 0 <= layer < num_layers:
            raise ArgumentError(
                f"Layer index {layer} out of bounds [0, {num_layers - 1}]",
                remedy="choose layer_ids in these bounds; left out, they are [2, n//2, n-3, n-1] for n layers",
                code="layer_out_of_range",
            )
    if ids[-1] != num_layers - 1:
        warnings.warn(
            f"layer_ids ends with {ids[-1]}, the model's last layer is {num_layers - 1}: trainers that take the last "
            "state of a sample for the model's last one would train on an inner layer",
            stacklevel=3,
        )
    return taps.select(
        num_layers=num_layers, layers=ids, embed=False, final=False, normed=False, convention="after"
    )


def _check_parallel(tensor_parallel_size: int) -> None:
    """The one place that decides how many ranks an engine may have."""
    if tensor_parallel_size != 1:
        raise ArgumentError(
            f"tensor_parallel_size = {tensor_parallel_size}: this version runs one process per model",
            remedy="set tensor_parallel_size to 1",
            code="unsupported_parallel",
        )


def _max_len(max_model_len: int) -> int:
    """Longest input in tokens: the older class kept room for one token to generate."""
    if index(max_model_len) < 2:
        raise ArgumentError(
            f"max_model_len = {max_model_len}: inputs are cut to one token less, and have at least one",
            remedy="set it to 2 or more",
        )
    return max_model_len - 1


def _budget(max_num_batched_tokens: int | None, max_model_len: int) -> int:
    if max_num_batched_tokens is not None and index(max_num_batched_tokens) < 0:
        raise ArgumentError(
            f"max_num_batched_tokens = {max_num_batched_tokens}", remedy="set it to a number of tokens"
        )
    # As there, 0 counts as not given.
    return max(max_num_batched_tokens or DEFAULT_MAX_TOKENS, max_model_len)


def _mem_fraction(gpu_memory_utilization: float) -> float:
    if not 0 < gpu_memory_utilization <= 1:
        raise ArgumentError(
            f"gpu_memory_utilization = {gpu_memory_utilization}: a share is over 0 and at most 1",
            remedy="set it to 0.8, for example",
        )
    return gpu_memory_utilization


def _read_model(path: str, revision: str | None, max_model_len: int) -> Checkpoint:
    try:
        model = checkpoint.read(checkpoint.resolve(path, revision))
        families.family_of(model.architecture)
    except PreflightError as error:
        kind = ModelNotFoundError if error.code in ("model_not_found", "model_not_cached") else ArgumentError
        raise kind(error.message, remedy=error.remedy, code=error.code) from error
    longest = model.max_position_embeddings
    if longest is not None and max_model_len > longest:
        raise ArgumentError(
            f"max_model_len = {max_model_len}: the model has positions for {longest} tokens",
            remedy=f"set max_model_len to at most {longest}",
        )
    return model


def _dtype(wanted: str | torch.dtype, model: Checkpoint) -> Dtype:
    name = str(wanted).removeprefix("torch.")
    resolved = (model.dtype or "bfloat16") if name == "auto" else name
    if resolved not in get_args(Dtype):
        where = (
            f"{model.folder}: config.json declares dtype {resolved}" if name == "auto" else f"dtype = {name}"
        )
        raise ArgumentError(
            f"{where}, which is not supported", remedy=f"set dtype to one of {', '.join(get_args(Dtype))}"
        )
    return cast("Dtype", resolved)  # narrowed by the line above, which mypy cannot see


def _device(wanted: str) -> Device:
    if wanted == "auto":
        return preflight.local_device()
    if wanted not in ("cuda", "cpu"):
        raise ArgumentError(
            f"device = {wanted}",
            remedy='set it to "auto", "cuda" or "cpu"; choose GPUs by CUDA_VISIBLE_DEVICES',
        )
    return cast("Device", wanted)  # narrowed by the line above, which mypy cannot see


def _sglang_args(args: Mapping[str, Any]) -> dict[str, Any]:
    try:
        sglang_args.check(args)
    except ConfigError as error:
        raise ArgumentError(error.message, remedy=error.remedy, code=error.code) from error
    return dict(args)


def _nccl(preset: str, env: Mapping[str, str]) -> NcclSection:
    if preset not in NCCL_PRESETS:
        raise ArgumentError(f"nccl_preset = {preset}", remedy=f"set it to one of {', '.join(NCCL_PRESETS)}")
    for name in env:
        if not name.startswith("NCCL_"):
            raise ArgumentError(f"nccl_env: {name} is no NCCL variable (they start with NCCL_)")
    return NcclSection.model_validate({"preset": preset, "env": {k: str(v) for k, v in env.items()}})


def _start(spec: EngineSpec, dtype: torch.dtype, nccl: NcclSection) -> StatesClient:
    import msgspec

    shell = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    environment, _ = worker_environment(shell, nccl, device=spec.device, package_root=PACKAGE_ROOT)
    return StatesClient(
        lambda endpoint: msgspec.structs.replace(spec, endpoint=endpoint),
        environment=environment,
        shared_bytes=len(spec.taps.taps) * spec.geometry.max_tokens * spec.hidden_size * dtype.itemsize,
    )


def _refuse(refused: Mapping[int, str]) -> NoReturn:
    shown = ", ".join(f"{i} ({reason})" for i, reason in sorted(refused.items())[:10])
    raise GeneratorError(
        f"the states of {len(refused)} inputs cannot be used: {shown}"
        + (" ..." if len(refused) > 10 else ""),
        remedy="leave these inputs out, compute in a wider dtype, or pass check_values=False to get them as they are",
        code="bad_values",
    )


def _present(result: HiddenStates | None) -> HiddenStates:
    if result is None:
        raise BugError("an input is in no batch")
    return result
