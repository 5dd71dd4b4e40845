"""GGUF files (llama.cpp's format): reading them, and putting their 4-bit weights into a model as they are.

Q4_0 (w = d·(q − 8)) and Q4_1 (w = d·q + m) hold blocks of 32 neighbours along K, so they map without loss to our int4
layout with group size 32. Reading needs the package ``gguf``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusedops.catalog.int4_gemm import layout

INT4_KINDS = ("Q4_0", "Q4_1")
ARCHITECTURES = ("llama",)


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF file.

    Attributes:
        name: such as ``"blk.0.attn_q.weight"``.
        kind: ggml's name of the data type: ``"Q4_1"``, ``"F32"``, …
        shape: in PyTorch's order: [N, K] for a linear layer's weight.
        data: the bytes, uint8, mapped from the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file holds.

    Attributes:
        path: of the file.
        metadata: key → value, such as ``"llama.block_count"`` → 30.
        tensors: name → tensor.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def value(self, key: str) -> Any:
        """The metadata value of a key, ``{arch}`` in it being the architecture's name.

        Raises:
            ValueError: the file does not have it.
        """
        key = key.format(arch=self.metadata.get("general.architecture"))
        if key not in self.metadata:
            raise ValueError(f"{self.path}: the metadata has no {key!r}")
        return self.metadata[key]


def read(path: str | os.PathLike[str]) -> GGUFFile:
    """Read a GGUF file's metadata and tensor table; the tensors' bytes stay mapped from the file.

    Raises:
        ImportError: the package ``gguf`` is missing.
        FileNotFoundError: there is no such file.
        ValueError: it is no GGUF file, is truncated or corrupt, is big-endian, or has a tensor of a kind that ``gguf``
            does not know. The message names the file and, where one is at fault, the tensor.
    """
    path = Path(path)
    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    gguf = _import_gguf()
    try:
        reader = _checked_reader(gguf)(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: truncated or corrupt: {error}") from error
    if reader.endianess == gguf.GGUFEndian.BIG:
        raise ValueError(f"{path}: the file is big-endian; only little-endian files can be read")
    tensors = {
        tensor.name: GGUFTensor(
            tensor.name,
            tensor.tensor_type.name,
            tuple(int(size) for size in reversed(tensor.shape)),
            reader.data[tensor.data_offset : tensor.data_offset + tensor.n_bytes],
        )
        for tensor in reader.tensors
    }
    return GGUFFile(path, metadata, tensors)


def to_int4(tensor: GGUFTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A Q4_0 or Q4_1 weight in our layout, without loss, with group size 32.

    Returns:
        qweight int32 [N, K/8]; scales float16 [N, K/32]; offsets [N, K/32], float16 for Q4_1, and for Q4_0 the float32
        that −8·d is exactly.

    Raises:
        ValueError: the tensor is of another kind or not two-dimensional.
    """
    if tensor.kind not in INT4_KINDS:
        raise ValueError(f"to_int4: {tensor.name} must be of kind {' or '.join(INT4_KINDS)}, got {tensor.kind}")
    if len(tensor.shape) != 2:
        raise ValueError(f"to_int4: {tensor.name} must have the shape [N, K], got {list(tensor.shape)}")
    n, k = tensor.shape
    blocks = tensor.data.reshape(n, k // 32, -1)
    nibbles = blocks[..., -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    qweight = layout.pack(torch.from_numpy(codes.reshape(n, k)))
    floats = torch.from_numpy(blocks[..., :-16].copy().view(np.float16))
    scales = floats[..., 0].contiguous()
    offsets = floats[..., 1].contiguous() if tensor.kind == "Q4_1" else scales.float() * -8
    return qweight, scales, offsets


def dequantize(tensor: GGUFTensor) -> torch.Tensor:
    """The tensor's values, float32, in its shape.

    Raises:
        ValueError: neither we nor the package ``gguf`` can dequantize its kind; the message lists those that can be.
    """
    data = np.array(tensor.data)
    if tensor.kind in ("F32", "F16"):
        values = data.view(np.float32 if tensor.kind == "F32" else np.float16).astype(np.float32)
    elif tensor.kind == "BF16":
        values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif tensor.kind == "Q8_0":
        blocks = data.reshape(-1, 34)
        values = blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)
    else:
        gguf = _import_gguf()
        try:
            values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[tensor.kind])
        except NotImplementedError as error:
            raise ValueError(f"{tensor.name} is of kind {tensor.kind}, which cannot be dequantized: {error}") from error
    return torch.from_numpy(values.reshape(tensor.shape))


