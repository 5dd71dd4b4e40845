"""What was done to a model, and what was left alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Item:
    """One module.

    Attributes:
        path: its name in the model; empty for the model itself.
        what: its class, or ``"attention"`` for the attention function of a transformers model.
        by: what takes its place; empty if it was left alone.
        reason: why it was left alone; empty if it was replaced.
    """

    path: str
    what: str
    by: str = ""
    reason: str = ""


@dataclass
class Report:
    """What :func:`~fusedops.swap`, :func:`~fusedops.unswap` or :func:`~fusedops.quantize` did.

    True if anything was replaced; its length is the number of replaced modules; iterating gives all items.

    Attributes:
        items: all modules that were considered, in the model's order.
        notes: what else to know.
        bytes_before: bytes of the model's parameters and buffers; None where they don't change.
        bytes_after: the same afterwards.
    """

    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes_before: int | None = None
    bytes_after: int | None = None

    @property
    def replaced(self) -> list[Item]:
        """The modules that were replaced."""
        return [item for item in self.items if item.by]

    @property
    def left(self) -> list[Item]:
        """The modules that were left alone."""
        return [item for item in self.items if not item.by]

    def __bool__(self) -> bool:
        return bool(self.replaced)

    def __len__(self) -> int:
        return len(self.replaced)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __str__(self) -> str:
        lines = _groups(self.replaced) or ["nothing to replace"]
        if self.left:
            lines += ["left alone:", *_groups(self.left)]
        if self.bytes_before is not None and self.bytes_after is not None:
            lines.append(f"parameters and buffers: {_size(self.bytes_before)} → {_size(self.bytes_after)}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def _groups(items: list[Item]) -> list[str]:
    """One line for all items of a class that went the same way: how many, what, and to what or why not."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in items:
        fate = f"→ {item.by}" if item.by else item.reason
        groups.setdefault((item.what, fate), []).append(item.path or "the model itself")
    count_width = max((len(str(len(paths))) for paths in groups.values()), default=0)
    what_width = max((len(what) for what, _ in groups), default=0)
    return [
        f"{len(paths):>{count_width}} × {what:<{what_width}}  {fate}  ({_some(paths)})"
        for (what, fate), paths in groups.items()
    ]


def _some(paths: list[str]) -> str:
    return ", ".join(paths) if len(paths) <= 2 else f"{paths[0]}, … {paths[-1]}"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
