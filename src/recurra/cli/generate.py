"""`recurra generate`: continue a text, or an endless stream of it, with a trained language model."""

import sys
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch import nn

from recurra._process import chosen_device, is_first_launched, keep_large_blocks, n_launched
from recurra.checks import sentence
from recurra.data._files import joined
from recurra.data.tokenizers import BytePairEncoding
from recurra.decoding.steps import prepare
from recurra.streams.continuation import GenerationConfig, first_tokens
from recurra.streams.sampling import SamplingConfig
from recurra.streams.speculation import Drafts, Speculation
from recurra.streams.stream import Stream, Streams
from recurra.train._ranks import Ranks
from recurra.train.run import open_run

_LINE_LENGTH = 2**16
"""Maximum number of characters of the standard input that are fed at once."""


def generate(arguments: Namespace) -> int:
    sampling = _sampling(arguments)
    _require_continuations(arguments)
    device = _device(arguments)
    keep_large_blocks()
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=arguments.overrides)
    tokenizer = trained.tokenizer  # first: only text runs have one
    trained.model.to(device)
    streams = Streams(trained.model, tokenizer, runner=_runner(trained.model, arguments))
    stream = streams.open(0)
    source = stream if arguments.draft is None else _with_drafts(stream, arguments, device)
    if arguments.load_state:
        stream.load(arguments.load_state)
    read = _timed(_feed, source, arguments)
    if arguments.continuations == 1:
        written = _timed(_write, source, arguments, sampling)
    else:
        with _joined_ranks() as ranks:
            written = _timed(_write_side_by_side, streams, arguments, sampling, ranks)
    if arguments.save_state:
        stream.save(arguments.save_state)
    if is_first_launched():
        print(f"read {read}, wrote {written}", file=sys.stderr)
        if isinstance(source, Speculation) and source.drafts.n_drafted:
            print(_acceptance(source.drafts), file=sys.stderr)
    return 0


def _sampling(arguments: Namespace) -> SamplingConfig:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window")
    settings = {name: getattr(arguments, name) for name in (*names, "presence_penalty", "frequency_penalty")}
    sampling = SamplingConfig(logit_bias=_biases(arguments.logit_bias), **settings)
    if not 0 <= arguments.seed < 2**63:
        raise ValueError(f"--seed is {arguments.seed}; expected a number from 0 to 2^63 - 1")
    return sampling


def _biases(words: Sequence[str]) -> dict[int, float]:
    try:
        pairs = [word.split("=") for word in words]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError as error:
        expected = "TOKEN=BIAS, a token id and a number"
        raise ValueError(sentence("--logit-bias", ", ".join(map(repr, words)), expected)) from error


def _require_continuations(arguments: Namespace) -> None:
    if arguments.draft is None and arguments.draft_tokens is not None:
        raise ValueError(f"--draft-tokens is {arguments.draft_tokens}; expected together with --draft RUN")
    count = arguments.continuations
    if count < 1:
        raise ValueError(f"-n is {count}; expected at least 1")
    if arguments.seed + count > 2**63:
        raise ValueError(f"-n is {count} from seed {arguments.seed}; expected seeds below 2^63")
    if count < n_launched():
        raise ValueError(f"-n is {count}; expected at least {n_launched()}, one for each rank")
    if n_launched() > 1 and arguments.prompt == "-":
        raise ValueError("--prompt is '-'; expected the text itself, which every rank can read")
    for option, value in (("--draft", arguments.draft), ("--save-state", arguments.save_state)):
        if count > 1 and value is not None:
            raise ValueError(f"-n is {count}; expected 1 with {option}, which takes one stream")


def _device(arguments: Namespace) -> str:
    device = chosen_device(arguments.device, "--device")
    if device != "cpu" and arguments.weights is not None:
        got = f"{arguments.weights} with --device {arguments.device}"
        raise ValueError(sentence("--weights", got, "--device cpu", "packed weights run on the CPU only"))
    return device


def _runner(model: nn.Module, arguments: Namespace) -> nn.Module | None:
    """Return the model's copy for decoding if --weights asks for one."""
    return None if arguments.weights is None else prepare(model, arguments.weights)


