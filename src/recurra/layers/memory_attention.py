"""Attention of all steps to all and to one memory token (CRT section 3, the compact recurrent vision Transformer)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from recurra.layers.self_attention import SelfAttention


class MemoryAttention(SelfAttention):
    """SelfAttention with one more key and value, made from the memory token by the projections that the steps have.

    The memory asks nothing and is given nothing: it has no query and no output. Arguments as `SelfAttention`.
    """

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "N L d_model"], memory: Float[Tensor, "N d_model"], visible: Bool[Tensor, " N"]
    ) -> Float[Tensor, "N L d_model"]:
        """Mix the steps of every row, with its memory where it is visible.

        Args:
            x: the steps.
            memory: one token for every row.
            visible: whether a row sees its memory; where not, the row is mixed as by `SelfAttention`.
        """
        queries, keys, values = self._heads(self.queries_keys_values(x), 3)
        n_queries = queries.shape[1] * queries.shape[3]
        weight, bias = (part[n_queries:] for part in (self.queries_keys_values.weight, self.queries_keys_values.bias))
        key, value = self._heads(functional.linear(memory[:, None], weight, bias), 2)
        seen = torch.cat([visible[:, None], visible.new_ones(1, 1).expand(len(visible), x.shape[1])], 1)
        return self._mix(queries, torch.cat([key, keys], 2), torch.cat([value, values], 2), seen[:, None, None])
