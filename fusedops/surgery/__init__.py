"""Whole models: put fused modules in place, take them out again, quantize, and report what was done."""

from .quantization import quantize
from .replacement import swap, unswap
from .report import Item, Report

__all__ = ["Item", "Report", "quantize", "swap", "unswap"]
