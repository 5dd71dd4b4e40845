"""Drop-in modules: torch's own classes with a fused forward, model libraries' RMSNorms, and quantized linears."""

from .attention import MultiheadAttention
from .linear import FP8Linear, Int4Linear
from .loss import CrossEntropyLoss
from .norm import GemmaRMSNorm, LayerNorm, LlamaRMSNorm, Olmo2RMSNorm, RMSNorm
from .softmax import LogSoftmax, Softmax

__all__ = [
    "CrossEntropyLoss",
    "FP8Linear",
    "GemmaRMSNorm",
    "Int4Linear",
    "LayerNorm",
    "LlamaRMSNorm",
    "LogSoftmax",
    "MultiheadAttention",
    "Olmo2RMSNorm",
    "RMSNorm",
    "Softmax",
]
