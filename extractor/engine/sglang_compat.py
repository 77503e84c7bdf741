"""The only module that knows how SGLang releases differ: loading, prefills, versions.

SGLang is driven the way `sglang.benchmark.one_batch` does it, without a scheduler. Everything is set
through public arguments and attributes, and what was set is read back. Nothing of SGLang is copied.

Verified: 0.5.23 on the CPU, 0.5.17 on CUDA. Other releases are refused unless the run says otherwise.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import sys
import types
from array import array
from importlib import metadata
from typing import TYPE_CHECKING, Any, NoReturn

from extractor import sglang_args
from extractor.engine.anatomy import Anatomy
from extractor.errors import BugError, ConfigError, EngineError
from extractor.families import VERIFIED_RELEASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    import torch

    from extractor.engine.lockstep import Lockstep
    from extractor.protocol import EngineSpec


PROOF_LENGTHS = (48, 33, 17)
"""Tokens of the sequences in the one batch of the start-up proof, at most."""
PROOF_CHUNKED_TOKENS = 450
"""Tokens of the sequence that the start-up proof computes in chunks, at most: longer than attention kernels' tiles."""


def versions() -> dict[str, str]:
    """Versions of what the states depend on, for dataset.json."""
    names = ("sglang", "torch", "transformers", "sglang-kernel", "flashinfer-python", "triton")
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_version(*, allow_unverified: bool) -> None:
    """Refuses a SGLang that was never verified.

    Raises:
        EngineError: not installed, or another release than those in `VERIFIED_RELEASES`.
    """
    installed = versions().get("sglang")
    if installed is None:
        raise EngineError(
            "SGLang is not installed", remedy="pip install sglang==0.5.23", code="sglang_missing"
        )
    if installed not in VERIFIED_RELEASES and not allow_unverified:
        raise EngineError(
            f"SGLang {installed} was never verified; verified are {' and '.join(sorted(VERIFIED_RELEASES))}",
            remedy="install one of these, or set model.allow_unverified_sglang = true and look at the proof",
            code="sglang_version",
        )


