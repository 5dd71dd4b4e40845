"""Our norms and attention in transformers models: tiny random ones of the real classes, built from configs."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

transformers = pytest.importorskip("transformers")

import fusedops  # noqa: E402
from fusedops import FallbackWarning, nn, runtime  # noqa: E402
from fusedops.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::fusedops.FallbackWarning")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 60,
}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS: dict[str, Any] = {"head_dim": 16, "sliding_window": 6}
CAUSAL: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": 6},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED | {"head_dim": 16},
    "Gemma": GROUPED | {"head_dim": 16},
    "Gemma2": GROUPED | HEADS | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "Gemma3": GROUPED | HEADS | {"query_pre_attn_scalar": 16},
    "Phi3": GROUPED,
    "Olmo2": GROUPED,
    "GptOss": GROUPED | HEADS | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "GPT2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 60,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
}
NORMS: dict[str, type] = {
    "Gemma": nn.GemmaRMSNorm,
    "Gemma2": nn.GemmaRMSNorm,
    "Gemma3": nn.GemmaRMSNorm,
    "GPT2": nn.LayerNorm,
}
NORMS |= {"Olmo2": nn.Olmo2RMSNorm, "GptOss": nn.Olmo2RMSNorm}
# Softcapping and sinks have no sdpa to compare with: older transformers run Gemma 2 through sdpa without its softcap.
EAGER = ("Gemma2", "GptOss")


def config_of(name):
    if name == "Bert":
        return transformers.BertConfig(**SIZES)
    prefix = "Gemma3Text" if name == "Gemma3" else name
    return getattr(transformers, f"{prefix}Config")(**CAUSAL[name])


def make(name, device, config=None):
    torch.manual_seed(0)
    classes = {"Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}
    model = getattr(transformers, classes.get(name, f"{name}ForCausalLM"))(config or config_of(name))
    for path, parameter in model.named_parameters():
        if "norm" in path or "ln_" in path or "sinks" in path:
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    if name in EAGER:
        model.set_attn_implementation("eager")
    return model.to(device).eval()


def tokens(device, length=9, batch=2):
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def logits(model, inputs, **options):
    with torch.no_grad():
        return model(inputs, **options).logits


def close(actual, expected):
    """1e-5 of the largest logit; a GPU's tf32 matmuls are coarser."""
    tolerance = (2e-2 if actual.is_cuda else 1e-5) * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [*CAUSAL, "Bert"])
def test_logits_are_the_same_before_and_after(name, device):
    model = make(name, device)
    inputs = tokens(device)
    modules, expected = dict(model.named_modules()), logits(model, inputs)
    implementation = model.config._attn_implementation
    assert implementation == ("eager" if name in EAGER else "sdpa")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = fusedops.swap(model)
    assert model.config._attn_implementation == "fusedops"
    norms = [item for item in report.replaced if "attention" not in item.what]
    assert {item.by for item in norms} == {
        f"fusedops.nn.{NORMS.get(name, nn.LayerNorm if name == 'Bert' else nn.LlamaRMSNorm).__name__}"
    }
    assert len(norms) == sum("norm" in type(module).__name__.lower() for module in modules.values())
    assert [item.by for item in report.replaced if "attention" in item.what] == [
        "fusedops.functional.scaled_dot_product_attention"
    ]
    close(logits(model, inputs), expected)
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[key], state[key]) for key in state)

    fusedops.unswap(model)
    assert dict(model.named_modules()) == modules
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model, inputs), expected)


@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in EAGER] + ["Bert"])
def test_an_unpadded_batch_needs_no_fallback(name, device):
    model = make(name, device)
    fusedops.swap(model)
    # shorter than every sliding window
    with runtime.strict():
        logits(model, tokens(device, length=5))
        logits(model, tokens(device, length=5), attention_mask=torch.ones(2, 5, dtype=torch.long, device=device))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "Gemma3", "GPT2"])
def test_generation_with_a_cache_gives_the_same_tokens(name, device):
    model = make(name, device)
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    expected = model.generate(tokens(device, 5), attention_mask=torch.ones_like(tokens(device, 5)), **options)
    fusedops.swap(model)
    actual = model.generate(tokens(device, 5), attention_mask=torch.ones_like(tokens(device, 5)), **options)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", [*CAUSAL, "Bert"])
