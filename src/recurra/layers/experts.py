"""Mixtures of experts: routers, the experts that each token chooses, and the loss that balances them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import choose, require, require_positive, require_whole_number
from recurra.layers.feed_forward import FEED_FORWARDS, LinearWeights
from recurra.layers.norms import at_least_float32
from recurra.ops._operator import OneNode, has_numbers, transforms_are_active, without_autocast


class ExpertWeights(LinearWeights):
    """The matrices of a linear layer without bias, one for each expert; their owner reads them."""

    def __init__(self, n_experts: int, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.weight = nn.Parameter(torch.randn(n_experts, out_features, in_features) * in_features**-0.5)


class Router(LinearWeights):
    """Gives each expert a logit and chooses the largest. Its weights are never packed: rounding would change choices.

    The weights of chosen experts are the softmax of all logits, or with `normalise` that of the chosen ones.
    """

    def __init__(self, d_model: int, n_experts: int, top_k: int, normalise: bool) -> None:
        super().__init__(d_model, n_experts, bias=False)
        self.top_k, self.normalise = top_k, normalise

    def forward(self, x: Float[Tensor, "tokens d_model"]) -> Float[Tensor, "tokens n_experts"]:
        """Return the logits in float32 or better."""
        with without_autocast(x):
            return functional.linear(at_least_float32(x), at_least_float32(self.weight))

    def choose(self, logits: Float[Tensor, "tokens n_experts"]) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts and their numbers, (tokens, top_k), the largest first."""
        largest, chosen = (logits if self.normalise else logits.softmax(-1)).topk(self.top_k)
        return largest.softmax(-1) if self.normalise else largest, chosen