def prepare_process(device: str, *, rank: int = 0, tp: int = 1) -> None:
    """Sets what SGLang reads while it is imported. Call before anything imports it, or torch.

    Args:
        device: "cuda" or "cpu".
        rank: of this process within its replica.
        tp: ranks of the replica.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if device != "cpu":
        return
    if "sglang" in sys.modules:
        raise BugError("sglang was imported before prepare_process")
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if tp > 1:
        _share_processors(rank, tp)
    # The wheel's kernel library needs a CUDA driver to load. With this placeholder SGLang takes its
    # PyTorch paths; a call that would need a kernel raises and ends the run.
    placeholder = types.ModuleType("sgl_kernel")
    placeholder.__getattr__ = _missing_kernel  # type: ignore[method-assign]  # PEP 562 on an instance
    sys.modules["sgl_kernel"] = placeholder


def _share_processors(rank: int, tp: int) -> None:
    """Gives each rank processors of its own, and has the ranks talk through gloo."""
    available = sorted(os.sched_getaffinity(0))
    shares = [available[number::tp] or available for number in range(tp)]
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, own)) for own in shares))
    os.environ.setdefault("OMP_NUM_THREADS", str(len(shares[rank])))
    # With several ranks SGLang compiles parts of its embedding, which needs a C++ compiler and half a minute.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # SGLang would load NCCL beside gloo, which needs a driver; where it finds no library it does without.
    os.environ["SGLANG_NCCL_SO_PATH"] = "/nonexistent/no-nccl-on-the-cpu"


def _missing_kernel(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> NoReturn:
        raise EngineError(
            f"SGLang called the CUDA kernel {name} on the CPU",
            remedy="this model needs a GPU",
            code="cpu_kernel",
        )

    return kernel


def check_known(args: Mapping[str, Any]) -> None:
    """Refuses settings that the installed SGLang does not have.

    Raises:
        ConfigError: an unknown setting, with the nearest known ones.
    """
    known = _server_args_fields()
    for key in args:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            raise ConfigError(
                f"model.sglang.{key}: SGLang {versions().get('sglang')} has no such argument"
                + (f"; did you mean {' or '.join(near)}?" if near else ""),
                remedy="see `python -m sglang.launch_server --help`",
                code="sglang_setting",
            )


def _server_args_fields() -> list[str]:
    from sglang.srt.server_args import ServerArgs

    return [name for name in inspect.signature(ServerArgs).parameters if name != "self"]


class Runner:
    """A loaded SGLang `ModelRunner` and the two ways we run it: packed samples, and a long one in chunks.

    Attributes:
        model_runner: SGLang's `ModelRunner`.
        model: the loaded class, for example `LlamaForCausalLM`.
        anatomy: where its layers, norms and head are.
        vocab_size: ids of tokens are below it.
        settings: SGLang settings in force that change numbers, for dataset.json.
    """

    def __init__(self, spec: EngineSpec, rank: int, lockstep: Lockstep) -> None:
        """Loads the weights of one rank, when all ranks of the replica do.

        Args:
            spec: of the replica.
            rank: of this process; on CUDA also the number of its GPU among those that it can see.
            lockstep: the other ranks.

        Raises:
            ConfigError: SGLang has no such setting.
            EngineError: SGLang turned on what capture cannot live with.
        """
        import torch
        from sglang.benchmark import one_batch

        if spec.device == "cpu" and spec.tp > 1:
            # Also where torch was loaded before `prepare_process` could say so.
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
        self._one_batch = one_batch
        args = _server_args(spec)
        ports = _publish(args, rank)
        # One port for all: where the ranks meet. The leader's choice was free a moment ago.
        ports.nccl_port = lockstep.agree("the port where ranks meet", lambda: int(ports.nccl_port))
        one_batch._set_envs_and_config(args)  # noqa: SLF001 - what one_batch itself calls first
        bench_runner, _ = one_batch.load_model(args, ports, rank, rank)
        self.model_runner = bench_runner.torch_runner
        self.model: Any = self.model_runner.model
        self.anatomy = Anatomy(self.model)
        self.vocab_size = int(self.model_runner.model_config.vocab_size)
        self._page_size = _resolved(args, "page_size") or 1
        self.settings = {
            name: _resolved(args, name)
            for name in (
                "attention_backend",
                "prefill_attention_backend",
                "page_size",
                "quantization",
                "random_seed",
            )
        } | {"max_total_tokens": int(self.model_runner.max_total_num_tokens), **spec.sglang_args}
        self._long: LongSample | None = None
        _check_graphs_off()
        _check_cache(self.model_runner, spec)

    def prefill(self, sequences: Sequence[np.ndarray]) -> Prefill:
        """One packed prefill of whole sequences, no padding, no cache.

        Args:
            sequences: token ids, int32 [t] each; together at most `batch.max_tokens`.

        Returns:
            The logits of each sequence's last token, and the batch they came from. On CUDA the call returns
            before the device is done.

        Raises:
            EngineError: SGLang built a batch that is not the one asked for.
            BugError: a long sample is not finished; its keys and values would be overwritten.
        """
        if self._long is not None:
            raise BugError("a batch was run while a long sample was open")
        try:
            batch = self._schedule([_make_req(index, ids) for index, ids in enumerate(sequences)])
            _check_batch(batch, sequences, [0] * len(sequences))
            return self._run(batch)
        finally:
            # Nothing of this batch is read again: the cache is only scratch space of one prefill.
            self._forget()

    @contextlib.contextmanager
    def long_sample(self, ids: np.ndarray) -> Iterator[LongSample]:
        """A sample that is computed in chunks, by `prefill_next`; nothing else may run meanwhile.

        Args:
            ids: token ids, int32 [t].

        Raises:
            EngineError: at the end, when a chunk was not computed over exactly the tokens before it.
            BugError: another one is open.
        """
        if self._long is not None:
            raise BugError("a long sample was begun while another one was open")
        self._long = LongSample(ids, _make_req(0, ids))
        try:
            yield self._long
            self._long.check()
        finally:
            self._long = None
            self._forget()

    def prefill_next(self, sample: LongSample, end: int) -> Prefill:
        """The next chunk of a long sample, over the keys and values of its chunks so far.

        Args:
            sample: from `long_sample`, still open.
            end: the chunk's end in the sample, in tokens.

        Returns:
            As `prefill`, for the last token of the chunk.

        Raises:
            EngineError: SGLang built a batch that is not the one asked for.
        """
        begin = sample.num_done
        pool = self.model_runner.req_to_token_pool
        _set_extend_range(sample.req, begin, end, pool)
        batch = self._schedule([sample.req])
        _check_batch(batch, [sample.ids[begin:end]], [begin])
        prefill = self._run(batch, lambda forward_batch: sample.watch(forward_batch, end, pool))
        sample.num_done = end
        return prefill

    def _run(self, batch: Any, watch: Callable[[Any], None] | None = None) -> Prefill:
        import torch

        with torch.no_grad():
            forward_batch = self._forward_batch(batch)
            if watch is not None:
                watch(forward_batch)
            output = self.model_runner.forward(forward_batch)
        return Prefill(getattr(output, "logits_output", output), forward_batch)

    def _forget(self) -> None:
        self.model_runner.req_to_token_pool.clear()
        self.model_runner.token_to_kv_pool_allocator.clear()

    def _schedule(self, reqs: list[Any]) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner = self.model_runner
        tree_cache = self._one_batch.TreeCacheNamespace(
            page_size=self._page_size,
            device=runner.device,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            # Asked for when a batch finds no room: SGLang's own message then says so.
            available_and_evictable_str=lambda: "",
        )
        batch = ScheduleBatch.init_new(
            reqs=reqs,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=tree_cache,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        return batch

    def _forward_batch(self, batch: Any) -> Any:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device, non_blocking=True)
            batch.prefill_input_ids_cpu = None
        keywords = {}
        if "return_hidden_states_before_norm" in inspect.signature(ForwardBatch.init_new).parameters:
            keywords["return_hidden_states_before_norm"] = False
        forward_batch = ForwardBatch.init_new(batch, self.model_runner, **keywords)
        if self.anatomy.family.needs_capture_mode:
            forward_batch.capture_hidden_mode = CaptureHiddenMode.FULL
        return forward_batch


class LongSample:
    """A sample on its way through `Runner.prefill_next`.

    Attributes:
        ids: its token ids, int32 [t].
        req: SGLang's request, which keeps its place in the cache from chunk to chunk.
        num_done: tokens that are computed.
    """

    def __init__(self, ids: np.ndarray, req: Any) -> None:
        self.ids = ids
        self.req = req
        self.num_done = 0
        self._slots: list[torch.Tensor] = []
        self._faults: list[tuple[int, torch.Tensor]] = []

    def watch(self, forward_batch: Any, end: int, pool: Any) -> None:
        """Compares, on the device, what a chunk is about to be computed over with what it must be.

        Its positions must go on where the last chunk ended, and the cache rows that stand for the tokens before it
        must be those that the chunks before it were written to: a prefix of any other origin is refused.
        """
        import torch

        begin = self.num_done
        self._slots.append(forward_batch.out_cache_loc)
        row = pool.req_to_token[forward_batch.req_pool_indices[0], :end]
        wrong_positions = (
            forward_batch.positions != torch.arange(begin, end, device=forward_batch.positions.device)
        ).any()
        wrong_slots = (row != torch.cat(self._slots)).any()
        # Read at the end: to ask the device now would hold up the chunks to come.
        self._faults.append((begin, torch.stack([wrong_positions, wrong_slots])))

    def check(self) -> None:
        """Asks the device what the comparisons gave. Blocking.

        Raises:
            EngineError: with the first chunk that was wrong, and how.
            BugError: tokens are left.
        """
        if self.num_done != len(self.ids):
            raise BugError(f"{self.num_done} tokens of a sample of {len(self.ids)} were computed")
        for begin, fault in self._faults:
            has_wrong_positions, has_wrong_slots = fault.tolist()
            if has_wrong_positions or has_wrong_slots:
                what = (
                    "positions that do not go on from the chunk before"
                    if has_wrong_positions
                    else "keys and values that are not those of the chunks before"
                )
                raise EngineError(
                    f"SGLang computed the chunk from token {begin} of a sample of {len(self.ids)} with {what}",
                    code="chunk_prefix",
                )


class Prefill:
    """What one prefill returned.

    Attributes:
        last_logits: [sequences, vocabulary], the logits of each last token.
        forward_batch: SGLang's `ForwardBatch`, for recomputing the logits in the proof.
        logits_output: SGLang's whole answer.
    """

    def __init__(self, logits_output: Any, forward_batch: Any) -> None:
        self.logits_output = logits_output
        self.last_logits: torch.Tensor = logits_output.next_token_logits
        self.forward_batch = forward_batch


def last_logits(anatomy: Anatomy, normed_TH: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """The logits of each sequence's last token, from given normed states, by the model's own processor."""
    import torch

    with torch.no_grad():
        output = anatomy.logits_processor(forward_batch.input_ids, normed_TH, anatomy.head, forward_batch)
    logits: torch.Tensor = output.next_token_logits
    return logits


def _server_args(spec: EngineSpec) -> Any:
    from sglang.srt.server_args import ServerArgs

    sglang_args.check(spec.sglang_args)
    check_known(spec.sglang_args)
    # The start-up proof sends a few sequences also where every batch of the plan holds a single one.
    max_sequences = max(spec.max_batch_samples, len(PROOF_LENGTHS))
    # Room for every sequence's last page where the attention backend uses pages.
    page_room = 64 * max_sequences
    values: dict[str, Any] = {
        "model_path": spec.model_folder,
        "dtype": spec.dtype,
        "device": spec.device,
        "trust_remote_code": spec.trust_remote_code,
        "attention_backend": spec.attention_backend or ("torch_native" if spec.device == "cpu" else None),
        "max_total_tokens": max(spec.geometry.max_tokens, spec.longest_sample) + page_room,
        "max_running_requests": max_sequences + 1,
        "random_seed": 0,
        "log_level": "warning",
        "tp_size": spec.tp,
    }
    # The pool is sized by max_total_tokens; the fraction only has to leave room for it.
    values["mem_fraction_static"] = spec.mem_fraction or (0.8 if spec.device == "cpu" else None)
    known = _server_args_fields()
    values |= {key: value for key, value in sglang_args.FIXED.items() if key in known}
    return ServerArgs(**(values | spec.sglang_args))


def _publish(args: Any, rank: int) -> Any:
    """Port arguments, after what one_batch sets up in a process before it loads a model."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs

    if hasattr(args, "resolve_once"):  # 0.5.23: settings are resolved and published first
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

        args.resolve_once()
        world_rank = spawn_world_rank(args, tp_rank=rank, pp_rank=0)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=rank))
        one_batch._init_process_global_configs()  # noqa: SLF001 - what one_batch itself calls here
    else:  # 0.5.17
        for initialize in (
            "initialize_moe_config",
            "initialize_fp8_gemm_config",
            "initialize_fp4_gemm_config",
        ):
            getattr(one_batch, initialize)(args)
    return PortArgs.init_new(args)


