"""Our attention in transformers models, through its attention interface.

:func:`register` makes ``"fusedops"`` an attention implementation beside ``"sdpa"`` and ``"eager"``, with the masks of
``"sdpa"``: none at all where a batch has no padding. ``fusedops.swap`` registers and sets it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from fusedops import functional, runtime

IMPLEMENTATION = "fusedops"
_BEFORE = "_fusedops_attention_before"

# What models and callers pass through to the attention function that changes nothing in it.
_WITHOUT_EFFECT = frozenset(
    (
        *(
            "cache_position",
            "cu_seq_lens_k",
            "cu_seq_lens_q",
            "labels",
            "logits_to_keep",
            "max_length_k",
            "max_length_q",
        ),
        *("num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids"),
        *("return_dict", "sliding_window", "use_cache"),
    )
)
# What changes the result, and which sdpa may take and drop silently: these need a function that takes them by name.
_WITH_EFFECT = ("position_bias", "s_aux", "sinks", "softcap")
# Sparse attention, for which a model makes its own mask if its implementation is called sdpa or eager.
_REFUSED = ("block_indices", "indices")
_SDPA_TAKES = frozenset(inspect.signature(sdpa_attention_forward).parameters)


def register() -> None:
    """Make ``"fusedops"`` known to transformers, for ``from_pretrained(…, attn_implementation="fusedops")`` too."""
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as ``"sdpa"`` computes it, with our kernel where there is no mask and no other option.

    - attention_mask, dropout, position_bias: PyTorch's attention, through transformers' own function for ``"sdpa"``.
    - softcap, sinks (s_aux), output_attentions: the model's own eager attention, with the mask made additive.
    - sliding_window: is in the mask; where there is none although keys lie outside the window, one is made.
    - Other options run as with ``"sdpa"``.

    Args:
        module: the attention module; ``is_causal`` is its attribute unless it is given.
        query: [batch, heads_q, seq_q, head_dim].
        key: [batch, heads_kv, seq_kv, head_dim].
        value: [batch, heads_kv, seq_kv, head_dim_v].
        attention_mask: [batch, 1 or heads_q, seq_q, seq_kv], bool (True: seen) or additive; None for none.
        dropout: the probability to drop an attention weight.
        scaling: multiplies the scores; None for 1/sqrt(head_dim).
        is_causal: without a mask, query i sees the keys j ≤ i; a single query sees all.
        kwargs: the model's other options.

    Returns:
        [batch, seq_q, heads_q, head_dim_v], and the attention weights where the eager attention ran.

    Raises:
        ValueError: an option that changes the result can't be honoured here.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seq_q, seq_kv = query.shape[2], key.shape[2]
    window = kwargs.get("sliding_window")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name}, which fusedops' attention doesn't have; unswap the model"
            )
    if attention_mask is None:
        boundaries = kwargs.get("cu_seq_lens_k")
        if boundaries is not None and boundaries.shape[0] > 2:
            raise ValueError("attention over packed sequences (cu_seq_lens_k) needs the mask that position_ids give")
        if isinstance(window, int) and window < seq_kv and causal:
            if seq_q > 1:
                attention_mask = _window_mask(seq_q, seq_kv, window, query.device)
            else:
                key, value = key[:, :, -window:], value[:, :, -window:]

    unsupported = _unsupported(attention_mask, dropout, kwargs)
    if unsupported is None:
        output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal and seq_q > 1, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    runtime.use_kernel("attention of transformers", query.device, unsupported)
    dropped = [name for name in _WITH_EFFECT if kwargs.get(name) is not None and name not in _SDPA_TAKES]
    if not dropped and not kwargs.get("output_attentions"):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
        )
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(f"{type(module).__name__} has no eager attention for {', '.join(dropped) or 'its weights'}")
    mask = _additive_mask(attention_mask, causal, query, key)
    return eager(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)


def _unsupported(attention_mask: torch.Tensor | None, dropout: float, options: dict[str, Any]) -> str | None:
    if attention_mask is not None:
        return "an attention mask"
    if dropout:
        return "dropout"
    if options.get("output_attentions"):
        return "output_attentions"
    given = [name for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT]
    return f"the options {', '.join(given)}" if given else None


def _window_mask(seq_q: int, seq_kv: int, window: int, device: torch.device) -> torch.Tensor:
    """[1, 1, seq_q, seq_kv] bool: query i sees the ``window`` keys that end with key i."""
    behind = torch.arange(seq_q, device=device)[:, None] - torch.arange(seq_kv, device=device)
    return ((behind >= 0) & (behind < window))[None, None]


def _additive_mask(mask: torch.Tensor | None, causal: bool, query: torch.Tensor, key: torch.Tensor) -> Any:
    """The mask that eager attention takes: 0 where a key is seen, else the least number."""
    seq_q, seq_kv = query.shape[2], key.shape[2]
    if mask is None and causal and seq_q > 1:
        mask = _window_mask(seq_q, seq_kv, seq_kv, query.device)
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros((), dtype=query.dtype, device=query.device).where(mask, torch.finfo(query.dtype).min)


@dataclass
class _Before:
    """The attention implementations that :func:`enable` replaced. Unpickling it registers ours in the new process."""

    configs: list[tuple[PreTrainedConfig, str | None]]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register()


def outermost_models(model: torch.nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """The transformers models within a model that are not part of another one, with their paths."""
    if isinstance(model, PreTrainedModel):
        yield "", model
        return
    for name, child in model.named_children():
        for path, part in outermost_models(child):
            yield f"{name}.{path}" if path else name, part


def reason_to_leave(model: PreTrainedModel) -> str:
    """Why the model's attention function can't be set; empty if it can."""
    if all(config._attn_implementation == IMPLEMENTATION for config in _configs(model)):
        return "already fused"
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # The flags of the class, and transformers' own look at whether its modules use the interface.
            if not (part._supports_attention_backend or part._supports_sdpa):
                return f"{type(part).__name__} does not say that it supports attention functions"
            if not part._can_set_attn_implementation():
                return f"{type(part).__name__} does not use transformers' attention interface"
            if _asks_for_sdpa(type(part).__module__):
                return f"{type(part).__name__}'s code asks for 'sdpa' by name"
    return ""


@functools.cache
def _asks_for_sdpa(module: str) -> bool:
    return (
        re.search(
            r"_attn_implementation (==|in|!=|not in) .*\bsdpa\b", inspect.getsource(importlib.import_module(module))
        )
        is not None
    )


def enable(model: PreTrainedModel) -> None:
    """Set our attention function for this model alone: on copies of its configs, which other models may share."""
    register()
    copies: dict[int, Any] = {}
    replaced = []
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, PreTrainedConfig):
                replaced.append((module, name, value))
                module.__dict__[name] = copy.deepcopy(value, copies)
    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    except BaseException:
        for module, name, value in replaced:
            module.__dict__[name] = value
        raise
    model.__dict__[_BEFORE] = _Before(before)


def disable(model: PreTrainedModel) -> str:
    """Set the attention functions back; returns the model's own, empty if ours had not been set."""
    before = model.__dict__.pop(_BEFORE, None)
    if before is None:
        return ""
    for config, implementation in before.configs:
        if config._attn_implementation == IMPLEMENTATION:
            config._attn_implementation_internal = implementation
    return str(model.config._attn_implementation)


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """All configs that the model's parts refer to, and their sub-configs, each once."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [value for module in model.modules() for value in module.__dict__.values()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())
