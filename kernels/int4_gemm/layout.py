"""The packed layout of int4 weights, and how weights get into it.

W [N, K] becomes ``qweight`` int32 [N, K/8] of unsigned 4-bit codes and, for each group of ``group_size`` neighbours
along K, a scale and an offset [N, K/group_size]:

    W[n, k] = scales[n, k // group_size] · q[n, k] + offsets[n, k // group_size]

K is a multiple of 32. Each block of 32 neighbours is four words c = 0…3 of eight nibbles (nibble i is the bits 4·i to
4·i + 3), and with i = j + 4·h:

    nibble j + 4·h of word c holds the element 8·j + 2·c + h of the block        (j, c in 0…3; h in 0, 1)

    bits          31…28  27…24  23…20  19…16  15…12  11…8   7…4   3…0
    word 0           25     17      9      1     24    16     8     0
    word 1           27     19     11      3     26    18    10     2
    word 2           29     21     13      5     28    20    12     4
    word 3           31     23     15      7     30    22    14     6

``(word >> 4·j) & 0x000F000F`` is two neighbours of k in the halves of one register, as a matrix instruction takes them,
and pair j of the four words together meets eight neighbouring activations: 16 bytes in half precision. The layout does
not depend on the group size.
"""

from __future__ import annotations

import torch

BLOCK = 32
GROUP_SIZES = (32, 64, 128)

