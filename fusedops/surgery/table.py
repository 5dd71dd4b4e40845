"""The one table of replacements: the exact class of a module → the fused class that takes its place."""

from __future__ import annotations

import torch

from fusedops import nn

# Classes of transformers by the order of their casts (checked bit for bit in tests/test_swap.py).
_LLAMA = """
    aria.AriaText csm.Csm deepseek_v2.DeepseekV2 deepseek_v3.DeepseekV3 dots1.Dots1 ernie4_5.Ernie4_5 glm.Glm glm4.Glm4
    glm4_moe.Glm4Moe granite.Granite granitemoe.GraniteMoe hunyuan_v1_dense.HunYuanDenseV1 lfm2.Lfm2 llama.Llama
    ministral.Ministral mistral.Mistral mixtral.Mixtral phi3.Phi3 qwen2.Qwen2 qwen2_moe.Qwen2Moe qwen3.Qwen3
    qwen3_moe.Qwen3Moe seed_oss.SeedOss smollm3.SmolLM3
"""
_GEMMA = "gemma.Gemma gemma2.Gemma2 gemma3.Gemma3 qwen3_next.Qwen3Next t5gemma.T5Gemma"
_OLMO2 = "flex_olmo.FlexOlmo gpt_oss.GptOss olmo2.Olmo2 olmo3.Olmo3"


def _transformers(names: str) -> list[str]:
    """``llama.Llama`` → ``transformers.models.llama.modeling_llama.LlamaRMSNorm``."""
    pairs = [name.split(".") for name in names.split()]
    return [f"transformers.models.{folder}.modeling_{folder}.{prefix}RMSNorm" for folder, prefix in pairs]


REPLACEMENTS: dict[str, type[torch.nn.Module]] = {
    "torch.nn.modules.activation.LogSoftmax": nn.LogSoftmax,
    "torch.nn.modules.activation.MultiheadAttention": nn.MultiheadAttention,
    "torch.nn.modules.activation.Softmax": nn.Softmax,
    "torch.nn.modules.normalization.LayerNorm": nn.LayerNorm,
    "torch.nn.modules.normalization.RMSNorm": nn.RMSNorm,
    **dict.fromkeys(_transformers(_LLAMA), nn.LlamaRMSNorm),
    **dict.fromkeys(_transformers(_GEMMA), nn.GemmaRMSNorm),
    **dict.fromkeys(_transformers(_OLMO2), nn.Olmo2RMSNorm),
}
FUSED = frozenset(REPLACEMENTS.values())


def class_path(cls: type) -> str:
    """``module.qualname``, the key of the table."""
    return f"{cls.__module__}.{cls.__qualname__}"
