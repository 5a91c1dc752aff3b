"""What training minimises, and back-propagation through long streams in the memory of one piece."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recurra.checks import kind_of, require_tensor, require_whole_number, sentence
from recurra.data.batches import IGNORED_TARGET, BatchSource, LevelledSource
from recurra.layers.embeddings import few_targets
from recurra.layers.experts import MixtureOfExperts, Routing, load_balancing_loss
from recurra.models.language_model import LanguageModel
from recurra.models.shell import LanguageModelShell
from recurra.train._ranks import Ranks
from recurra.train.config import TrainingConfig
from recurra.train.metrics import RunningSums
from recurra.train.sequence_parallel import Pieces, in_pieces


def checkpointed(
    module: Callable[..., tuple[Tensor, Any]],
    x: Shaped[Tensor, "B L *rest"],
    state: Any = None,
    *,
    piece: int,
    loss: Callable[..., Tensor] | None = None,
    targets: Shaped[Tensor, "B L *targets"] | None = None,
    mask: Bool[Tensor, "B L"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
) -> tuple[Tensor, Any]:
    """Run `module` over a stream piece by piece, and recompute each piece in the backward pass.

    Outputs, last state and all gradients equal those of one call `module(x, state)`. From the forward pass, only the
    states between the pieces stay in memory, so the peak is about that of one piece. The cost is a second forward
    pass. Dropout draws the same numbers in both (Chen et al., arXiv 1604.06174, with pieces of time as the segments).

        y, state = checkpointed(mixer, x, state, piece=4096)
        loss, state = checkpointed(model, tokens, piece=4096, loss=summed, targets=targets)

    Args:
        module: any mixer or model, or a function of the same form.
        x: its input.
        state: the state after the previous steps; None starts a stream. Gradients flow into it.
        piece: steps per piece; the last piece may be shorter. Video models read whole segments and need a multiple of
            their frames.
        loss: called on the output of each piece, as `loss(y)`, or `loss(y, targets of the piece)`. The sum of the
            results replaces y, so the outputs of two pieces are never in memory together: use it if they are large,
            such as logits. It is also recomputed.
        targets: for `loss`; cut along time like x.
        mask: (B, L), True where a step counts, cut along time, for a module that takes it.
        reset: (B, L), True at the first step of each new sequence, also cut along time.

    Returns:
        y, or the sum of the losses; and the state after the last step.

    Raises:
        ValueError: targets, mask or reset are not as long as x, or there are targets without a loss.
    """
    require_whole_number(1, piece=piece)
    require_tensor("x", x)
    if x.dim() < 2:
        raise ValueError(sentence("x", kind_of(x), "at least two dimensions, (B, L, ...)"))
    if targets is not None and loss is None:
        raise ValueError(sentence("targets", kind_of(targets), "None without a loss that takes them"))
    for name, one in {"targets": targets, "mask": mask, "reset": reset}.items():
        if one is not None and one.shape[:2] != x.shape[:2]:
            expected = f"({', '.join(map(str, x.shape[:2]))}, ...), as x"
            raise ValueError(sentence(name, f"of shape {tuple(one.shape)}", expected))
    pieces = x.split(piece, 1)
    along = (mask, reset, targets)
    cut = (len(pieces) * (None,) if one is None else one.split(piece, 1) for one in along)
    results: list[Tensor] = []
    for here in zip(pieces, *cut):
        result, state = checkpoint(_run, module, loss, state, *here, use_reentrant=False)
        if loss is not None and results:
            result = results.pop() + result
        results.append(result)
    return (torch.cat(results, 1) if loss is None else results[0]), state


def _run(
    module: Callable[..., tuple[Tensor, Any]],
    loss: Callable[..., Tensor] | None,
    state: Any,
    x: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
    targets: Tensor | None,
) -> tuple[Tensor, Any]:
    given = {name: one for name, one in (("mask", mask), ("reset", reset)) if one is not None}
    y, state = module(x, state, **given)
    if loss is None:
        return y, state
    return loss(y) if targets is None else loss(y, targets), state


class Levels:
    """Goes through the levels of a `LevelledSource`; any other source has one level, which never ends.

    A level is learned if the mean training loss of a whole epoch is below `level_loss`. The next one then begins with
    the next epoch.
    """

    def __init__(self, source: BatchSource, device: torch.device | str) -> None:
        self.source = source
        """The batches of the present level."""
        self._levelled = source if isinstance(source, LevelledSource) else None
        self._sums = RunningSums(device)
        self._enter(0)
        self._trained = 0

    def _enter(self, level: int) -> None:
        self._level = level
        if self._levelled is not None:
            self.source = self._levelled.at_level(level)

    @property
    def record(self) -> dict[str, int]:
        """The level of the last batch, for the log; empty if there is only one."""
        return {} if self._levelled is None else {"level": self._trained}

    def add(self, loss: Tensor, n_targets: int) -> None:
        """Add a batch of the present epoch: its summed loss, and the number of its targets that count."""
        self._trained = self._level
        if self._levelled is not None:
            self._sums.add(loss, n_targets, 0)

    def end_epoch(self, ranks: Ranks) -> None:
        """Go to the next level if this one is learned. All ranks call it together."""
        if self._levelled is None:
            return
        self._sums.add_up(ranks)
        learned = self._sums.mean_loss() < self._levelled.level_loss
        self._enter(min(self._level + learned, self._levelled.n_levels))
        self._sums = RunningSums(self._sums.loss.device)

    def state_dict(self, ranks: Ranks) -> dict[str, Any]:
        """Return the level and the sums of its present epoch, over all ranks, as numbers."""
        return {"level": self._level, "epoch": self._sums.state_dict(ranks)}

    def load_state_dict(self, saved: Mapping[str, Any], ranks: Ranks) -> None:
        """Continue from the numbers of `state_dict`."""
        self._enter(saved["level"])
        self._trained = self._level
        self._sums.load_state_dict(saved["epoch"], share=int(ranks.is_first))


def few_positions(targets: Int[Tensor, "B L"], n_targets: int, *, padded: bool) -> Int[Tensor, " few"] | None:
    """Return the numbers of the positions whose targets count, row by row, if logits should be formed only there.

    n_targets: how many count. padded: add positions that do not count, up to a fourth of all, so that every batch has
    as many: other sizes would need other graphs.
    """
    if not few_targets(n_targets, targets):
        return None
    counted = (targets != IGNORED_TARGET).flatten()
    others = (~counted).nonzero().flatten()[: targets.numel() // 4 - n_targets if padded else 0]
    return torch.cat([counted.nonzero().flatten(), others])


class Objective(nn.Module):
    """A model as training calls it, once, so that DDP, FSDP and Fabric's precision see one module like any other."""

    def __init__(self, model: nn.Module, config: TrainingConfig, pieces: Pieces | None = None) -> None:
        super().__init__()
        self.model, self.config, self.pieces = model, config, pieces
        if (config.activation_penalty or config.change_penalty) and not isinstance(model, LanguageModelShell):
            names = "training.activation_penalty and .change_penalty"
            got = f"{config.activation_penalty} and {config.change_penalty}, for a {type(model).__name__}"
            raise ValueError(sentence(names, got, "0 but for a language model"))
        if config.balance_penalty and not any(isinstance(part, MixtureOfExperts) for part in model.modules()):
            expected = "0 but for a model with mixtures of experts"
            raise ValueError(sentence("training.balance_penalty", config.balance_penalty, expected))
        if config.sequence_parallel > 1 and config.strategy == "fsdp" and not isinstance(model, LanguageModel):
            expected = "ddp with training.sequence_parallel for a model that reads segments"
            hint = "its ranks take turns, and FSDP needs all of them at once"
            raise ValueError(sentence("training.strategy", "fsdp", expected, hint))

    def forward(
        self, inputs: Tensor, targets: Tensor, n_targets: float | Tensor, state: Any, **extra: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Return the summed loss in nats of a batch, the sum to minimise and the next state.

        extra: `positions` from `few_positions`, and what the model takes.
        """
        losses: list[Tensor] = []

        def run(entering: Any) -> tuple[Tensor, Any]:
            loss, penalty, leaving = self._loss(inputs, targets, entering, **extra)
            losses.append(loss)
            return loss + n_targets * penalty, leaving

        objective, state = run(state) if self.pieces is None else in_pieces(self.model, run, state, self.pieces)
        return losses[0], objective, state

    def _loss(
        self, inputs: Tensor, targets: Tensor, state: Any, positions: Tensor | None = None, **extra: Any
    ) -> tuple[Tensor, Tensor | float, Any]:
        model: Any = self.model
        if not isinstance(model, LanguageModelShell):
            losses, state = model.loss(inputs, targets, state, **extra)
            return losses.sum(), 0.0, state
        # The same methods are called whether targets are few or not: FSDP gathers its parameters at each call.
        routing: list[Routing] = []
        wanted = routing if self.config.balance_penalty else None
        hidden, state = model.hidden(inputs, state, **extra, routing=wanted)
        penalty = _penalty(hidden, self.config, **extra)
        if routing:
            penalty = penalty + self.config.balance_penalty * load_balancing_loss(routing)
        if positions is not None:
            hidden, targets = (x.flatten(0, 1)[positions][None] for x in (hidden, targets))
        return model.losses(hidden, targets).sum(), penalty, state


def _penalty(
    hidden: Float[Tensor, "B L d_model"], config: TrainingConfig, cu_seqlens: Tensor | None = None
) -> Tensor | float:
    """The penalties of AWD-LSTM (Merity et al., 2017) on what the head reads, dropout included: AR and TAR."""
    penalty: Tensor | float = 0.0
    wide = hidden.float()
    if config.activation_penalty:
        penalty = penalty + config.activation_penalty * wide.square().mean()
    if config.change_penalty and wide.shape[1] > 1:
        changes = wide.diff(dim=1).square()
        if cu_seqlens is not None:
            within = torch.ones(wide.shape[1] + 1, dtype=torch.bool, device=changes.device)
            within[cu_seqlens.to(changes.device)] = False  # from one sequence to the next
            changes = changes[:, within[1:-1]]
        if changes.numel():
            penalty = penalty + config.change_penalty * changes.mean()
    return penalty
