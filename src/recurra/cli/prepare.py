"""`recurra prepare`: turn a corpus of any size into shards of tokens."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from recurra.cli.arguments import command_parser
from recurra.data import _prepare as preparing
from recurra.data._documents import SOURCES
from recurra.data.corpus import ENCODERS

_DESCRIPTION = """\
Encode a corpus once, in parallel, into shards of tokens that training reads with --data.source shards.

PATH is a folder with train, valid and test files of text, a folder of .parquet or .jsonl files whose names or folders
begin with the split, or a data set of the Hugging Face hub or on disk. If a preparation is stopped or killed, run the
same command again to continue it."""


def prepare(words: Sequence[str]) -> int:
    parser = command_parser("prepare", _DESCRIPTION, overrides=False)
    add = parser.add_argument
    add("path", metavar="PATH", help="where the corpus is")
    add("--out", metavar="FOLDER", type=Path, required=True, help="folder to write")
    add("--source", choices=SOURCES, default="folder", help="what PATH is (default: folder)")
    add("--name", help="configuration of a data set of the hub")
    add("--field", default="text", help="column with the text (default: text)")
    add("--vocabulary", choices=ENCODERS, default="words", help="kind of tokens (default: words)")
    add("--vocab-size", type=int, metavar="N", help="most frequent words to keep, or size of the bpe")
    add("--tokenizer", type=Path, metavar="FILE", help="take this vocabulary instead of making one")
    add("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    given = vars(parser.parse_args(words))
    began = perf_counter()
    index = preparing.prepare(preparing.Preparation(**given), report=lambda line: print(line, flush=True))
    seconds = perf_counter() - began
    for split, shards in index["splits"].items():
        print(f"{split}: {sum(shard['tokens'] for shard in shards):,} tokens in {len(shards)} shards")
    print(f"{index['vocab_size']:,} tokens in the vocabulary; {seconds:.0f} s; train on it with --data.source shards")
    return 0
