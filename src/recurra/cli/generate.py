"""`recurra generate`: a trained language model goes on with a text, or with an endless stream of it."""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from torch.nn.utils import parametrize

from recurra.cli.arguments import command_parser, split_overrides
from recurra.decoding import NUMBERS
from recurra.generation import SamplingConfig, Stream
from recurra.runs import open_run
from recurra.training.allocator import keep_large_blocks

LINE_LENGTH = 2**16
"""Letters of a line of the standard input that are fed at once."""


def run(words: Sequence[str]) -> int:
    """Feed the prompt and print what comes after it, token by token; the speed goes to the standard error."""
    own, overrides = split_overrides(words)
    arguments = _parser().parse_args(own)
    sampling = _sampling(arguments)
    if not 0 <= arguments.seed < 2**63:
        raise ValueError(f"--seed is {arguments.seed}; expected a number from 0 to 2^63 - 1")
    keep_large_blocks()
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=overrides)
    tokenizer = trained.tokenizer  # first: only runs over text have one
    stream = Stream(trained.model, tokenizer, weights=arguments.weights)
    # What a model makes from its parameters at every call, the orthogonal matrices of an NCGRU, is made once here.
    with parametrize.cached():
        if arguments.load_state:
            stream.load(arguments.load_state)
        start = perf_counter()
        n_read = _feed(stream, arguments)
        read_seconds = perf_counter() - start
        start = perf_counter()
        n_written = _write(stream, arguments, sampling)
        write_seconds = perf_counter() - start
    if arguments.save_state:
        stream.save(arguments.save_state)
    print(f"read {_speed(n_read, read_seconds)}, wrote {_speed(n_written, write_seconds)}", file=sys.stderr)
    return 0


def _parser() -> Any:
    parser = command_parser(
        "generate",
        "Go on with a text. What is printed follows the prompt as it stands; a word-level model starts it with the "
        "blank between two words. With --data.path FOLDER a run that has no tokenizer of its own finds its corpus.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder; of a model over text")
    add = parser.add_argument
    add(
        "--prompt",
        metavar="TEXT",
        help="what to go on with; - reads the standard input, line by line and in constant memory, and goes on where "
        "it ends (default: a line's start, or where the loaded state stands)",
    )
    add("--max-tokens", type=int, default=100, metavar="N", help="how many tokens to add (default: 100)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 for the likeliest token (default: 1)")
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest tokens with the share P of the probability")
    add("--min-p", type=float, metavar="P", help="draw among tokens at least P times as likely as the likeliest")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: tokens among the last ones become less likely (default: 1)",
    )
    add(
        "--repetition-window",
        type=int,
        default=SamplingConfig.repetition_window,
        metavar="N",
        help="how many of the last tokens count for that (default: %(default)s, the most)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    add("--load-state", metavar="FILE", help="go on from a state that --save-state wrote")
    add("--save-state", metavar="FILE", help="write the state after the last token, to go on from later")
    add(
        "--weights",
        choices=NUMBERS,
        help="run a copy made for decoding on a CPU, its weights kept as these numbers; float32 is the model up to the "
        "order of sums, bfloat16 and int8 are rounded and faster (default: the model as it is)",
    )
    add("--checkpoint", default="best", metavar="WHICH", help="best (default), last, previous or a file")
    return parser


def _sampling(arguments: Namespace) -> SamplingConfig:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window")
    return SamplingConfig(**{name: getattr(arguments, name) for name in names})


def _feed(stream: Stream, arguments: Namespace) -> int:
    """Read the prompt; gives the number of tokens."""
    before = stream.position
    if arguments.prompt == "-":
        for text in lines(sys.stdin.readline):
            stream.feed(text)
    elif arguments.prompt is not None:
        stream.feed(arguments.prompt)
    if not stream.position:  # a stream has to begin somewhere, and so does a line
        stream.feed("\n")
    return stream.position - before


def lines(readline: Callable[[int], str], length: int = LINE_LENGTH) -> Iterator[str]:
    """The text of a file, line by line; longer lines than `length` in parts that end before a blank, if they have one.

    No more than two such parts are in memory at any time.

    Args:
        readline: the file's method: gives at most so many letters of a line, and "" at the end.
        length: how many are asked for.
    """
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


def _write(stream: Stream, arguments: Namespace, sampling: SamplingConfig) -> int:
    """Print the text as it comes, and a line feed at its end; gives the number of tokens."""
    before, last = stream.position, ""
    pieces = stream.generate_text(arguments.max_tokens, stop=arguments.stop, sampling=sampling, seed=arguments.seed)
    for last in pieces:
        print(last, end="", flush=True)
    if not last.endswith("\n"):
        print(flush=True)
    return stream.position - before


def _speed(n_tokens: int, seconds: float) -> str:
    rate = f" ({n_tokens / seconds:,.1f} tokens/s)" if n_tokens else ""
    return f"{n_tokens:,} tokens{rate}"
