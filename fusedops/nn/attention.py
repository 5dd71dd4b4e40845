"""Multi-head attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fusedops import functional, runtime


class MultiheadAttention(torch.nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with fused attention where no weights are asked for.

    Covered: ``need_weights=False`` on batched inputs with no mask, or with a causal ``attn_mask`` that
    ``is_causal=True`` vouches for. Everything else is PyTorch's own forward.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``torch.nn.MultiheadAttention.forward``.

        Args:
            query: [seq_q, batch, embed_dim], or [batch, seq_q, embed_dim] with ``batch_first``, or [seq_q, embed_dim].
            key: the same with seq_kv and ``kdim``.
            value: the same with seq_kv and ``vdim``.
            key_padding_mask: [batch, seq_kv], True where a key is padding.
            need_weights: whether to return the attention weights; the fused kernel never has them.
            attn_mask: [seq_q, seq_kv] or [batch·heads, seq_q, seq_kv], True where a query must not see a key.
            average_attn_weights: whether the returned weights are the mean over the heads.
            is_causal: a promise that ``attn_mask`` is the causal mask; refused without one.

        Returns:
            The output, shaped as ``query``, and the weights or None.
        """
        unsupported = self._unsupported(query, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        if unsupported is not None:
            runtime.use_kernel("MultiheadAttention", query.device, unsupported)
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        q, k, v = map(self._split_heads, self._project(query, key, value))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        # [batch, heads, seq_q, head_dim] → the query's shape
        order = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        merged = attended.permute(order).reshape(query.shape)
        return F.linear(merged, self.out_proj.weight, self.out_proj.bias), None

    def _unsupported(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None,
        need_weights: bool,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
    ) -> str | None:
        if need_weights:
            return "need_weights=True"
        if key_padding_mask is not None or (attn_mask is not None and not is_causal):
            return "a mask"
        if is_causal and attn_mask is None:
            return "is_causal without attn_mask"
        if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
            return "add_bias_kv or add_zero_attn"
        if self.training and self.dropout > 0:
            return "dropout"
        if not (query.dim() == key.dim() == value.dim() == 3) or query.is_nested or key.is_nested or value.is_nested:
            return "unbatched or nested inputs"
        batch = 0 if self.batch_first else 1
        sizes = (query.shape[2], key.shape[2], value.shape[2])
        if (
            sizes != (self.embed_dim, self.kdim, self.vdim)
            or key.shape[:2] != value.shape[:2]
            or query.shape[batch] != key.shape[batch]
        ):
            return "inputs whose sizes do not fit"
        return None

    def _project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Query, key and value after the input projection, each [.., .., embed_dim]."""
        weights: Sequence[torch.Tensor]
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _split_heads(self, projected: torch.Tensor) -> torch.Tensor:
        """[batch, heads, seq, head_dim], a view."""
        split = projected.unflatten(-1, (self.num_heads, self.head_dim))
        return split.permute(0, 2, 1, 3) if self.batch_first else split.permute(1, 2, 0, 3)
