"""Which modules of a model a call is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch

Pattern = str | type
Patterns = Sequence[Pattern] | Pattern | None


class Selection:
    """``include`` and ``exclude`` for one model.

    A string pattern is a run of whole path components, and matches every module at or below it: ``"lm_head"``,
    ``"layers.3"`` (not layers.30), ``"model.layers.*.mlp"``; ``*``, ``?`` and ``[…]`` stay within a component. A class
    matches its instances, and every module below them.

    Raises:
        TypeError: a pattern is neither a string nor a class.
        ValueError: a string matches no module. It is probably misspelt, and what it was to protect would change.
    """

    def __init__(self, model: torch.nn.Module, include: Patterns, exclude: Patterns) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._below = {
            argument: {pattern: _matched(modules, argument, pattern) for pattern in _listed(patterns)}
            for argument, patterns in (("include", include), ("exclude", exclude))
        }
        self._includes_all = include is None
        self._paths: dict[torch.nn.Module, set[str]] = {}
        for path, module in modules.items():
            self._paths.setdefault(module, set()).add(path)

    def reason_to_skip(self, module: torch.nn.Module) -> str:
        """Why a module is not to be changed; empty if it is. One that is shared has several paths, and each counts."""
        if not self._includes_all and not self.names(module):
            return "not in include"
        for pattern, matched in self._below["exclude"].items():
            if matched & self._paths[module]:
                return f"excluded by {_shown(pattern)}"
        return ""

    def names(self, module: torch.nn.Module) -> bool:
        """Whether ``include`` asks for a module."""
        return any(matched & self._paths[module] for matched in self._below["include"].values())


def _listed(patterns: Patterns) -> Sequence[Pattern]:
    if patterns is None:
        return ()
    return (patterns,) if isinstance(patterns, str | type) else patterns


def _matched(modules: dict[str, torch.nn.Module], argument: str, pattern: Pattern) -> set[str]:
    matches: Callable[[str], bool]
    if isinstance(pattern, type):
        roots = [path for path, module in modules.items() if isinstance(module, pattern)]

        def matches(path: str) -> bool:
            return any(root in ("", path) or path.startswith(f"{root}.") for root in roots)

    elif isinstance(pattern, str):
        components = pattern.split(".")

        def matches(path: str) -> bool:
            parts = path.split(".")
            runs = (parts[start : start + len(components)] for start in range(len(parts) - len(components) + 1))
            return any(all(map(fnmatchcase, run, components)) for run in runs)

    else:
        raise TypeError(f"{argument} takes module paths (str) and classes, got {pattern!r}")
    matched = {path for path in modules if matches(path)}
    if not matched and isinstance(pattern, str):
        raise ValueError(f"{argument}: {pattern!r} matches no module; see model.named_modules() for the paths")
    return matched


def _shown(pattern: Pattern) -> str:
    return pattern.__name__ if isinstance(pattern, type) else repr(pattern)
