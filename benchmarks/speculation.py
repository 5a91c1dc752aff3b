"""Speculative decoding: tokens a second of a model alone, and with drafts from a small one.

    python -m benchmarks.speculation

A large GateLoop model (12 layers of 624 channels) and a small one (1 layer of 128) learn the same synthetic text in a
few updates: every token has one successor, which follows it in `--share` of the cases. Both decode greedily in float32,
prepared for decoding. The large model alone and with drafts of several lengths take turns, and the texts have to be the
same. Drafts pay where reading several tokens in one call costs little more than reading one.
"""

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.table import Row, save, show
from benchmarks.timing import interleaved, median_ratio
from recurra._process import keep_large_blocks
from recurra.decoding import prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.streams.sampling import SamplingConfig
from recurra.streams.speculation import Speculation
from recurra.streams.stream import Stream
from recurra.train.config import OptimizerConfig
from recurra.train.optimizer import build_optimizer

N_TOKENS, BATCH, LENGTH = 2000, 8, 128
LARGE, SMALL = (12, 624, 1872), (1, 128, 256)
GREEDY = SamplingConfig(temperature=0)


def draw(share: float, shape: tuple[int, int]) -> Tensor:
    """Draw texts in which `successor[token]` follows a token in `share` of the cases."""
    successor = torch.randperm(N_TOKENS, generator=torch.Generator().manual_seed(1))
    steps = [torch.randint(N_TOKENS, (shape[0],))]
    for _ in range(shape[1] - 1):
        surprises = torch.rand(shape[0]) >= share
        steps.append(torch.where(surprises, torch.randint(N_TOKENS, (shape[0],)), successor[steps[-1]]))
    return torch.stack(steps, 1)


def trained(shape: tuple[int, int, int], share: float, n_updates: int) -> LanguageModel:
    """Train a model of (layers, channels, feed-forward channels)."""
    torch.manual_seed(0)
    layers, channels, inner = shape
    options = {"n_heads": channels}
    config = LanguageModelConfig(
        N_TOKENS, None, layers, channels, inner, mixer="gateloop", mixer_options=options, tie_embeddings=True
    )
    model = LanguageModel(config).train()
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=1e-3, gradient_clip=1.0))
    for number in range(n_updates):
        tokens = draw(share, (BATCH, LENGTH + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])[0].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == n_updates - 1:
            print(
                f"{layers} layers of {channels}: update {number + 1} of {n_updates}, loss {loss.item():.2f}", flush=True
            )
    return model.eval()


class Decoder:
    """Continues one prompt by `n_tokens`; each call starts anew."""

    def __init__(
        self, large: LanguageModel, small: LanguageModel, prompt: Tensor, n_drafted: int, n_tokens: int
    ) -> None:
        self.stream, self.draft = (Stream(model, runner=prepare(model)) for model in (large, small))
        self.prompt, self.n_drafted, self.n_tokens = prompt, n_drafted, n_tokens
        self.tokens: list[int] = []
        self.acceptance_rate = float("nan")

    def __call__(self) -> None:
        self.stream.reset()
        self.draft.reset()
        if not self.n_drafted:
            self.stream.feed(self.prompt)
            self.tokens = list(self.stream.generate(self.n_tokens, sampling=GREEDY))
            return
        speculation = Speculation(self.stream, self.draft, n_drafted=self.n_drafted)
        speculation.feed(self.prompt)
        self.tokens = list(speculation.generate(self.n_tokens, sampling=GREEDY))
        self.acceptance_rate = speculation.drafts.acceptance_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.95, help="predictable tokens of the text (default: 0.95)")
    parser.add_argument("--updates", type=int, default=150, help="updates of the large model (default: 150)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 7], help="tokens of a draft (default: 2 4 7)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a text (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="timed texts of each (default: 5)")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    large = trained(LARGE, arguments.share, arguments.updates)
    small = trained(SMALL, arguments.share, 3 * arguments.updates)
    prompt = draw(1.0, (1, 16))[0]
    decoders = {n: Decoder(large, small, prompt, n, arguments.tokens) for n in (0, *arguments.drafts)}
    seconds = interleaved({str(n): decoder for n, decoder in decoders.items()}, rounds=arguments.rounds)
    title = f"{arguments.tokens} tokens, greedily; the ratio is the time alone over the time with drafts"
    rows = []
    for n, decoder in decoders.items():
        name = f"drafts of {n}, {decoder.acceptance_rate:.0%} accepted" if n else "alone"
        same = "" if decoder.tokens == decoders[0].tokens else ", ANOTHER TEXT"
        rate = arguments.tokens / statistics.median(seconds[str(n)])
        name = f"{name}, {rate:.0f} tokens/s{same}"
        rows.append(Row("speculative decoding", name, seconds[str(n)], median_ratio(seconds["0"], seconds[str(n)])))
    save(Path("runs/benchmarks-speculation.json"), {title: show(title, rows)})


if __name__ == "__main__":
    main()
