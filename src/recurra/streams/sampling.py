"""From logits to the next token: settings, their functions, and the choice itself.

`sample` is the plain form, in torch and on any device. `choose` chooses the same tokens, faster, for a batch of streams
with separate settings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra._choices import RECENT_TOKENS
from recurra.checks import require, require_positive, require_share, require_whole_number, sentence
from recurra.layers.norms import at_least_float32
from recurra.ops._toolkit.backends import choose_backend


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How to choose the next token; the default draws from the model's own probabilities.

    The settings apply in the order listed here, each to the logits from the previous one.

    Raises:
        TypeError: `repetition_window`, `top_k` or a token of `logit_bias` is not a whole number.
        ValueError: a value is out of range, or would have no effect; the message names the field.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens."""
    repetition_penalty: float = 1.0
    """Above 1, recent tokens become less likely (see `penalise_repetition`)."""
    repetition_window: int = RECENT_TOKENS
    """Number of last tokens, read or generated, that count as recent; at most 64."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of all tokens generated so far (see `penalise_generated`)."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of these tokens once for each occurrence."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this share of the probability."""
    min_p: float | None = None
    """Draw from the tokens at least this many times as likely as the likeliest one, both after the temperature."""

    def __post_init__(self) -> None:
        biases = {f"logit_bias[{token}]": bias for token, bias in self.logit_bias.items()}
        for token in self.logit_bias:
            require_whole_number(0, **{"a token of logit_bias": token})
        added = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty, **biases}
        for name, value in added.items():
            require(math.isfinite(value), name, value, "a finite number")
        require_positive(repetition_penalty=self.repetition_penalty)
        fits = 1 <= self.repetition_window <= RECENT_TOKENS
        require(fits, "repetition_window", self.repetition_window, f"a number from 1 to {RECENT_TOKENS}")
        require_whole_number(1, repetition_window=self.repetition_window)
        has_effect = self.repetition_penalty != 1 or self.repetition_window == RECENT_TOKENS
        expected = f"{RECENT_TOKENS} without a repetition penalty, which alone looks at it"
        require(has_effect, "repetition_window", self.repetition_window, expected, "set repetition_penalty")
        fits = self.temperature >= 0 and math.isfinite(self.temperature)
        expected = "0, which takes the likeliest token, or a finite number above 0"
        require(fits, "temperature", self.temperature, expected)
        if self.top_k is not None:
            require_whole_number(1, top_k=self.top_k)
        shares = {"top_p": self.top_p, "min_p": self.min_p}
        require_share(**{name: share for name, share in shares.items() if share is not None})
        if self.temperature == 0:
            for name in ("top_k", "top_p", "min_p"):
                value, expected = getattr(self, name), "None at temperature 0, which takes the likeliest token"
                require(value is None, name, value, expected, f"omit {name}, or set a temperature above 0")

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty depends on how often each token was generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


_SMALLEST_TEMPERATURE = 1e-20  # below it, logits / temperature would overflow; the likeliest tokens share it all


def sample(
    logits: Float[Tensor, "*batch V"],
    config: SamplingConfig,
    generator: torch.Generator,
    recent: Int[Tensor, "*batch n"] | None = None,
    counts: Int[Tensor, "*batch V"] | None = None,
) -> Int[Tensor, "*batch"]:
    """Choose a token for each row.

    Args:
        logits: the model's output after the last token.
        config: how to choose.
        generator: the only source of randomness, on the logits' device; unused at temperature 0.
        recent: the last tokens of each row, oldest first, for the repetition penalty; None for none.
        counts: how often each token was generated, for the presence and frequency penalties; None for never.

    Raises:
        ValueError: there is no token to choose (see `draw`).
        IndexError: a token of `logit_bias` is not in the vocabulary.
    """
    logits = _adjusted(logits, config, recent, counts)
    return greedy(logits) if config.temperature == 0 else draw(logits, generator)


def distribution(
    logits: Float[Tensor, "*batch V"],
    config: SamplingConfig,
    recent: Int[Tensor, "*batch n"] | None = None,
    counts: Int[Tensor, "*batch V"] | None = None,
) -> Float[Tensor, "*batch V"]:
    """Return the probabilities, in float64, from which `sample` draws; at temperature 0, one token has probability 1.

    Arguments and errors are those of `sample`.
    """
    logits = _adjusted(logits, config, recent, counts)
    if config.temperature == 0:
        return nn.functional.one_hot(greedy(logits), logits.shape[-1]).double()
    _require_a_distribution(logits)
    return logits.softmax(-1, dtype=torch.float64)


def _adjusted(logits: Tensor, config: SamplingConfig, recent: Tensor | None, counts: Tensor | None) -> Tensor:
    """The logits that the settings leave; at temperature 0, those that bias and penalties leave."""
    logits = _penalised(logits, config, recent, counts)
    if config.temperature == 0:
        return logits
    if config.temperature < _SMALLEST_TEMPERATURE:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True), -math.inf)
    else:
        logits = apply_temperature(logits, config.temperature)
    if config.top_k is not None:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None:
        logits = keep_top_p(logits, config.top_p)
    if config.min_p is not None:
        logits = keep_min_p(logits, config.min_p)
    return logits


