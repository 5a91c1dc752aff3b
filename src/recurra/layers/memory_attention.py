"""Attention over all steps and one memory token (CRT section 3, the compact recurrent vision Transformer)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from recurra.layers.self_attention import SelfAttention


class MemoryAttention(SelfAttention):
    """SelfAttention with one more key and value, projected from the memory token with the weights of the steps.

    The memory token has neither a query nor an output. Arguments as `SelfAttention`.
    """

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "N L d_model"], memory: Float[Tensor, "N d_model"], visible: Bool[Tensor, " N"]
    ) -> Float[Tensor, "N L d_model"]:
        """Mix the steps of each sequence, with its memory if it is visible.

        Args:
            x: the steps.
            memory: one token per sequence.
            visible: whether a sequence sees its memory; without it the result is that of `SelfAttention`.
        """
        queries, keys, values = self._heads(self.queries_keys_values(x), 3)
        n_queries = queries.shape[1] * queries.shape[3]
        weight, bias = (part[n_queries:] for part in (self.queries_keys_values.weight, self.queries_keys_values.bias))
        key, value = self._heads(functional.linear(memory[:, None], weight, bias), 2)
        seen = torch.cat([visible[:, None], visible.new_ones(1, 1).expand(len(visible), x.shape[1])], 1)
        return self._mix(queries, torch.cat([key, keys], 2), torch.cat([value, values], 2), seen[:, None, None])
