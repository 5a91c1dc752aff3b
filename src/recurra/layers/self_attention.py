"""Softmax attention between all steps, without positions or causality (Vaswani et al., arXiv 1706.03762, 3.2)."""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurra.checks import require_heads
from recurra.layers.dot_product_attention import dot_product_attention


class SelfAttention(nn.Module):
    """y_i = W_o sum_j softmax_j((x_i W_q)(x_j W_k)^T / sqrt(d_head)) x_j W_v + b_o, per head, with biases (CRT (1)).

    Args:
        d_model: channels of x and y.
        n_heads: number of heads.
        attention_dropout: probability of dropping an attention weight.
        dropout: probability of dropping a channel of y.

    Raises:
        ValueError: the heads do not divide the channels.
    """

    def __init__(self, d_model: int, *, n_heads: int, attention_dropout: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        require_heads(n_heads, d_model=d_model)
        self.n_heads = n_heads
        self.attention_dropout = attention_dropout
        self.queries_keys_values = nn.Linear(d_model, 3 * d_model)
        self.output_projection = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "N L d_model"]) -> Float[Tensor, "N L d_model"]:
        """Mix the steps of each sequence."""
        return self._mix(*self._heads(self.queries_keys_values(x), 3))

    def _heads(self, projected: Tensor, n_parts: int) -> tuple[Tensor, ...]:
        """Split (N, L, parts * d_model) into one (N, H, L, d_head) per part."""
        return projected.unflatten(-1, (n_parts, self.n_heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def _mix(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Bool[Tensor, "..."] | None = None) -> Tensor:
        """Attend to what is `visible` (everything when None), and project."""
        dropout = self.attention_dropout if self.training else 0.0
        y = dot_product_attention(queries, keys, values, attn_mask=visible, dropout_p=dropout)
        return self.dropout(self.output_projection(y.transpose(1, 2).flatten(2)))