def _resolved(args: Any, name: str) -> Any:
    """A setting as SGLang resolved it (0.5.23 keeps resolved values apart from what was given)."""
    try:
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:
        return getattr(args, name, None)
    return resolution_result(args, name)


def _check_graphs_off() -> None:
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled

    if not cuda_graph_fully_disabled():
        raise EngineError("SGLang turned CUDA graphs on again; hooks do not run when a graph is replayed")


def _check_cache(model_runner: Any, spec: EngineSpec) -> None:
    """The keys and values of a batch have room, and those of a chunk are kept as they were computed."""
    import torch

    num_tokens = max(spec.geometry.max_tokens, spec.longest_sample)
    room = int(model_runner.max_total_num_tokens)
    if room < num_tokens:
        raise EngineError(
            f"SGLang has room for the keys and values of {room:,} tokens; the largest batch has {num_tokens:,}",
            remedy="raise model.mem_fraction, or lower batch.max_tokens and data.max_len",
            code="cache_room",
        )
    dtype = model_runner.kv_cache_dtype
    if spec.has_chunks and dtype != getattr(torch, spec.dtype):
        raise EngineError(
            f"SGLang keeps keys and values as {dtype}, the model computes in {spec.dtype}: a chunk would read what "
            "came before it rounded",
            remedy=f"raise batch.max_tokens to {spec.longest_sample}, or lower data.max_len",
            code="chunks_untested",
        )


