"""Hidden states by plain transformers: the independent answer that extracted states are compared with.

Owns the reference pass and the measure of error. It shares nothing with SGLang and nothing with the
engine; it runs one sample at a time, unpadded, in eval mode, without gradients, without TF32.

Invariants: a boundary B(k) is what enters decoder layer k, taken by a hook there (never from
`output_hidden_states`, whose last entry has the final norm applied in some classes and not in others);
B(n) is what enters the final norm; every hook fires exactly once per pass.

Shapes: T tokens of one sample, H hidden size.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from extractor.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from extractor.taps import Tap

ComputeDtype = Literal["float32", "bfloat16", "float16"]

DECODERS = ("model", "model.language_model", "language_model.model", "language_model")
"""Where classes of transformers keep the stack of decoder layers with its final norm."""

NORMS = ("norm", "final_layernorm")
ROUTER = "topkrouter"
"""How the classes of routers end, in lower case, whose (first) output is the logits [T, experts] (transformers 5)."""


class ErrorSummary(msgspec.Struct, frozen=True):
    """Errors of a number of tokens, relative.

    Attributes:
        maximum: the largest; inf when a state is not finite.
        p99: the 99th percentile.
        num_tokens: how many tokens.
    """

    maximum: float
    p99: float
    num_tokens: int


class Reference:
    """A model of transformers that gives the boundaries of single samples.

    Attributes:
        num_layers: n, the number of decoder layers.
        hidden_size: H.
    """

    def __init__(
        self,
        model_folder: Path,
        dtype: ComputeDtype = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        """Loads the weights; blocking, seconds to minutes.

        Raises:
            PreflightError: transformers cannot load the folder, or the class has no known decoder stack.
        """
        self._model = _load(model_folder, dtype, device, trust_remote_code)
        self._device = device
        self._decoder, self._norm = _find_decoder(self._model)
        self.num_layers = len(self._decoder.layers)
        self.hidden_size = int(self._norm.weight.shape[0])

    @torch.no_grad()
    def states(
        self, input_ids: npt.NDArray[np.int32], taps: Sequence[Tap], *, jitter_seed: int | None = None
    ) -> dict[str, torch.Tensor]:
        """The states of one sample.

        Args:
            input_ids: token ids, int32 [T].
            taps: which; any subset of `embed`, layers, `final` and `normed`.
            jitter_seed: moves the embeddings at random by up to one unit in the last place of this dtype
                first, to see how far rounding alone can carry a token; None leaves them.

        Returns:
            Tap name -> float32 [T, H] on the CPU, whatever precision they were computed in.

        Raises:
            PreflightError: the class does not call its layers or its final norm as expected.
        """
        taken: dict[str, list[torch.Tensor]] = {tap.name: [] for tap in taps}
        hooks = [] if jitter_seed is None else [self._jitter(jitter_seed)]
        self._run(input_ids, [*hooks, *(self._hook(tap, taken[tap.name]) for tap in taps)])
        expected = (1, len(input_ids), self.hidden_size)
        for name, tensors in taken.items():
            shapes = [tuple(tensor.shape) for tensor in tensors]
            if shapes != [expected]:
                raise PreflightError(
                    f"{type(self._model).__name__} cannot serve as reference: {name} was seen with shapes "
                    f"{shapes}, expected one of {expected}",
                    code="reference",
                )
        return {name: tensors[0][0].float().cpu() for name, tensors in taken.items()}

    @torch.no_grad()
    def routing_margins(self, input_ids: npt.NDArray[np.int32]) -> torch.Tensor | None:
        """How clearly a mixture-of-experts model chooses the experts of each token.

        The margin of a router is the distance between the last logit that is chosen and the first that is
        not, relative to the sum of their sizes. Below 2**-8 rounding to bfloat16 may swap the two. Where a
        model chooses by something made of the logits (a sigmoid plus a bias, first of groups and then of
        experts), each distance is relative to what a change of the logits by their own size would move.

        Args:
            input_ids: token ids, int32 [T].

        Returns:
            The smallest margin over all routers, float32 [T]; None when the model has no routers.
        """
        margins: list[torch.Tensor] = []

        def watch(router: Any, block: Any) -> Any:
            def on_output(_module: Any, _args: Any, output: Any) -> None:
                logits = output[0] if isinstance(output, tuple) else output
                margins.extend(_margins(logits.float(), router, block))

            return router.register_forward_hook(on_output)

        modules = dict(self._decoder.named_modules())
        hooks = [
            watch(module, modules[path.rpartition(".")[0]])
            for path, module in modules.items()
            if type(module).__name__.lower().endswith(ROUTER)
        ]
        self._run(input_ids, hooks)
        return torch.stack(margins).amin(dim=0).cpu() if margins else None

    @torch.no_grad()
    def normalized(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm applied to states [T, H], float32 [T, H]."""
        weight = self._norm.weight
        result: torch.Tensor = self._norm(states.to(device=weight.device, dtype=weight.dtype))
        return result.float().cpu()

    def _run(self, input_ids: npt.NDArray[np.int32], hooks: Sequence[Any]) -> None:
        """One pass over a sample, with hooks that are removed afterwards."""
        ids_1T = torch.tensor(input_ids, dtype=torch.int64, device=self._device)[None]
        try:
            with _exact_float32():
                self._decoder(input_ids=ids_1T, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

    def _jitter(self, seed: int) -> Any:
        """Moves each embedding value by less than one unit in the last place; seeded."""
        generator = torch.Generator().manual_seed(seed)

        def on_embeddings(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(output.shape, generator=generator).to(output.device) * 2 - 1
            moved: torch.Tensor = output.float() * (1 + noise * torch.finfo(output.dtype).eps / 2)
            return moved.to(output.dtype)

        return self._model.get_input_embeddings().register_forward_hook(on_embeddings)

    def _hook(self, tap: Tap, taken: list[torch.Tensor]) -> Any:
        """Appends the state of a tap to `taken` whenever it passes."""

        def on_output(_module: Any, _args: Any, output: torch.Tensor) -> None:
            taken.append(output.clone())

        def on_input(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken.append((args[0] if args else kwargs["hidden_states"]).clone())

        if tap.is_normed:
            return self._norm.register_forward_hook(on_output)
        is_last = tap.boundary == self.num_layers
        module = self._norm if is_last else self._decoder.layers[tap.boundary]
        return module.register_forward_pre_hook(on_input, with_kwargs=True)


def token_errors(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Relative error of each token: the norm of a - b over the norm of b, over the hidden dimension.

    A norm over a whole sample would hide everything behind the few tokens with massive activations.

    Args:
        a: states [T, H], any floating dtype.
        b: the reference, [T, H].

    Returns:
        float32 [T]; inf where `a` is not finite, or where only `b` is zero.

    Raises:
        ValueError: the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"states of shape {tuple(a.shape)} cannot be compared with {tuple(b.shape)}")
    a64, b64 = a.double(), b.double()
    difference = torch.linalg.vector_norm(a64 - b64, dim=-1)
    size = torch.linalg.vector_norm(b64, dim=-1)
    errors = torch.where(difference == 0, difference, difference / size)
    return torch.nan_to_num(errors, nan=float("inf"), posinf=float("inf")).float()


def summarize(errors: torch.Tensor) -> ErrorSummary:
    """Maximum and 99th percentile over tokens, from float32 [T].

    Raises:
        ValueError: there is no token.
    """
    num_tokens = len(errors)
    if not num_tokens:
        raise ValueError("no token to summarize")
    # By rank, not interpolated: an infinite error must not turn the percentile below it into NaN.
    rank = -(-num_tokens * 99 // 100)
    return ErrorSummary(errors.max().item(), errors.kthvalue(rank).values.item(), num_tokens)


def _margins(logits_TE: torch.Tensor, router: Any, block: Any) -> list[torch.Tensor]:
    """The margins [T] of one router's choices; settings are on the router or, in older releases, on its block."""

    def setting(*names: str, default: Any) -> Any:
        holders = ((part, name) for part in (router, block) for name in names)
        return next((getattr(part, name) for part, name in holders if hasattr(part, name)), default)

    num_tokens, num_experts = logits_TE.shape
    top_k = setting("top_k", default=num_experts)
    bias = setting("e_score_correction_bias", default=None)
    if bias is None:
        # Softmax and sigmoid keep the order of the logits.
        return _gaps(logits_TE, logits_TE.abs(), top_k)
    sigmoid = logits_TE.sigmoid()
    scores, sizes = sigmoid + bias.float(), sigmoid * (1 - sigmoid) * logits_TE.abs()
    groups, wanted_groups = setting("num_group", "n_group", default=1), setting("topk_group", default=1)
    found = []
    if wanted_groups < groups:
        best = scores.view(num_tokens, groups, -1).topk(2, dim=-1)
        group_scores = best.values.sum(dim=-1)
        found += _gaps(
            group_scores, sizes.view(num_tokens, groups, -1).gather(-1, best.indices).sum(-1), wanted_groups
        )
        chosen = group_scores.topk(wanted_groups, dim=-1).indices[..., None]
        kept = chosen.expand(-1, -1, num_experts // groups)
        scores = scores.view(num_tokens, groups, -1).gather(1, kept).flatten(1)
        sizes = sizes.view(num_tokens, groups, -1).gather(1, kept).flatten(1)
    return found + _gaps(scores, sizes, top_k)


def _gaps(scores: torch.Tensor, sizes: torch.Tensor, wanted: int) -> list[torch.Tensor]:
    """Distance [T] of the last score that is chosen to the next, relative to the sum of their sizes."""
    if wanted >= scores.shape[-1]:
        return []
    values, indices = scores.topk(wanted + 1, dim=-1)
    pair = sizes.gather(-1, indices[:, -2:]).sum(dim=-1)
    return [(values[:, -2] - values[:, -1]) / pair.clamp_min(torch.finfo(pair.dtype).tiny)]


@contextlib.contextmanager
def _exact_float32() -> Iterator[None]:
    """Float32 products in float32: no TF32 on a GPU, no bfloat16 on a CPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _load(folder: Path, dtype: str, device: str, trust_remote_code: bool) -> Any:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        transformers.utils.logging.disable_progress_bar()
        # Multimodal classes are not among AutoModelForCausalLM's; a class of the folder's own code is.
        name = (config.architectures or [""])[0]
        model_class = getattr(transformers, name, transformers.AutoModelForCausalLM)
        model = model_class.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, ImportError) as error:
        raise PreflightError(
            f"transformers cannot load {folder}: {error}",
            remedy="verify without --against transformers",
            code="reference",
        ) from error
    return model.to(device).eval()


def _find_decoder(model: Any) -> tuple[Any, Any]:
    """The module that holds the decoder layers, and its final norm."""
    for path in DECODERS:
        try:
            decoder = model.get_submodule(path)
        except AttributeError:
            continue
        norms = [getattr(decoder, name) for name in NORMS if hasattr(decoder, name)]
        if norms and isinstance(getattr(decoder, "layers", None), torch.nn.ModuleList):
            return decoder, norms[0]
    raise PreflightError(
        f"{type(model).__name__} cannot serve as reference: no decoder layers with a final norm "
        f"were found in {', '.join(DECODERS)}",
        remedy="verify without --against transformers",
        code="reference",
    )
