"""Solve Memory Horizon with weights set by hand in the published model, and score them on the test sequences.

Let i count the numbers since the last reset, from 0, and let f_c(l) = cos(theta_c l) with theta_c = pi (c + 1/2) / N
and c < N. There are g_c(i) such that sum_c f_c(l) g_c(i) is (-1)^i if l = i, and 0 for all other l and i with
l + i < 2 N. Numbers i and n form a pair if i + n = t, so for t < 2 N

    target(t) = sum_{n <= t} sum_c f_c(t - n) x_n (sum_{i < n} x_i g_c(i) + g_c(n))   modulo 51,

where g_c(n) adds the number in the middle. Block 0 counts steps (as sines) and keeps the previous number. Block 1 sums
x_i g_c(i) with gates of 1. Block 2 forms the outer sum with gates exp(i theta_c), and its feed-forward network takes
the remainder. Block 3 does nothing. All gates close at a reset. Signals are small beside a constant in the residual
stream, so that the norms hardly change them. 64 channels are enough for N = 58: python recipes/memory-horizon/exact.py
"""

import math
from pathlib import Path

import torch
from torch.nn import functional

from recurra.train import load_recipe

N = 58
COUNTERS = N + 1
# Channels of the residual stream after the sines. REST holds minus the sum of all others, so that the mean is 0.
NUMBER, PREVIOUS, SUM, CONSTANT, REST = (*range(COUNTERS, COUNTERS + 4), 63)
SIGNAL, UNIT = 1e-5, 5e-5  # scales of the signals and of the sum
LEVEL = math.sqrt(32)  # of the constant: the stream's variance is close to 1
MODULUS, FOLDS = 51, range(-3, 5)
RESET = 4 * MODULUS * UNIT  # what the reset token adds to the sum: 0 modulo 51


def sines(steps: torch.Tensor) -> torch.Tensor:
    """Return what block 0 computes: (COUNTERS, steps)."""
    angles = math.pi * (torch.arange(COUNTERS).double() + 0.5) / COUNTERS
    return torch.sin(angles[:, None] * (steps.double() + 0.5))


def write(weight: torch.Tensor, channel: int, column: int, value: float) -> None:
    """Let a column of a matrix write to a channel of the stream, and its negative to REST."""
    weight[channel, column] += value
    weight[REST, column] -= value