def _penalised(logits: Tensor, config: SamplingConfig, recent: Tensor | None, counts: Tensor | None) -> Tensor:
    """The logits after the bias and the penalties, in the order of vLLM's sampler."""
    if config.logit_bias:
        logits = at_least_float32(logits)
        tokens = torch.tensor(list(config.logit_bias), device=logits.device)
        biases = torch.tensor(list(config.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(-1, tokens, biases.expand(*logits.shape[:-1], -1))
    if recent is not None and config.repetition_penalty != 1:
        window = recent[..., max(0, recent.shape[-1] - config.repetition_window) :]
        logits = penalise_repetition(logits, window, config.repetition_penalty)
    if counts is not None and config.counts_tokens:
        logits = penalise_generated(logits, counts, config.presence_penalty, config.frequency_penalty)
    return logits


def penalise_repetition(
    logits: Float[Tensor, "*batch V"], recent: Int[Tensor, "*batch n"], penalty: float
) -> Float[Tensor, "*batch V"]:
    """Make recent tokens less likely: divide their positive logits by `penalty`, multiply their negative ones.

    The method of CTRL (arXiv 1909.05858, section 4.1), but negative logits are multiplied, as is common practice:
    dividing would raise them. How often a token occurs in `recent` makes no difference. A penalty of 1 changes nothing.
    Raises ValueError if it is not a finite number above 0.
    """
    require_positive(penalty=penalty)
    logits = at_least_float32(logits)
    chosen = logits.gather(-1, recent)
    return logits.scatter(-1, recent, (chosen * penalty).where(chosen < 0, chosen / penalty))


def penalise_generated(
    logits: Float[Tensor, "*batch V"], counts: Int[Tensor, "*batch V"], presence: float, frequency: float
) -> Float[Tensor, "*batch V"]:
    """Give logits - frequency * counts - presence * (counts > 0), OpenAI's presence and frequency penalties.

    `counts` says how often each token was generated. Negative penalties make these tokens more likely.
    """
    logits = at_least_float32(logits)
    counts = counts.to(logits.dtype)
    return logits - frequency * counts - presence * counts.clamp(max=1)


def apply_temperature(logits: Float[Tensor, "*batch V"], temperature: float) -> Float[Tensor, "*batch V"]:
    """Give logits / temperature: below 1 favours likely tokens, above 1 unlikely ones; the limit at 0 is `greedy`.

    Raises ValueError if the temperature is not a finite number above 0.
    """
    require_positive(temperature=temperature)
    return at_least_float32(logits) / temperature


def keep_top_k(logits: Float[Tensor, "*batch V"], k: int) -> Float[Tensor, "*batch V"]:
    """Set all but the k largest logits to -inf (Fan et al., arXiv 1805.04833, section 5.4).

    Logits equal to the k-th largest stay too. Raises TypeError or ValueError if k is not a whole number from 1.
    """
    require_whole_number(1, k=k)
    logits = at_least_float32(logits)
    smallest = logits.topk(min(k, logits.shape[-1]), -1).values[..., -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Float[Tensor, "*batch V"], p: float) -> Float[Tensor, "*batch V"]:
    """Keep the fewest likeliest tokens whose probabilities sum to p or more; set all other logits to -inf.

    Nucleus sampling (Holtzman et al., arXiv 1904.09751, section 3.1). The likeliest token always stays, and so do
    tokens as likely as the last one kept. The sums are in float64. Raises ValueError if p is not in (0, 1].
    """
    require_share(p=p)
    logits = at_least_float32(logits)
    if p == 1:
        return logits  # a sum that rounds up to 1 early must not cut off the rest
    falling = logits.sort(-1, descending=True).values
    reached = falling.softmax(-1, dtype=torch.float64).cumsum(-1)
    n_kept = 1 + (reached[..., :-1] < p).sum(-1, keepdim=True)
    return logits.masked_fill(logits < falling.gather(-1, n_kept - 1), -torch.inf)


def keep_min_p(logits: Float[Tensor, "*batch V"], p: float) -> Float[Tensor, "*batch V"]:
    """Set the logits of tokens less than p times as likely as the likeliest to -inf (Nguyen et al., arXiv 2407.01082).

    `sample` applies it last, after the temperature, as transformers does. Raises ValueError if p is not in (0, 1].
    """
    require_share(p=p)
    logits = at_least_float32(logits)
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -torch.inf)


def greedy(logits: Float[Tensor, "*batch V"]) -> Int[Tensor, "*batch"]:
    """Return the likeliest token, or the first of several equal ones. Raises ValueError like `draw`."""
    _require_a_distribution(logits)
    return logits.argmax(-1)


def draw(logits: Float[Tensor, "*batch V"], generator: torch.Generator) -> Int[Tensor, "*batch"]:
    """Draw a token from softmax(logits); a logit of -inf is never drawn.

    One number u in [0, 1) is drawn for each row, and the token is the first one at which the sum of the probabilities,
    in float64 and in the vocabulary's order, exceeds u.

    The generator, on the logits' device, is the only source of randomness: equal logits and seeds give equal tokens.

    Raises:
        ValueError: a logit is NaN or +inf, or every logit of a row is -inf.
    """
    _require_a_distribution(logits)
    shares = torch.rand(logits.shape[:-1], dtype=torch.float64, device=logits.device, generator=generator)
    sums = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    return (sums <= shares[..., None] * sums[..., -1:]).sum(-1)


def _require_a_distribution(logits: Tensor) -> None:
    largest = logits.amax(-1)  # NaN where any logit is NaN
    if not bool(largest.isfinite().all()):
        got, why = largest.flatten()[:8].tolist(), "with NaN, +inf or every token at -inf there is nothing to choose"
        raise ValueError(sentence("the largest logit of each row", got, "finite numbers", why))


class TokenChoice(NamedTuple):
    """How to choose the next token of one stream of a batch.

    `generator`, on the CPU, is the only source of randomness. `recent` contains the last tokens, for the repetition
    penalty, and `counts` how often each token was generated, for the other penalties.
    """

    config: SamplingConfig
    generator: torch.Generator
    recent: Sequence[int] = ()
    counts: Mapping[int, int] = {}

    def past(self, n_words: int) -> tuple[Tensor, Tensor | None]:
        """Return `recent` and `counts` as tensors on the CPU, the second only if a penalty counts."""
        recent = torch.tensor(self.recent, dtype=torch.int64, device="cpu")
        if not self.config.counts_tokens:
            return recent, None
        counts, n = np.zeros(n_words, np.int64), len(self.counts)
        counts[np.fromiter(self.counts, np.int64, n)] = np.fromiter(self.counts.values(), np.int64, n)
        return recent, torch.from_numpy(counts)


def choose(
    logits: Float[Tensor, "B V"], choices: Sequence[TokenChoice], *, backend: str = "auto"
) -> list[int | ValueError]:
    """Choose a token for each stream, independently of the other streams in the batch.

    Args:
        logits: after the last token of each stream.
        choices: how to choose for each.
        backend: "numba" runs one kernel over all streams, "reference" runs `sample` for each stream in turn; "auto"
            uses the kernel if Numba is installed. Their tokens differ only if rounding decides.

    Returns:
        A token for every stream, or an error if it has no token to choose (see `draw`).
    """
    logits = logits.detach().cpu()
    if choose_backend(backend, logits.device) == "reference":
        return [_alone(row, choice) for row, choice in zip(logits, choices)]
    tokens = _by_kernel(at_least_float32(logits), choices)
    return [token if token >= 0 else _alone(row, choice) for token, row, choice in zip(tokens, logits, choices)]


def _alone(logits: Tensor, choice: TokenChoice) -> int | ValueError:
    try:
        return int(sample(logits, choice.config, choice.generator, *choice.past(len(logits))))
    except ValueError as error:
        return error


def _by_kernel(logits: Tensor, choices: Sequence[TokenChoice]) -> list[int]:
    """Return the tokens; -1 where there is none."""
    from recurra.streams._sampling_kernels import choose_kernel

    n_rows, n_words = logits.shape
    settings = [_in_numbers(choice.config, n_words) for choice in choices]
    temperatures, ks, ps, belows = zip(*settings) if settings else ((), (), (), ())
    shares = [
        torch.rand((), dtype=torch.float64, device="cpu", generator=choice.generator).item()
        if choice.config.temperature
        else 0.0
        for choice in choices
    ]
    rows, tokens = _penalised_rows(logits, choices).contiguous().numpy(), np.empty(n_rows, np.int64)
    choose_kernel(
        rows,
        np.array(temperatures, rows.dtype),
        np.array(ks, np.int64),
        np.array(ps, np.float64),
        np.array(belows, rows.dtype),
        np.array(shares, np.float64),
        tokens,
        jobs=n_rows,
        work=n_rows * n_words,
    )
    return tokens.tolist()


def _in_numbers(config: SamplingConfig, n_words: int) -> tuple[float, int, float, float]:
    """Temperature, k, p, and how far below the largest a logit may lie."""
    if 0 < config.temperature < _SMALLEST_TEMPERATURE:
        return 1.0, 1, 1.0, -math.inf  # the likeliest, and those that equal it
    k = n_words if config.top_k is None else min(config.top_k, n_words)
    below = -math.inf if config.min_p is None else math.log(config.min_p)
    return config.temperature, k, 1.0 if config.top_p is None else config.top_p, below


def _penalised_rows(logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
    """Apply biases and penalties; this copies the logits if there are any."""
    penalised = [i for i, one in enumerate(choices) if _changes_logits(one)]
    if penalised:
        logits = logits.clone()
    for i in penalised:
        logits[i] = _penalised(logits[i], choices[i].config, *choices[i].past(logits.shape[-1]))
    return logits


def _changes_logits(choice: TokenChoice) -> bool:
    config = choice.config
    repeats = config.repetition_penalty != 1 and len(choice.recent) > 0
    return repeats or bool(config.logit_bias) or (config.counts_tokens and len(choice.counts) > 0)
