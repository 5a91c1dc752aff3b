"""`recurra prepare`: turn a corpus of any size into shards of tokens."""

from argparse import Namespace
from time import perf_counter

from recurra.data import _prepare as preparing


def prepare(arguments: Namespace) -> int:
    began = perf_counter()
    index = preparing.prepare(preparing.Preparation(**vars(arguments)), report=lambda line: print(line, flush=True))
    seconds = perf_counter() - began
    for split, shards in index["splits"].items():
        print(f"{split}: {sum(shard['tokens'] for shard in shards):,} tokens in {len(shards)} shards")
    print(f"{index['vocab_size']:,} tokens in the vocabulary; {seconds:.0f} s; train on it with --data.source shards")
    return 0