def _make_req(index: int, ids: np.ndarray) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req(
        rid=str(index),
        origin_input_text="",
        origin_input_ids=array("q", ids.tolist()),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    _set_extend_range(req, 0, len(ids), None)
    return req


def _set_extend_range(req: Any, begin: int, end: int, pool: Any) -> None:
    """The next prefill computes tokens begin..end; those before begin are in the request's row of the pool."""
    import torch

    if hasattr(req, "set_extend_range"):  # 0.5.17
        if begin:
            req.prefix_indices = pool.req_to_token[req.req_pool_idx, :begin].to(torch.int64)
        req.set_extend_range(begin, end)
    else:  # 0.5.23
        req.prefix_len = begin
        req.extend_end = end


def _check_batch(batch: Any, sequences: Sequence[np.ndarray], prefixes: Sequence[int]) -> None:
    """The batch SGLang built holds our tokens, all of them, in our order, after our own prefixes alone."""
    import numpy as np

    lengths = [len(ids) for ids in sequences]
    if list(batch.extend_lens) != lengths or list(batch.prefix_lens) != list(prefixes):
        raise EngineError(
            f"SGLang would compute {list(batch.extend_lens)} tokens after cached prefixes of "
            f"{list(batch.prefix_lens)}; sent were {lengths} after {list(prefixes)}",
            code="batch_tokens",
        )
    ids = batch.prefill_input_ids_cpu if batch.input_ids is None else batch.input_ids
    if not np.array_equal(ids.cpu().numpy(), np.concatenate(sequences)):
        raise EngineError("SGLang reordered or changed the tokens of a batch", code="batch_tokens")