class SigmoidRouter(Router):
    """Weighs an expert by the sigmoid of its logit, and chooses by that plus a bias (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2); with `normalise` weights are divided by their sum + `epsilon`.

    Of `n_groups` equal groups, a token chooses within `top_groups`: those whose two largest sums are largest together.
    No gradient reaches the bias, which balances the experts of published models; here it stays as it is.
    """

    bias: nn.Parameter

    def __init__(
        self,
        d_model: int,
        n_experts: int,
        top_k: int,
        normalise: bool,
        epsilon: float = 1e-6,
        n_groups: int = 1,
        top_groups: int = 1,
    ) -> None:
        super().__init__(d_model, n_experts, top_k, normalise)
        self.epsilon, self.n_groups, self.top_groups = epsilon, n_groups, top_groups
        self.bias = nn.Parameter(torch.zeros(n_experts), requires_grad=False)

    def choose(self, logits: Float[Tensor, "tokens n_experts"]) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts and their numbers, (tokens, top_k), the largest with bias first."""
        scores = logits.sigmoid()
        preferred = _in_best_groups(scores + at_least_float32(self.bias), self.n_groups, self.top_groups)
        chosen = preferred.topk(self.top_k).indices
        weights = scores.gather(-1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + self.epsilon) if self.normalise else weights, chosen


def _in_best_groups(scores: Float[Tensor, "tokens n_experts"], n_groups: int, top_groups: int) -> Tensor:
    """Replace the scores outside of the best groups by -inf."""
    if n_groups == top_groups:
        return scores
    groups = scores.unflatten(-1, (n_groups, -1))
    best = groups.topk(2).values.sum(-1).topk(top_groups).indices
    alone = torch.eye(n_groups, dtype=scores.dtype, device=scores.device).log()  # 0 for one group, -inf for the others
    return (groups + functional.embedding(best, alone).amax(-2)[..., None]).flatten(-2)


ROUTERS: dict[str, type[Router]] = {"softmax": Router, "sigmoid": SigmoidRouter}
_OF_SIGMOID = {"epsilon": 1e-6, "n_groups": 1, "top_groups": 1}


def _router_options(router: str, n_experts: int, top_k: int, **given: Any) -> dict[str, Any]:
    """Check what the sigmoid router alone has."""
    n_groups, top_groups = given["n_groups"], given["top_groups"]
    require_whole_number(1, n_groups=n_groups, top_groups=top_groups)
    if router != "sigmoid":
        for name, default in _OF_SIGMOID.items():
            require(given[name] == default, name, given[name], f"{default} with router = {router!r}")
        return {}
    size, rest = divmod(n_experts, n_groups)
    require(
        not rest and (size > 1 or n_groups == 1), "n_groups", n_groups, f"groups of at least 2 of {n_experts} experts"
    )
    require(top_groups <= n_groups, "top_groups", top_groups, f"at most n_groups = {n_groups}")
    require(top_k <= top_groups * size, "top_k", top_k, f"at most the {top_groups * size} experts of top_groups")
    return given


class Routing(NamedTuple):
    """What a router decided: its logits, the chosen experts, and which tokens count (all of them if None)."""

    logits: Float[Tensor, "tokens n_experts"]
    chosen: Int[Tensor, "tokens top_k"]
    mask: Bool[Tensor, " tokens"] | None


def load_balancing_loss(routing: Sequence[Routing]) -> Float[Tensor, ""]:
    """Return n_experts sum_e f_e P_e, the mean over mixtures of experts (Fedus et al., arXiv 2101.03961, section 2.2).

    f_e is how often a token chooses expert e, and P_e the mean of its softmax probability; only P has a gradient. The
    loss is top_k if all experts are used alike, as in transformers, which counts all layers as one mixture.
    """
    losses = []
    for logits, chosen, mask in routing:
        counted = logits.new_ones(len(logits)) if mask is None else mask.to(logits.dtype)
        share = counted / counted.sum().clamp_min(1)
        times = torch.zeros_like(logits).scatter_(1, chosen, 1.0)
        losses.append(logits.shape[1] * ((share @ times) * (share @ logits.softmax(-1))).sum())
    return torch.stack(losses).mean()


def by_expert(chosen: Int[Tensor, "tokens top_k"], n_experts: int) -> tuple[Int[Tensor, " choices"], list[int]]:
    """Return all choices, as places in the flattened tensor, expert by expert, and how many each expert has."""
    flat = chosen.flatten()
    return flat.argsort(stable=True), flat.bincount(minlength=n_experts).tolist()


def _grouped(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, gated: bool) -> Tensor:
    """One product for each chosen expert; the others' weights are not read."""
    order, counts = by_expert(chosen, len(gate_up))
    rows = x.index_select(0, order // chosen.shape[1]).split(counts)
    # unbind: a gradient of one slice would be as large as that of all
    outputs = [
        _expert(part, first, second, gated)
        for part, first, second in zip(rows, gate_up.unbind(), down.unbind())
        if len(part) or not len(x)  # without tokens, so that weights have gradients of zeros
    ]
    return torch.cat(outputs)[order.argsort()].view(*chosen.shape, x.shape[1])


def expert_activation(x: Float[Tensor, "*n channels"], gated: bool) -> Float[Tensor, "*n d_expert"]:
    """Apply what stands between an expert's two matrices."""
    if not gated:
        return functional.relu(x).square()
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def _expert(x: Tensor, gate_up: Tensor, down: Tensor, gated: bool) -> Tensor:
    return functional.linear(expert_activation(functional.linear(x, gate_up), gated), down)


def _gathered(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, gated: bool) -> Tensor:
    """Copy the weights that each token needs: no size depends on the choices."""
    inner = expert_activation(torch.einsum("nd,nkhd->nkh", x, gate_up[chosen]), gated)
    return torch.einsum("nkh,nkdh->nkd", inner, down[chosen])


_any_choices = OneNode(
    "expert_outputs(Tensor x, Tensor gate_up, Tensor down, Tensor chosen, bool gated) -> Tensor",
    _grouped,
    lambda x, gate_up, down, chosen, gated: x.new_empty((*chosen.shape, x.shape[-1])),
    n_inputs=3,
    flops=lambda x, gate_up, down, chosen, gated: (
        2 * math.prod(chosen) * (math.prod(gate_up[1:]) + math.prod(down[1:]))
    ),
)


class Experts(nn.Module):
    """W_down (SiLU(W_gate x) * W_up x) with the weights of every expert, for the experts that each token chose; without
    a gate W_down max(W_up x, 0)^2.

    On a CPU only the weights of chosen experts are read. On other devices few tokens copy the weights that they need,
    which does not wait for the device.
    """

    def __init__(self, n_experts: int, d_model: int, d_expert: int, *, gated: bool = True) -> None:
        super().__init__()
        self.gated = gated
        self.gate_up = ExpertWeights(n_experts, d_model, (1 + gated) * d_expert)
        self.down = ExpertWeights(n_experts, d_expert, d_model)

    def forward(
        self, x: Float[Tensor, "tokens d_model"], chosen: Int[Tensor, "tokens top_k"]
    ) -> Float[Tensor, "tokens top_k d_model"]:
        """Apply the chosen experts to each token."""
        given = (x, self.gate_up.weight, self.down.weight, chosen, self.gated)
        are_few = not x.is_cpu and chosen.numel() <= len(self.gate_up.weight)
        if are_few or transforms_are_active():
            return _gathered(*given)
        outputs: Tensor = _grouped(*given) if has_numbers(*given[:-1]) else _any_choices(*given)
        return outputs


_NETWORKS = {name: FEED_FORWARDS[name] for name in ("swiglu", "relu-squared")}


class MixtureOfExperts(nn.Module):
    """y = sum over chosen experts e of w_e E_e(x), plus g S(x) if there is a shared expert S (Shazeer et al., arXiv
    1701.06538; gated experts as in Mixtral, arXiv 2401.04088; a shared one as in DeepSeekMoE, arXiv 2401.06066). With
    `d_latent`, chosen experts read A x, and B times their sum is added (Nemotron 3).

    A linear router chooses `top_k` experts for each token, and weighs them. No token is dropped. There are no biases
    and no dropout inside.

    Args:
        d_model: channels.
        d_hidden: hidden channels of an expert unless `d_expert` is given.
        n_experts: experts to choose from.
        top_k: experts that each token chooses.
        d_expert: hidden channels of an expert; `d_hidden` if None.
        d_shared: hidden channels of the shared expert, which sees every token; 0 for none.
        shared_gate: whether g = sigmoid(w_g x), as in Qwen's models; 1 otherwise.
        expert: the network of each expert, the shared one included: "swiglu" or "relu-squared".
        d_latent: channels that the chosen experts read and write; 0 for all of `d_model`.
        router: how experts are weighed: "softmax" (`Router`) or "sigmoid" (`SigmoidRouter`).
        normalise: whether the weights of the chosen experts add up to 1.
        epsilon: added to the sum by which the sigmoid router divides; 1e-6 in LFM2, 1e-20 in DeepSeek-V3.
        n_groups, top_groups: groups of experts, and those in which the sigmoid router lets a token choose.
        scale: what these weights are multiplied by.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        dropout: float = 0.0,
        *,
        biases: bool = True,
        n_experts: int = 8,
        top_k: int = 2,
        d_expert: int | None = None,
        d_shared: int = 0,
        shared_gate: bool = False,
        expert: str = "swiglu",
        d_latent: int = 0,
        router: str = "softmax",
        normalise: bool = True,
        epsilon: float = 1e-6,
        n_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        d_expert = d_hidden if d_expert is None else d_expert
        require_whole_number(1, n_experts=n_experts, top_k=top_k, d_expert=d_expert)
        for name, flag in {"shared_gate": shared_gate, "normalise": normalise}.items():
            require(isinstance(flag, bool), name, flag, "true or false")
        require(top_k <= n_experts, "top_k", top_k, f"at most n_experts = {n_experts}")
        require_whole_number(0, d_shared=d_shared, d_latent=d_latent)
        require(d_shared > 0 or not shared_gate, "shared_gate", shared_gate, "False with d_shared = 0")
        for name, number in {"scale": scale, "epsilon": epsilon}.items():
            require(isinstance(number, (int, float)), name, number, "a number")
        require_positive(scale=scale, epsilon=epsilon)
        network = choose("expert", _NETWORKS, expert)
        options = _router_options(router, n_experts, top_k, epsilon=epsilon, n_groups=n_groups, top_groups=top_groups)
        self.scale = scale
        self.router = choose("router", ROUTERS, router)(d_model, n_experts, top_k, normalise, **options)
        self.to_latent = nn.Linear(d_model, d_latent, bias=False) if d_latent else nn.Identity()
        self.experts = Experts(n_experts, d_latent or d_model, d_expert, gated=expert == "swiglu")
        self.from_latent = nn.Linear(d_latent, d_model, bias=False) if d_latent else nn.Identity()
        self.shared = network(d_model, d_shared, biases=False) if d_shared else None
        self.shared_gate = nn.Linear(d_model, 1, bias=False) if shared_gate else None

    @property
    def output_projection(self) -> nn.Module:
        """The experts' layers that write to the residual stream; `shared` has another."""
        return self.experts.down if isinstance(self.from_latent, nn.Identity) else self.from_latent

    def forward(
        self,
        x: Float[Tensor, "B L d_model"],
        routing: list[Routing] | None = None,
        mask: Bool[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L d_model"]:
        """Apply the chosen experts to each step. The list `routing` takes what the router decided, for its losses.

        mask: True where a step counts in those losses.
        """
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        weights, chosen = self.router.choose(logits)
        if routing is not None:
            routing.append(Routing(logits, chosen, None if mask is None else mask.flatten()))
        y = (self.experts(self.to_latent(tokens), chosen) * (self.scale * weights)[..., None]).sum(1).to(x.dtype)
        y = self.from_latent(y).view_as(x)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)