def _with_drafts(stream: Stream, arguments: Namespace, device: str) -> Speculation:
    trained = open_run(arguments.draft)
    model = trained.model.to(device)
    draft = Stream(model, trained.tokenizer, runner=_runner(model, arguments))
    options = {} if arguments.draft_tokens is None else {"n_drafted": arguments.draft_tokens}
    return Speculation(stream, draft, **options)


def _feed(stream: Stream | Speculation, arguments: Namespace) -> int:
    before = stream.position
    tokenizer = (stream.stream if isinstance(stream, Speculation) else stream).tokenizer
    if arguments.prompt == "-":
        texts = _lines(sys.stdin.readline)
        spanning = isinstance(tokenizer, BytePairEncoding) and not tokenizer.encodes_lines_apart
        for text in joined(texts, _LINE_LENGTH) if spanning else texts:  # most tokens are those of the whole
            stream.feed(text)
    elif arguments.prompt:
        stream.feed(arguments.prompt)
    if not stream.position:  # a stream has to begin somewhere, as a line does
        assert tokenizer is not None  # a run over text has one
        stream.feed(first_tokens(tokenizer))
    return stream.position - before


def _lines(readline: Callable[[int], str], length: int = _LINE_LENGTH) -> Iterator[str]:
    """Read a text line by line; split lines longer than `length` into parts, before a blank if they have one."""
    held = ""
    while block := readline(length):
        text = held + block
        end = len(text)
        if not text.endswith("\n") and len(block) == length:
            end = max(text.rfind(" "), text.rfind("\t"))
            end = end if end > 0 else len(text)
        if text[:end]:
            yield text[:end]
        held = text[end:]
    if held:
        yield held


def _write(stream: Stream | Speculation, arguments: Namespace, sampling: SamplingConfig) -> int:
    before, last = stream.position, ""
    # A file or another program gets the continuation alone.
    read = arguments.prompt if sys.stdout.isatty() and arguments.prompt not in (None, "-") else ""
    pieces = stream.generate_text(arguments.max_tokens, stop=arguments.stop, sampling=sampling, seed=arguments.seed)
    for last in pieces:
        print(read + last, end="", flush=True)
        read = ""
    if not last.endswith("\n"):
        print(flush=True)
    return stream.position - before


def _write_side_by_side(streams: Streams, arguments: Namespace, sampling: SamplingConfig, ranks: Ranks) -> int:
    """Continue the text of stream 0 several times, shared by the ranks; print each continuation; count all tokens."""
    start, count = streams[0].position, arguments.continuations
    mine = range(ranks.rank * count // ranks.count, (ranks.rank + 1) * count // ranks.count)
    for name in mine:
        if name > 0:
            streams.fork(0, name)
    options: dict[str, Any] = {"max_tokens": arguments.max_tokens, "sampling": sampling, "stop": arguments.stop}
    configs: dict[Hashable, GenerationConfig] = {
        name: GenerationConfig(seed=arguments.seed + name, **options) for name in mine
    }
    texts: dict[Hashable, str] = dict.fromkeys(configs, "")
    for pieces in streams.generate_text(configs):
        for which, piece in pieces.items():
            texts[which] += piece
    everywhere = [text for part in ranks.gather(list(texts.values())) for text in part]
    for number, text in enumerate(everywhere if ranks.is_first else (), 1):
        print(f"--- {number} ---", text, sep="\n", end="" if text.endswith("\n") else "\n", flush=True)
    return int(ranks.total(sum(streams[name].position - start for name in mine))[0])


@contextmanager
def _joined_ranks() -> Iterator[Ranks]:
    """Yield the ranks that torchrun started, which can exchange plain data; one rank without torchrun."""
    if n_launched() == 1:
        yield Ranks()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _timed(action: Callable[..., int], *given: Any) -> str:
    """Do something to a number of tokens, and say how many and how fast."""
    start = perf_counter()
    n_tokens = action(*given)
    rate = f" ({n_tokens / (perf_counter() - start):,.1f} tokens/s)" if n_tokens else ""
    return f"{n_tokens:,} tokens{rate}"


def _acceptance(drafts: Drafts) -> str:
    accepted = f"accepted {drafts.n_accepted:,} of {drafts.n_drafted:,} drafted tokens ({drafts.acceptance_rate:.0%})"
    return f"{accepted}, in {drafts.n_calls:,} calls of the model"
