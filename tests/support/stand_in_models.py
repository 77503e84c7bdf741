"""Torch modules with the attributes, calls and results of SGLang's classes that this machine cannot run.

Written after `sglang/srt/models/*.py` of 0.5.23, one builder per way of capturing. The residual stream that enters
layer k is k at every element, so B(n) is n; a norm doubles. They show that an adapter sets, clears and reads back
what a class of that form has; only a run of the real class shows that SGLang computes what it should.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LAYERS = 6
FLAG = "_is_layer_to_capture"


class Norm(nn.Module):
    """As SGLang's norms: with a residual it returns (normed, stream), without one it returns normed."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return hidden * 2
        # As the fused kernels: the sum replaces the residual in place.
        residual += hidden
        return residual * 2, residual


class Part(nn.Module):
    """An attention or what stands in its place; adds one to the stream."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        return torch.ones_like(hidden if isinstance(hidden, torch.Tensor) else args[1])


class Layer(nn.Module):
    """A layer whose residual travels beside the hidden states, or (`one_stream`) in them."""

    def __init__(
        self, enter: Callable[[Layer, torch.Tensor], torch.Tensor], *, one_stream: bool = False
    ) -> None:
        super().__init__()
        self.enter, self.one_stream = enter, one_stream
        self.norm_path = "input_layernorm"

    def with_parts(self, **parts: nn.Module) -> Layer:
        for name, part in parts.items():
            setattr(self, name, part)
        return self

    def forward(
        self, positions: Any, hidden_states: Any, residual: Any, captured: list[Any] | None = None
    ) -> Any:
        norm = self.get_submodule(self.norm_path)
        if self.one_stream:
            if captured is not None:
                captured.append(hidden_states)
            return hidden_states + self.enter(self, norm(hidden_states)), None
        if residual is None:
            residual, normed = hidden_states, norm(hidden_states)
        else:
            normed, residual = norm(hidden_states, residual)
        if captured is not None:
            captured.append(residual.clone())
        return self.enter(self, normed), residual


class Inner(nn.Module):
    """An inner model; `listed` says what its loop captures, from the container's content."""

    def __init__(
        self, layers: list[Layer], norm_name: str = "norm", container: str = "layers_to_capture"
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm_name, self.container = norm_name, container
        setattr(self, norm_name, Norm())
        setattr(self, container, [])
        self.is_listed_and_flagged = False
        self.is_flagged = self.is_packed = self.is_after = self.calls_forward = False
        self.give: Callable[[Any, list[Any]], Any] = lambda hidden, aux: (hidden, aux) if aux else hidden

    def forward(self, hidden: torch.Tensor) -> Any:
        residual, aux = None, []
        for index, layer in enumerate(self.layers):
            wanted = getattr(self, self.container) or ()
            enters = getattr(layer, FLAG, False) if self.is_flagged else not self.is_after and index in wanted
            if self.is_listed_and_flagged and index in wanted and getattr(layer, FLAG, False):
                aux.append(hidden)
            call = layer.forward if self.calls_forward else layer
            hidden, residual = call(
                None, hidden_states=hidden, residual=residual, captured=aux if enters else None
            )
            if self.is_after and index in wanted:
                aux.append(hidden + residual)
        norm = getattr(self, self.norm_name)
        hidden = norm(hidden) if residual is None else norm(hidden, residual)[0]
        return self.give(hidden, [torch.cat(aux, dim=-1)] if aux and self.is_packed else aux)


class Wrapper(nn.Module):
    """Unpacks strictly, as SGLang's wrappers do."""

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.model = inner
        self.lm_head, self.logits_processor = nn.Identity(), Logits()
        if not hasattr(type(self), "capture_aux_hidden_states"):
            self.capture_aux_hidden_states = False

    def forward(self, hidden: torch.Tensor) -> Any:
        call = self.model.forward if self.model.calls_forward else self.model
        hidden, aux = call(hidden), None
        if self.capture_aux_hidden_states:
            hidden, aux = hidden
        return self.logits_processor(None, hidden, self.lm_head, None, aux)


class Logits(nn.Module):
    """As SGLang's processor: fails on a pair that nobody unpacked."""

    def forward(
        self, _ids: Any, hidden: torch.Tensor, _head: Any, _batch: Any, _aux: Any = None
    ) -> torch.Tensor:
        return hidden[-1]


def by_keyword(name: str) -> Callable[[Layer, torch.Tensor], torch.Tensor]:
    return lambda layer, normed: layer.get_submodule(name)(positions=None, hidden_states=normed)


def by_position(name: str, *before: Any) -> Callable[[Layer, torch.Tensor], torch.Tensor]:
    return lambda layer, normed: layer.get_submodule(name)(*before, normed)


def _llama() -> list[Layer]:
    return [
        Layer(by_keyword("self_attn")).with_parts(input_layernorm=Norm(), self_attn=Part())
        for _ in range(LAYERS)
    ]


def _named(name: str, model: nn.Module) -> nn.Module:
    """The model as an instance of a class of that name."""
    model.__class__ = type(name, (type(model),), {})
    return model


def llama() -> nn.Module:
    return _named("LlamaForCausalLM", Wrapper(Inner(_llama())))


def deepseek() -> nn.Module:
    """One packed tensor instead of a list."""
    model = Wrapper(Inner(_llama()))
    model.model.is_packed = True
    return _named("DeepseekV3ForCausalLM", model)


def qwen3_moe() -> nn.Module:
    model = Wrapper(Inner(_llama()))
    model.model.is_flagged = True
    return _named("Qwen3MoeForCausalLM", model)


def kimi_k25() -> nn.Module:
    """A model around a DeepSeek whose `model` is another name of its language model, and cannot be set."""

    class Kimi(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = deepseek()

        @property
        def model(self) -> nn.Module:
            return self.language_model

        def __setattr__(self, name: str, value: object) -> None:
            if name != "model":
                super().__setattr__(name, value)

        def forward(self, hidden: torch.Tensor) -> Any:
            return self.language_model(hidden)

    return _named("KimiK25ForConditionalGeneration", Kimi())


def nemotron_h() -> nn.Module:
    """A set; `forward` of model, layers and mixers is called, so that no hook on them runs."""
    layers = []
    for index in range(LAYERS):
        name = ("in_proj", "qkv_proj", "up_proj")[index % 3]
        mixer = nn.Module()
        setattr(mixer, name, Part())
        layer = Layer(by_position(f"mixer.{name}")).with_parts(norm=Norm(), mixer=mixer)
        layer.norm_path = "norm"
        layers.append(layer)
    model = Wrapper(Inner(layers, norm_name="norm_f"))
    model.model.layers_to_capture = set()
    model.model.calls_forward = True
    return _named("NemotronHForCausalLM", model)


def lfm2() -> nn.Module:
    """Flags and a list; the wrapper's switch follows from the list and cannot be set."""

    class Lfm2(Wrapper):
        @property
        def capture_aux_hidden_states(self) -> bool:
            return bool(self.model.layers_to_capture)

    layers = []
    for index in range(LAYERS):
        name = "conv" if index % 2 else "self_attn"
        enter = by_position("conv") if index % 2 else by_position("self_attn", None)
        layer = Layer(enter, one_stream=True).with_parts(operator_norm=Norm(), **{name: Part()})
        layer.norm_path = "operator_norm"
        layers.append(layer)
    model = Lfm2(Inner(layers, norm_name="embedding_norm"))
    model.model.is_flagged = True
    return _named("Lfm2ForCausalLM", model)


def kimi_linear() -> nn.Module:
    """Layers after which a state is taken; None while off, since it returns a pair for an empty list as well."""
    model = Wrapper(Inner(_llama(), container="dspark_layers_to_capture"))
    inner = model.model
    inner.is_after, inner.dspark_layers_to_capture = True, None
    inner.give = lambda hidden, aux: hidden if inner.dspark_layers_to_capture is None else (hidden, aux)
    return _named("KimiLinearForCausalLM", model)


def bailing_v3() -> nn.Module:
    """Layers after which a state is taken, and a switch on the inner model as well."""
    layers = [
        Layer(by_keyword("attention")).with_parts(input_layernorm=Norm(), attention=Part())
        for _ in range(LAYERS)
    ]
    model = Wrapper(Inner(layers))
    inner = model.model
    inner.is_after, inner.layers_to_capture, inner.capture_aux_hidden_states = True, None, False
    inner.give = lambda hidden, aux: (hidden, aux) if inner.capture_aux_hidden_states else hidden
    return _named("BailingMoeV3ForCausalLM", model)


def bailing_v2() -> nn.Module:
    """Reads a list and flags, and captures twice where both are set."""
    layers = [
        Layer(by_keyword("attention")).with_parts(input_layernorm=Norm(), attention=Part())
        for _ in range(LAYERS)
    ]
    model = Wrapper(Inner(layers))
    model.model.is_listed_and_flagged = True
    return _named("BailingMoeV2ForCausalLM", model)


def muse_glimmer() -> nn.Module:
    """One stream, whose attention is called by position."""
    layers = [
        Layer(by_position("self_attn", None), one_stream=True).with_parts(
            input_layernorm=Norm(), self_attn=Part()
        )
        for _ in range(LAYERS)
    ]
    return _named("MuseGlimmerForCausalLM", Wrapper(Inner(layers)))


def longcat() -> nn.Module:
    """Two attentions with two norms in a layer."""
    layers = []
    for _ in range(LAYERS):
        layer = Layer(by_keyword("self_attn.0")).with_parts(
            input_layernorm=nn.ModuleList([Norm(), Norm()]), self_attn=nn.ModuleList([Part(), Part()])
        )
        layer.norm_path = "input_layernorm.0"
        layers.append(layer)
    return _named("LongcatFlashForCausalLM", Wrapper(Inner(layers)))


def mimo_v2() -> nn.Module:
    """The inner model always returns a pair, and the captures as a third element."""

    class Mimo(Wrapper):
        def forward(self, hidden: torch.Tensor) -> Any:
            hidden, _, *aux = self.model(hidden)
            if self.capture_aux_hidden_states != bool(aux):
                raise ValueError("not enough values to unpack")
            return self.logits_processor(None, hidden, self.lm_head, None, aux or None)

    model = Mimo(Inner(_llama()))
    model.model.is_packed = True
    model.model.give = lambda hidden, aux: (hidden, None, aux[0]) if aux else (hidden, None)
    return _named("MiMoV2FlashForCausalLM", model)


def qwen3_next() -> nn.Module:
    """Linear layers with a module, full ones whose attention is a method that begins with a projection."""
    layers = []
    for index in range(LAYERS):
        name = "qkv_proj" if index % 4 == 3 else "linear_attn"
        layers.append(Layer(by_position(name)).with_parts(input_layernorm=Norm(), **{name: Part()}))
    model = Wrapper(Inner(layers))
    model.model.is_flagged = True
    return _named("Qwen3NextForCausalLM", model)


def granite_hybrid() -> nn.Module:
    """One stream, a norm with one output; mamba layers are watched at their projection."""
    layers = []
    for index in range(LAYERS):
        if index % 2:
            layer = Layer(by_keyword("self_attn"), one_stream=True).with_parts(self_attn=Part())
        else:
            mamba = nn.Module()
            mamba.in_proj = Part()
            layer = Layer(by_position("mamba.in_proj"), one_stream=True).with_parts(mamba=mamba)
        layers.append(layer.with_parts(input_layernorm=Norm()))
    return _named("GraniteMoeHybridForCausalLM", Wrapper(Inner(layers)))


def gemma3() -> nn.Module:
    """Later norms add to the residual in place, as on CUDA: a boundary that is not copied at once is lost."""
    model = Wrapper(Inner(_llama()))
    model.model.embed_tokens = nn.Identity()
    return _named("Gemma3ForCausalLM", model)


def gemma4_mm() -> nn.Module:
    """The text model lies directly in the model that sees images."""

    class Gemma4(Wrapper):
        def __init__(self, inner: Inner) -> None:
            super().__init__(inner)
            del self.model
            self.language_model = inner

        def forward(self, hidden: torch.Tensor) -> Any:
            return self.logits_processor(None, self.language_model(hidden), self.lm_head, None)

    layers = [
        Layer(by_keyword("self_attn"), one_stream=True).with_parts(input_layernorm=Norm(), self_attn=Part())
        for _ in range(LAYERS)
    ]
    return _named("Gemma4ForConditionalGeneration", Gemma4(Inner(layers)))


def apertus() -> nn.Module:
    layers = []
    for _ in range(LAYERS):
        layer = Layer(by_keyword("self_attn")).with_parts(attention_layernorm=Norm(), self_attn=Part())
        layer.norm_path = "attention_layernorm"
        layers.append(layer)
    return _named("ApertusForCausalLM", Wrapper(Inner(layers)))


STAND_INS: dict[str, Callable[[], nn.Module]] = {
    type(build()).__name__: build
    for build in (
        llama,
        deepseek,
        qwen3_moe,
        kimi_k25,
        nemotron_h,
        lfm2,
        kimi_linear,
        bailing_v3,
        bailing_v2,
        muse_glimmer,
        longcat,
        mimo_v2,
        qwen3_next,
        granite_hybrid,
        gemma3,
        gemma4_mm,
        apertus,
    )
}