def test_a_left_padded_batch_gives_the_same_logits_on_the_real_tokens(name, device):
    model = make(name, device)
    inputs, mask = tokens(device), torch.ones(2, 9, dtype=torch.long, device=device)
    mask[0, :4] = 0
    expected = logits(model, inputs, attention_mask=mask)
    fusedops.swap(model)
    real = mask.bool()
    close(logits(model, inputs, attention_mask=mask)[real], expected[real])


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_training_steps_are_the_same(name, device):
    model = make(name, device)
    twin = make(name, device)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    fusedops.swap(model)
    for m, optimizer in zip((model, twin), steps, strict=True):
        m(tokens(device), labels=tokens(device)).loss.backward()
        optimizer.step()
    for (path, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        tolerance = (2e-2 if ours.is_cuda else 1e-5) * max(1.0, float(theirs.detach().abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=path)


def test_dropout_in_training_is_sdpas(device):
    results = []
    for swapped in (False, True):
        model = make("Llama", device, transformers.LlamaConfig(**GROUPED, attention_dropout=0.5))
        if swapped:
            fusedops.swap(model, include=[transformers.PreTrainedModel], exclude=[torch.nn.ModuleList])
        model.train()
        torch.manual_seed(7)
        results.append(logits(model, tokens(device)))
    close(results[1], results[0])


def test_models_that_share_a_config_stay_as_they_are(device):
    config = config_of("Llama")
    model, other = make("Llama", device, config), make("Llama", device, config)
    expected = logits(other, tokens(device))
    fusedops.swap(model)
    assert config._attn_implementation == other.config._attn_implementation == "sdpa"
    assert other.config is config
    assert torch.equal(logits(other, tokens(device)), expected)
    assert not any(isinstance(module, nn.LlamaRMSNorm) for module in other.modules())
    model.config.use_cache = False
    fusedops.unswap(model)
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[0].self_attn.config is model.config
    assert not model.config.use_cache, "what was set meanwhile stays"


def test_swapping_twice_and_a_part_of_a_bigger_model(device):
    model = make("Llama", device)
    expected = logits(model, tokens(device))
    wrapped = torch.nn.ModuleDict({"llm": model})
    report = fusedops.swap(wrapped)
    assert "llm" in [item.path for item in report.replaced]
    assert not fusedops.swap(wrapped)
    assert "already fused" in str(fusedops.swap(wrapped))
    close(logits(model, tokens(device)), expected)
    fusedops.unswap(wrapped)
    assert model.config._attn_implementation == "sdpa"
    fusedops.swap(model.model)
    close(logits(model, tokens(device)), expected)


def test_copies_and_pickles_compute_the_same_and_unswap(device):
    model = make("Llama", device)
    expected = logits(model, tokens(device))
    fusedops.swap(model)
    pickled = pickle.dumps(model)
    for other in (copy.deepcopy(model), pickle.loads(pickled)):
        assert other.config._attn_implementation == "fusedops"
        close(logits(other, tokens(device)), expected)
        fusedops.unswap(other)
        assert other.config._attn_implementation == "sdpa"
        assert torch.equal(logits(other, tokens(device)), expected)
    assert model.config._attn_implementation == "fusedops"


def test_unpickling_registers_the_attention(device):
    model = make("Llama", device)
    fusedops.swap(model)
    pickled = pickle.dumps(model)
    transformers.AttentionInterface._global_mapping.pop("fusedops")
    logits(pickle.loads(pickled), tokens(device))


def test_a_swapped_model_saves_as_the_plain_one(device, tmp_path):
    model = make("Llama", device)
    expected = logits(model, tokens(device))
    fusedops.swap(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).to(device).eval()
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(logits(loaded, tokens(device)), expected)


def test_dry_run_and_attention_alone_or_not_at_all(device):
    model = make("Llama", device)
    config = model.config
    planned = fusedops.swap(model, dry_run=True)
    assert model.config is config
    assert config._attn_implementation == "sdpa"
    assert str(planned).count("→") == 2
    fusedops.swap(model, attention=False)
    assert model.config._attn_implementation == "sdpa"
    fusedops.unswap(model)
    fusedops.swap(model, include=["layers.0"])
    assert model.config._attn_implementation == "sdpa"
    assert not isinstance(model.model.norm, nn.LlamaRMSNorm)


def test_a_failing_attention_step_undoes_everything(device, monkeypatch):
    model = make("Llama", device)
    modules, config = dict(model.named_modules()), model.config

    def fails(implementation):
        raise RuntimeError("no such attention")

    monkeypatch.setattr(model, "set_attn_implementation", fails)
    with pytest.raises(RuntimeError, match="no such attention"):
        fusedops.swap(model)
    assert dict(model.named_modules()) == modules
    assert model.config is config
    assert model.model.layers[0].self_attn.config is config


def test_models_without_the_attention_interface_are_left_alone_with_the_reason(monkeypatch):
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=60))
    report = fusedops.swap(mamba, dry_run=True)
    assert any("does not say that it supports" in item.reason for item in report.left)
    model = make("Llama", "cpu")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    report = fusedops.swap(model)
    assert "does not use transformers' attention interface" in report.left[0].reason
    assert model.config._attn_implementation == "sdpa"


def test_models_that_ask_for_sdpa_by_name_are_left_alone():
    """Their sparse attention makes its mask only for an implementation of that name."""
    pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    assert integration._asks_for_sdpa("transformers.models.deepseek_v32.modeling_deepseek_v32")
    assert not integration._asks_for_sdpa("transformers.models.llama.modeling_llama")
    assert not integration._asks_for_sdpa("transformers.models.gpt2.modeling_gpt2")


class Attention(torch.nn.Module):
    """As much of an attention module as an attention function looks at; its eager attention is Gemma 2's."""

    __module__ = "transformers.models.gemma2.modeling_gemma2"
    is_causal = True
    head_dim = 8
    num_key_value_groups = 2