def load_linears(model: torch.nn.Module, path: str | os.PathLike[str]) -> Any:
    """Put a GGUF file's 4-bit weights into a transformers model, bit for bit.

    Each ``torch.nn.Linear`` whose weight is Q4_0 or Q4_1 in the file becomes a :class:`fusedops.nn.Int4Linear`; its
    bias stays the same Parameter. One whose weight is of another kind is kept, and takes the dequantized values. The
    output head and tied weights are left alone. Everything is checked before the model is changed.

    Args:
        model: a Llama of transformers, changed in place, such as ``from_pretrained(folder, gguf_file=…)`` gives.
        path: the GGUF file.

    Returns:
        The :class:`fusedops.surgery.Report` of what became of each linear layer.

    Raises:
        FileNotFoundError, ImportError: as of :func:`read`.
        ValueError: as of :func:`read`; or the file has another architecture, lacks a layer's tensor, has one that the
            model has no layer for, or a shape differs. The message names the tensor and both shapes.
    """
    from fusedops import nn
    from fusedops.surgery.replacement import install
    from fusedops.surgery.report import Item, Report

    file = read(path)
    report = Report()
    new: dict[torch.nn.Module, torch.nn.Module] = {}
    dense: list[tuple[torch.nn.Linear, torch.Tensor]] = []
    for layer_path, linear, tensor, reason in _match(model, file):
        kind = tensor.kind if tensor else ""
        if tensor is None or reason:
            report.items.append(Item(layer_path, type(linear).__name__, reason=reason))
            continue
        order = _row_order(file, tensor)
        device = linear.weight.device if linear.weight.device.type != "meta" else torch.device("cpu")
        if kind in INT4_KINDS:
            qweight, scales, offsets = (part[order].to(device) for part in to_int4(tensor))
            new[linear] = nn.Int4Linear.from_packed(qweight, scales, offsets, linear.bias).train(linear.training)
            report.items.append(Item(layer_path, f"Linear ({kind})", by="fusedops.nn.Int4Linear"))
        else:
            dense.append((linear, dequantize(tensor)[order].to(device, linear.weight.dtype)))
            report.items.append(Item(layer_path, f"Linear ({kind})", reason=f"{kind} is not 4-bit: dequantized"))
    install(model, new)
    for linear, weight in dense:
        if linear.weight.device.type == "meta":
            linear.weight = torch.nn.Parameter(weight, linear.weight.requires_grad)
        else:
            linear.weight.data.copy_(weight)
    return report


def _match(model: torch.nn.Module, file: GGUFFile) -> Iterator[tuple[str, Any, GGUFTensor | None, str]]:
    """(path, linear layer, its tensor, why it is left alone) of each linear layer, all names and shapes checked."""
    gguf = _import_gguf()
    architecture = file.value("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{file.path}: architecture must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, int(file.value("{arch}.block_count")))
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1

    matches: list[tuple[str, Any, GGUFTensor | None, str]] = []
    unclaimed = {name for name, t in file.tensors.items() if name.startswith("blk.") and len(t.shape) == 2}
    for path, module in model.named_modules():
        mapped = names.get_name(path)
        name = f"{mapped}.weight"
        if type(module) is not torch.nn.Linear:
            if name in unclaimed:
                unclaimed.remove(name)
                matches.append((path, module, None, "not a torch.nn.Linear"))
            continue
        if mapped == "output" or path.rpartition(".")[2] == "lm_head":
            matches.append((path, module, None, "the output head"))
        elif owners[id(module.weight)] > 1:
            matches.append((path, module, None, "its weight is tied to another module's"))
        elif name not in file.tensors:
            raise ValueError(
                f"{file.path}: no tensor for {path}.weight {list(module.weight.shape)}"
                + (f": {name} is missing" if mapped else ", a name that GGUF's llama has no counterpart of")
            )
        else:
            tensor = file.tensors[name]
            if tensor.shape != tuple(module.weight.shape):
                raise ValueError(
                    f"{file.path}: {name} has the shape {list(tensor.shape)},"
                    f" but the model's {path}.weight has {list(module.weight.shape)}"
                )
            matches.append((path, module, tensor, ""))
        unclaimed.discard(name)
    if unclaimed:
        name = min(unclaimed)
        raise ValueError(f"{file.path}: the model has no layer for {name} {list(file.tensors[name].shape)}")
    yield from matches


def _row_order(file: GGUFFile, tensor: GGUFTensor) -> torch.Tensor:
    """Which row of the tensor each row of the model's weight is: GGUF has the two rows of each rotary pair of a head
    side by side, transformers has the heads' first halves before their second halves.
    """
    rows = torch.arange(tensor.shape[0])
    part = tensor.name.split(".")[-2]
    if part not in ("attn_q", "attn_k"):
        return rows
    heads = int(file.value("{arch}.attention.head_count"))
    if part == "attn_k":
        heads = int(file.metadata.get(f"{file.value('general.architecture')}.attention.head_count_kv", heads))
    if heads <= 0 or len(rows) % (2 * heads):
        raise ValueError(f"{file.path}: {tensor.name} {list(tensor.shape)} cannot be split into {heads} heads")
    return rows.view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "GGUF files need the package gguf, which is not installed: pip install 'fusedops[models]'"
        ) from error
    return gguf


def _checked_reader(gguf: Any) -> Any:
    """gguf's reader, which takes whatever a file says at its word, with the file's size and the kinds checked first."""

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"the header goes on to byte {end}, the file has {len(self.data)} bytes")
            return super()._get(offset, dtype, count, *args, **kwargs)

        def _build_tensors(self, start_offs: int, fields: Any) -> None:
            kinds = {int(kind): kind for kind in gguf.GGMLQuantizationType}
            for field in fields:
                _, name_bytes, _, dims, kind_id, offset = field.parts
                name = bytes(name_bytes).decode()
                if (kind := kinds.get(int(kind_id[0]))) is None:
                    accepted = ", ".join(kind.name for kind in kinds.values())
                    raise ValueError(f"{name} is of the unknown kind {int(kind_id[0])}; known are {accepted}")
                shape = [int(size) for size in reversed(dims)]
                block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
                if not shape or shape[-1] % block:
                    raise ValueError(f"{name} {shape}: rows of {kind.name} must be a multiple of {block} long")
                begin, size = int(start_offs) + int(offset[0]), math.prod(shape) // block * block_bytes
                if begin + size > len(self.data):
                    raise ValueError(
                        f"{name} ({kind.name} {shape}) needs the {size} bytes from {begin} on,"
                        f" the file ends after {max(len(self.data) - begin, 0)} of them"
                    )
            super()._build_tensors(start_offs, fields)

    return Reader