# Scales keep so many significant bits that scale · code (up to 15) is exact in float32: a zero is then exactly zero
# whether or not the multiplication and the addition of the offset are fused.
_FLOAT32_SCALE_BITS = 20


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [N, K] of 0 to 15 → qweight int32 [N, K/8].

    Raises:
        TypeError: ``codes`` is not uint8.
        ValueError: it has not two dimensions, K is no multiple of 32, or a code is above 15.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"pack: codes must be uint8, got {codes.dtype}")
    if codes.dim() != 2 or codes.shape[1] % BLOCK:
        raise ValueError(f"pack: codes must have the shape [N, K] with K a multiple of 32, got {list(codes.shape)}")
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"pack: codes must be 0 to 15, got {int(codes.max())}")
    n, k = codes.shape
    nibbles = codes.reshape(n, k // BLOCK, 4, 4, 2)  # [N, blocks, j, c, h]
    words = torch.zeros((n, k // BLOCK, 4), dtype=torch.int32, device=codes.device)
    for j in range(4):
        for h in range(2):
            words |= nibbles[:, :, j, :, h].to(torch.int32) << 4 * (j + 4 * h)
    return words.reshape(n, k // 8)


def unpack(qweight: torch.Tensor) -> torch.Tensor:
    """qweight int32 [N, K/8] → codes uint8 [N, K]; undoes :func:`pack`.

    Raises:
        TypeError: ``qweight`` is not int32.
        ValueError: it has not the shape [N, K/8] with K a multiple of 32.
    """
    if qweight.dtype != torch.int32:
        raise TypeError(f"unpack: qweight must be int32, got {qweight.dtype}")
    if qweight.dim() != 2 or qweight.shape[1] % 4:
        raise ValueError(
            f"unpack: qweight must have the shape [N, K/8] with K a multiple of 32, got {list(qweight.shape)}"
        )
    n, words = qweight.shape
    blocks = qweight.reshape(n, words // 4, 4)
    codes = torch.empty((n, words // 4, 4, 4, 2), dtype=torch.uint8, device=qweight.device)
    for j in range(4):
        for h in range(2):
            codes[:, :, j, :, h] = (blocks >> 4 * (j + 4 * h)) & 15
    return codes.reshape(n, words * 8)


def dequantize(
    qweight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weight [N, K] = scales · q + offsets, computed in float32 (float64 for that ``dtype``), then rounded.

    Args:
        qweight: int32 [N, K/8].
        scales: [N, K/group_size], floating.
        offsets: [N, K/group_size], floating.
        dtype: of the result.
    """
    compute = torch.promote_types(dtype, torch.float32)
    groups = scales.shape[1]
    codes = unpack(qweight).to(compute).view(qweight.shape[0], groups, qweight.shape[1] * 8 // groups)
    weight = codes.mul_(scales.to(compute).unsqueeze(-1)).add_(offsets.to(compute).unsqueeze(-1))
    return weight.view(qweight.shape[0], -1 if qweight.numel() else qweight.shape[1] * 8).to(dtype)


def quantize(
    weight: torch.Tensor, group_size: int, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight to the nearest of 16 levels a group.

    Asymmetric levels span each group's smallest and largest value and 0, which is one of them; symmetric ones are the
    15 multiples of the largest magnitude / 7. Either way zeros stay exactly zero, a value is off by at most half a
    step (and what rounding the scale adds), and quantizing the dequantized weight again gives the same three tensors.

    Args:
        weight: [N, K], float32, bfloat16 or float16, finite; float64 is rounded to float32 first.
        group_size: neighbours along K that share a scale: 32, 64, 128 or K.
        symmetric: put the zero in the middle.

    Returns:
        qweight int32 [N, K/8]; scales [N, K/group_size] in the weight's dtype; offsets [N, K/group_size] float32,
        which are exactly −scale · zero_point.

    Raises:
        TypeError: ``weight`` has another dtype.
        ValueError: ``weight`` is not two-dimensional or not finite, K is no multiple of 32, or ``group_size`` does not
            divide K or is not one of the sizes.
    """
    if weight.dtype == torch.float64:
        weight = weight.float()
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"quantize: weight must be float32, bfloat16 or float16, got {weight.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"quantize: weight must have the shape [N, K], got {list(weight.shape)}")
    n, k = weight.shape
    check_group_size("quantize", k, group_size)
    weight = weight.detach()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("quantize: weight must be finite, got inf or NaN in it")

    grouped = weight.reshape(n, k // group_size, group_size)
    low = grouped.amin(-1).double().clamp(max=0)
    high = grouped.amax(-1).double().clamp(min=0)
    if symmetric:
        levels, high = 7, torch.maximum(high, -low)
        scale = _round_scale(high / levels, weight.dtype)
        zero_point, below = torch.full_like(scale, 8), torch.zeros_like(scale)
    else:
        levels = 15
        scale = _round_scale((high - low) / levels, weight.dtype)
        zero_point = below = torch.round(-low / scale)
    # What the extremes dequantize to in the weight's dtype must give this scale again.
    largest = torch.finfo(weight.dtype).max
    for _ in range(16):
        top, bottom = ((steps * scale).clamp(max=largest).to(weight.dtype) for steps in (levels - below, below))
        extremes = top.double() + bottom.double()
        scale = torch.where(extremes > 0, _round_scale(extremes / levels, weight.dtype), scale)
    scale = torch.where(high - low > 0, scale, 1.0)

    codes = torch.round(grouped.float() / scale.float().unsqueeze(-1)).add_(zero_point.float().unsqueeze(-1))
    if not symmetric:
        # An extreme halfway between two codes takes the outer one, so that the levels keep all their 15 steps.
        _assign(codes, grouped, high, (high / scale + zero_point > 14.4) & (high / scale + zero_point < 14.6), 15)
        _assign(codes, grouped, low, (low / scale + zero_point > 0.4) & (low / scale + zero_point < 0.6), 0)
    qweight = pack(codes.clamp_(0, 15).to(torch.uint8).reshape(n, k))
    return qweight, scale.to(weight.dtype), -(scale * zero_point).float()


def check_group_size(caller: str, k: int, group_size: int) -> None:
    """Raise ValueError, with what would work, unless ``group_size`` is one the layout has for K = ``k``."""
    if k == 0 or k % BLOCK:
        raise ValueError(f"{caller}: K (in_features) must be a positive multiple of 32, got {k}")
    accepted = sorted({size for size in GROUP_SIZES if k % size == 0} | {k})
    if group_size not in accepted:
        raise ValueError(
            f"{caller}: group_size must be one of {accepted} for K = {k}"
            f" (32, 64 or 128 where it divides K, or K itself), got {group_size}"
        )


def _assign(codes: torch.Tensor, grouped: torch.Tensor, extreme: torch.Tensor, where: torch.Tensor, code: int) -> None:
    """Give the elements equal to their group's nonzero ``extreme`` this code, in the groups of ``where``."""
    where = where & (extreme != 0)
    codes.masked_fill_(where.unsqueeze(-1) & (grouped == extreme.to(grouped.dtype).unsqueeze(-1)), code)


def _round_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To the nearest number above 0 that ``dtype`` has (float32: with 20 significant bits)."""
    finfo = torch.finfo(dtype)
    smallest = finfo.smallest_normal * finfo.eps
    rounded = scale.to(dtype)
    if dtype == torch.float32:
        dropped = 24 - _FLOAT32_SCALE_BITS
        smallest *= 1 << dropped
        bits = rounded.view(torch.int32) + (1 << dropped - 1)
        rounded = (bits & -(1 << dropped)).view(torch.float32)
    return rounded.double().clamp(min=smallest)