def call(function, module, seq_q=6, seq_kv=6, mask=None, device="cpu", **options):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, n, 8, generator=generator).to(device)
        for heads, n in ((4, seq_q), (2, seq_kv), (2, seq_kv))
    )
    return function(module, q, k, v, mask, **{"scaling": 0.3, **options})


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(6, 6), (1, 6), (4, 9), (1, 1)])
@pytest.mark.parametrize("is_causal", [None, False])
def test_attention_function_is_sdpas(seq_q, seq_kv, is_causal, device):
    arguments = {"seq_q": seq_q, "seq_kv": seq_kv, "is_causal": is_causal, "device": device}
    ours, weights = call(integration.attention_forward, Attention().eval(), **arguments)
    assert weights is None
    close(ours, call(integration.sdpa_attention_forward, Attention().eval(), **arguments)[0])
    assert ours.is_contiguous()


def test_every_option_changes_the_result_or_raises(device):
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as eager_with_sinks

    module = Attention().eval()
    ours = integration.attention_forward
    plain = call(ours, module, device=device)[0]
    triangle = torch.ones(6, 6, device=device).tril().bool()[None, None]
    additive = torch.zeros(1, 1, 6, 6, device=device).masked_fill(~triangle, torch.finfo(torch.float32).min)

    capped = call(ours, module, softcap=0.5, device=device)[0]
    close(capped, call(eager_attention_forward, module, mask=additive, softcap=0.5, device=device)[0])
    assert not torch.allclose(capped, plain, atol=1e-3)
    close(call(ours, module, mask=triangle, softcap=0.5, device=device)[0], capped)

    output, weights = call(ours, module, output_attentions=True, device=device)
    close(output, plain)
    assert torch.equal(weights.sum(-1).round(decimals=4), torch.ones(2, 4, 6, device=device))

    window = torch.ones(6, 6, device=device).tril().triu(-1).bool()[None, None]
    close(call(ours, module, sliding_window=2, device=device)[0], call(ours, module, mask=window, device=device)[0])
    last = call(ours, module, seq_q=1, sliding_window=2, device=device)[0]
    close(last, call(ours, module, seq_q=1, mask=window[:, :, -1:], device=device)[0])
    close(call(ours, module, sliding_window=6, device=device)[0], plain)

    bias = torch.linspace(-1, 1, 4 * 36, device=device).view(1, 4, 6, 6)
    biased = call(ours, module, position_bias=bias, device=device)[0]
    close(biased, call(ours, module, mask=bias.masked_fill(~triangle, -1e9), device=device)[0])

    sinks = Attention().eval()
    sinks.sinks = torch.nn.Parameter(torch.linspace(-1, 2, 4, device=device))
    type(sinks).__module__ = "transformers.models.gpt_oss.modeling_gpt_oss"
    try:
        with torch.no_grad():
            sunk = call(ours, sinks, s_aux=sinks.sinks, device=device)[0]
            close(sunk, call(eager_with_sinks, sinks, mask=additive, device=device)[0])
        assert not torch.allclose(sunk, plain, atol=1e-3)
    finally:
        type(sinks).__module__ = "transformers.models.gemma2.modeling_gemma2"

    for name in ("indices", "block_indices"):
        with pytest.raises(ValueError, match=f"Attention passes {name}"):
            call(ours, module, device=device, **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match="packed sequences"):
        call(ours, module, device=device, cu_seq_lens_k=torch.tensor([0, 3, 6]))


def test_what_the_kernel_does_not_cover_is_told(device, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as if the kernel would run
    module = Attention().eval()
    triangle = torch.ones(6, 6, device=device).tril().bool()[None, None]
    uncovered: list[tuple[dict[str, Any], str]] = [
        ({"mask": triangle}, "an attention mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 0.5}, "the options softcap"),
        ({"something_new": 1}, "the options something_new"),
    ]
    for options, reason in uncovered:
        with runtime.strict(), pytest.raises(RuntimeError, match=reason):
            call(integration.attention_forward, module, device=device, **options)
    if device == "cuda":
        runtime.dispatch._warn_once.cache_clear()
        with pytest.warns(FallbackWarning, match="an attention mask"):
            call(integration.attention_forward, module, device=device, mask=triangle)


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_quantize(scheme, name, device):
    model = make(name, device)
    expected = logits(model, tokens(device))
    fusedops.swap(model)
    report = fusedops.quantize(model, scheme, group_size=32, exclude="mlp")
    assert "lm_head" in [item.path for item in report.left]
    assert len(report) == (8 if name == "Llama" else 4)
    error = (logits(model, tokens(device)) - expected).norm() / expected.norm()
    assert error < (0.4 if scheme == "int4" else 0.2)
    quantized = logits(model, tokens(device))
    fusedops.unswap(model)
    close(logits(model, tokens(device)), quantized)


@pytest.mark.skipif(runtime.interpreting(), reason="the compiler traces to the same operators")
def test_a_swapped_model_compiles_without_a_graph_break(device):
    model = make("Llama", device)
    fusedops.swap(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        close(compiled(tokens(device), use_cache=False).logits, logits(model, tokens(device), use_cache=False))