def heads(block: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the weights of k and v, and their biases; q is 1."""
    qkv = block.mixer.qkv
    qkv.bias[:64] = 1
    return qkv.weight[64:128], qkv.weight[128:], qkv.bias[64:128], qkv.bias[128:]


@torch.no_grad()
def set_weights(model: torch.nn.Module, phase_scale: float) -> None:
    """Replace all weights of a model of 4 blocks of 64 channels."""
    c = torch.arange(N).double()
    theta = math.pi * (c + 0.5) / N
    f = torch.cos(theta * c[:, None])  # (l, c)
    g = torch.linalg.solve(f, torch.diag((-1.0) ** c))  # (c, i)
    from_sines = torch.linalg.inv(sines(torch.arange(COUNTERS)))
    g_now, g_before = (functional.pad(g, sides) @ from_sines for sides in ((0, 1), (1, 0)))  # g(n) and g(n - 1)

    for parameter in model.parameters():
        parameter.zero_()
    for norm in (model.norm, *(x for block in model.blocks for x in (block.norm_mixing, block.norm_feed_forward))):
        norm.weight.fill_(math.sqrt(1 + norm.eps))
    gates = [block.mixer.transition.projection for block in model.blocks]
    for gate in gates:
        gate.bias[:64] = 20  # |a| = 1
        gate.weight[:64, SUM] = -60 / RESET
    embedding = model.embedding.weight
    embedding[:, CONSTANT] = LEVEL
    embedding[:5, NUMBER] = SIGNAL * torch.arange(5)
    embedding[5, SUM] = RESET
    embedding[:, REST] = -embedding.sum(1)

    k, v, k_bias, v_bias = heads(model.blocks[0])
    k_bias.fill_(1)
    k[:, SUM] = -1 / RESET
    v_bias[:COUNTERS] = 1
    angles = math.pi * (torch.arange(COUNTERS) + 0.5) / COUNTERS
    gates[0].bias[64 : 64 + COUNTERS] = angles / phase_scale
    output = model.blocks[0].mixer.output_projection
    # With h = half: sum_{j <= n} cos(2 h j) = 1/2 + sin(h (2 n + 1)) / (2 sin h)
    for channel, half in enumerate((angles / 2).tolist()):
        write(output.weight, channel, channel, SIGNAL * 2 * math.sin(half))
        output.bias[channel] -= SIGNAL * math.sin(half)
        output.bias[REST] += SIGNAL * math.sin(half)
    v[COUNTERS : COUNTERS + 2, NUMBER] = 1 / SIGNAL  # gates of 0.01 and -0.01: half the difference is 0.01 x_{n-1}
    gates[0].bias[COUNTERS : COUNTERS + 2] = math.log(0.01 / 0.99)
    gates[0].bias[64 + COUNTERS + 1] = math.pi / phase_scale
    write(output.weight, PREVIOUS, COUNTERS, SIGNAL / 0.02)
    write(output.weight, PREVIOUS, COUNTERS + 1, -SIGNAL / 0.02)

    k, v, _, _ = heads(model.blocks[1])
    k[:N, PREVIOUS] = 1 / SIGNAL
    v[:N, :COUNTERS] = g_before / SIGNAL
    back = SIGNAL * torch.linalg.pinv(g_now)
    output = model.blocks[1].mixer.output_projection
    output.weight[:COUNTERS, :N] = back
    output.weight[REST, :N] = -back.sum(0)

    k, v, _, _ = heads(model.blocks[2])
    k[:N, NUMBER] = 1 / SIGNAL
    v[:N, :COUNTERS] = g_now / SIGNAL
    gates[2].bias[64 : 64 + N] = theta / phase_scale
    for head in range(N):
        write(model.blocks[2].mixer.output_projection.weight, SUM, head, UNIT)

    set_remainder(model.blocks[2].feed_forward[0], model.blocks[2].feed_forward[3])
    answer = torch.arange(MODULUS)
    model.head.weight[:, SUM] = 0.5 * answer / UNIT
    model.head.bias.copy_(-0.25 * answer**2)


def set_remainder(into: torch.nn.Linear, out: torch.nn.Linear) -> None:
    """Let a feed-forward network bring the sum to -1/2 to 50.5, by steps of height 51 at 51 fold - 1/2."""
    steep, width = 60.0, 0.2  # of the two GELUs that make a step
    for number, (fold, sign) in enumerate((fold, sign) for fold in FOLDS for sign in (1, -1)):
        into.weight[number, SUM] = steep / UNIT
        into.bias[number] = steep * (sign * width - (MODULUS * fold - 0.5))
        write(out.weight, SUM, number, -sign * MODULUS * UNIT / (2 * steep * width))
    shift = MODULUS * UNIT * sum(fold <= 0 for fold in FOLDS)
    out.bias[SUM] += shift
    out.bias[REST] -= shift


def main() -> None:
    """Print the test accuracy, overall and by span."""
    experiment = load_recipe(Path(__file__).with_name("data-controlled-zero-branches.yaml"))
    data = experiment.data.build()
    model = experiment.build_model(data).eval()
    set_weights(model, experiment.model.mixer_options["phase_scale"])
    test = data.places("test")
    with torch.inference_mode():
        answers = torch.cat([model(tokens)[0].argmax(-1) for tokens in data.tokens[test].split(50)])
    right, spans = answers == data.targets[test], data.spans("test")
    print(f"test accuracy {right.float().mean():.4f}")
    for first, last in ((0, 2 * N), (2 * N + 1, data.config.sequence_length)):
        print(f"spans {first} to {last}: {right[(spans >= first) & (spans <= last)].float().mean():.4f}")


if __name__ == "__main__":
    main()
