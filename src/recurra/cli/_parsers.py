"""The arguments of each command, parsed before the command's module, and with it torch, is imported."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recurra import _choices
from recurra.cli._arguments import (
    FILE,
    FOLDER,
    NUMBER,
    REAL,
    add_checkpoint,
    add_device,
    add_style,
    command_parser,
    complete_among,
    completing,
    parsed,
    parsed_alone,
    unknown,
)

_RUN = "folder of a run, its name in runs/, or a name that `recurra models` lists"
_RUNS = "folders of runs, or their names"

_PREPARE = """\
Encode a corpus once, in parallel, into shards of tokens that training reads with --data.source shards.

PATH is a folder with train, valid and test text files, a text file or a folder of .txt files (split into 90% train, 5%
valid and 5% test), a folder of .parquet or .jsonl files whose names or folders begin with the split, or a data set on
the Hugging Face hub or on disk. To continue after an interruption, run the same command again."""


def prepare(words: Sequence[str]) -> Namespace:
    parser = command_parser("prepare", _PREPARE, overrides=False)
    add = parser.add_argument
    add("path", metavar="PATH", help="the corpus")
    add("--out", **FOLDER, required=True, help="folder to write")
    add("--source", choices=_choices.SOURCES, default="folder", help="format of PATH (default: folder)")
    add("--name", help="configuration of a data set on the hub")
    add("--field", default="text", help="column with the text (default: text)")
    add("--vocabulary", choices=_choices.VOCABULARY_KINDS, default="words", help="kind of tokens (default: words)")
    add("--vocab-size", **NUMBER, help="number of most frequent words to keep, or size of the BPE vocabulary")
    add("--tokenizer", **FILE, help="use this vocabulary instead of building one")
    add("--workers", **NUMBER, default=1, help="number of processes (default: 1)")
    return parsed_alone(parser, words)


_TRAIN = """\
Train a recipe, or resume a run that was stopped. `recurra train RECIPE --help` lists every key of the recipe."""


def train(words: Sequence[str]) -> Namespace:
    """Parse; `help` of the result is False, or the text before the help of the recipe."""
    parser = command_parser("train", _TRAIN, add_help=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this help and, if RECIPE is given, its keys")
    recipe = "a YAML file, a name that `recurra recipes` lists, or either with #VARIANT"
    add("recipe", nargs="?", metavar="RECIPE", help=recipe)
    add("--run-dir", metavar="FOLDER", help="folder to write (default: runs/ and the recipe's name)")
    add("--resume", metavar="RUN", help="continue the run in this folder")
    add("--checkpoint", metavar="WHICH", help="checkpoint to --resume: last (default), previous, best or a file")
    arguments = parsed(parser, words)
    if arguments.help:
        arguments.help = parser.format_help()
        if not arguments.recipe:
            print(arguments.help, end="")
            parser.exit()
    elif (arguments.recipe is None) == (arguments.resume is None):
        parser.error("give either a RECIPE or --resume RUN")
    elif arguments.resume and arguments.run_dir:
        parser.error("--resume RUN continues in the run's own folder: omit --run-dir")
    elif arguments.checkpoint and not arguments.resume:
        parser.error("--checkpoint chooses what to resume: add --resume RUN")
    return arguments


def recipes(words: Sequence[str]) -> Namespace:
    parser = command_parser(
        "recipes",
        "List the recipes in the package; `recurra train NAME` trains one. With NAME, print that recipe. To change it, "
        "save it to a file: `recurra recipes NAME > mine.yaml`.",
        overrides=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to print, such as ptb/gateloop")
    return parsed_alone(parser, words)


_SWEEP = """\
Train a recipe with every combination of the given values, each run in its own folder, and print a table, best first.

Separate a key's values by commas: --optimizer.learning_rate 0.001,0.003,0.01 --training.seed 0,1 makes six runs. A
value in [brackets] or {braces} counts as one. To continue a sweep that was stopped, run the same command again: it
skips finished runs and resumes the others."""


def sweep(words: Sequence[str]) -> Namespace:
    parser = command_parser("sweep", _SWEEP)
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or FILE#VARIANT")
    parser.add_argument("--out", **FOLDER, help="folder of the runs (default: runs/RECIPE-sweep)")
    add_style(parser)
    return parsed(parser, words)


_COMPARE = """\
Train a recipe with several mixers and seeds, each run in its own folder, and print one table, best mixer first. The
validation curves, averaged over the seeds, are saved in the same folder as the runs.

  recurra compare RECIPE --mixers gru,s5,mamba2   train, or continue after an interruption
  recurra compare RUN RUN ...                     compare finished runs; those that differ only in their
                                                  seed are averaged
  recurra compare --runs FOLDER                   compare the finished runs in a folder

Progress goes to standard error. Columns: parameters of the whole model; FLOPs per token of a forward pass; training
speed in tokens per second; state size of one stream in bytes; milliseconds per one-token step on the CPU; and the
validation score of the best checkpoint (`training.monitor`: loss or accuracy), mean ± standard deviation."""


def compare(words: Sequence[str]) -> Namespace:
    parser = command_parser("compare", _COMPARE)
    add = parser.add_argument
    places = "with --mixers, a recipe; without, folders of finished runs"
    add("places", nargs="*", metavar="RECIPE", help=places)
    add("--mixers", type=_names, metavar="NAMES", help="mixers to train, as in gru,s5; `recurra info` lists them")
    add("--seeds", **NUMBER, help="number of runs per mixer, with seeds 0 to N - 1 (default: 3)")
    equal = "set model.d_model to match the recipe's number of parameters or FLOPs as closely as possible"
    add("--equal", choices=("parameters", "flops"), help=equal)
    add("--runs", **FOLDER, help="folder of the runs (default: runs/RECIPE-compare)")
    add_style(parser)
    arguments = parsed(parser, words)
    if arguments.mixers is None:
        if arguments.seeds is not None or arguments.equal or arguments.overrides:
            parser.error("only --mixers trains: without it, omit --seeds, --equal and recipe values")
        if bool(arguments.places) == bool(arguments.runs):
            parser.error("give a RECIPE and --mixers, or finished runs, or their folder with --runs")
    elif len(arguments.places) != 1:
        parser.error("--mixers trains one RECIPE")
    elif arguments.seeds is not None and arguments.seeds < 1:
        parser.error(f"--seeds is {arguments.seeds}; expected at least 1")
    keys = {word.partition("=")[0] for word in arguments.overrides}
    chosen = {"--model.mixer": "--mixers", "--training.seed": "--seeds"}
    if arguments.equal:
        chosen["--model.d_model"] = f"--equal {arguments.equal}"
    for key in sorted(keys & chosen.keys()):
        parser.error(f"{chosen[key]} sets {key[2:]}: omit {key}")
    return arguments


def _names(word: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in word.split(",")))
    if "" in names:
        raise ArgumentTypeError(f"{word!r}; expected names separated by commas, as in gru,s5")
    return names


_EVAL = """\
Score a trained run on a split, in the precision of its weights, with the state carried across contiguous segments.
Print a table and write RUN/eval-SPLIT.json.

Lengths may differ from those in training: --data.segment_length 17, --model.mem_len 70. For a video run, the scores of
all views are averaged, and their number may differ too: --data.test_views 1, --data.test_crops 1. Values that differ
become part of the file name.

Text can also be scored in overlapping windows, which give every token a long context but take longer:
--data.eval_stride 10 --data.eval_context 130 --data.eval_batch_size 32."""
TRIED = f"{_choices.TEMPERATURES[0]:g} to {_choices.TEMPERATURES[-1]:g}"
"""The temperatures that `--temperature valid` chooses from."""


def evaluate(words: Sequence[str]) -> Namespace:
    parser = command_parser("eval", _EVAL)
    add = parser.add_argument
    add("run", metavar="RUN", help=_RUN)
    add("--split", choices=_choices.SPLITS, default="test", help="split to score (default: test)")
    divided = f"divide the logits by T; `valid` chooses the T from {TRIED} with the lowest validation loss"
    add("--temperature", metavar="T", type=_temperature, help=divided)
    add_device(parser, "score", default="auto")
    add_checkpoint(parser)
    add_style(parser)
    return parsed(parser, words)


def _temperature(word: str) -> float | str:
    if word == "valid":
        return word
    try:
        temperature = float(word)
    except ValueError:
        temperature = 0.0
    if not 0 < temperature < float("inf"):
        raise ArgumentTypeError(f"{word!r}; expected a number above 0, or valid")
    return temperature


_GENERATE = """\
Generate text. The output can be appended to the prompt unchanged; a word-level model's output therefore begins with a
space. If the run has no tokenizer, give its corpus with --data.path FOLDER."""
_PROMPT = """\
text to continue, printed before the continuation on a terminal; - reads standard input in constant memory and
continues it (default: continue the loaded state, or start a new text)"""
_CONTINUATIONS = """\
generate N continuations in parallel, with seeds from --seed on, and print each under its number; under torchrun, the
ranks share them (default: 1)"""
_BIAS = "add BIAS to the logit of the token with the id TOKEN; may be repeated"
_DRAFT = """\
smaller model with the same tokenizer that drafts tokens, which RUN then checks in one call; the distribution of the
text stays the same"""
_WEIGHTS = """\
decode on a CPU with packed weights of this type: float32 is exact up to the order of sums, the others are rounded and
faster (default: the model's own weights)"""


def generate(words: Sequence[str]) -> Namespace:
    parser = command_parser("generate", _GENERATE)
    add = parser.add_argument
    add("run", metavar="RUN", help=_RUN)
    add("--prompt", metavar="TEXT", help=_PROMPT)
    add("--max-tokens", **NUMBER, default=100, help="maximum number of tokens to generate (default: 100)")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated")
    add("--temperature", **REAL, default=1.0, help="0 always takes the likeliest token (default: 1)")
    add("--top-k", **NUMBER, help="sample from the N likeliest tokens")
    add("--top-p", **REAL, help="sample from the likeliest tokens with a total probability of X")
    add("--min-p", **REAL, help="sample from tokens at least X times as likely as the likeliest")
    add("--repetition-penalty", **REAL, default=1.0, help="above 1, makes recent tokens less likely (default: 1)")
    window = _choices.RECENT_TOKENS
    add("--repetition-window", **NUMBER, default=window, help=f"recent tokens to penalise (default: {window})")
    add("--presence-penalty", **REAL, default=0.0, help="subtracted from the logits of generated tokens (default: 0)")
    add("--frequency-penalty", **REAL, default=0.0, help="the same, times the token's count so far (default: 0)")
    add("--logit-bias", action="append", default=[], metavar="TOKEN=BIAS", help=_BIAS)
    add("--seed", **NUMBER, default=0, help="sampling seed (default: 0)")
    add("-n", "--continuations", **NUMBER, default=1, help=_CONTINUATIONS)
    add("--draft", metavar="RUN", help=_DRAFT)
    add("--draft-tokens", **NUMBER, help="tokens per draft (default: 4)")
    add("--load-state", metavar="FILE", help="continue from a state written by --save-state")
    add("--save-state", metavar="FILE", help="write the state after the last token to FILE")
    add("--weights", choices=_choices.DTYPES, help=_WEIGHTS)
    add_device(parser, "run the model", default="cpu")
    add_checkpoint(parser)
    return parsed(parser, words)


_SERVE = """\
Serve trained runs over HTTP: OpenAI's /v1/completions and /v1/chat/completions, named persistent streams in
/v1/sessions, and the explorer, a page for inspecting a model. The server generates many streams at once and saves
sessions to disk after every request.

Without an API key, the server listens on this machine only. Set keys with the environment variable RECURRA_API_KEY or
with --api-key-file."""


def serve(words: Sequence[str]) -> Namespace:
    return parsed(_server_parser("serve", _SERVE, f"{_RUN}; its name is the model's name", "+"), words)


def _server_parser(name: str, description: str, runs: str, nargs: str) -> ArgumentParser:
    parser = command_parser(name, description)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs=nargs, help=runs)
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on; 0 chooses a free one (default: 8000)")
    add("--api-key-file", **FILE, help="file with one API key per line")
    add("--sessions", **FILE, help="file for sessions (default: sessions.sqlite in the first RUN)")
    packed = "type of packed weights; model leaves the weights unpacked (default: float32)"
    add("--weights", choices=(*_choices.DTYPES, "model"), default="float32", help=packed)
    cache = "type of rotary attention's keys and values; int8 needs packed weights (default: float32)"
    add("--kv-cache-dtype", choices=_choices.KV_CACHE_DTYPES, default="float32", help=cache)
    states = "type of matrix states (e.g. Mamba-2's); int16 needs packed weights (default: float32)"
    add("--state-dtype", choices=_choices.STATE_DTYPES, default="float32", help=states)
    add("--threads", **NUMBER, help="threads that run the model (default: all cores but one, left for HTTP)")
    add("--max-streams", **NUMBER, default=1024, help="concurrent streams (default: 1024)")
    add("--max-queue", **NUMBER, default=1024, help="waiting requests; further ones get 429 (default: 1024)")
    add("--max-tokens", **NUMBER, default=65_536, help="tokens that a request can send or request (default: 65536)")
    most = "memory for cached prompt states; 0 turns the cache off (default: 256 MiB)"
    add("--prefix-cache-bytes", **NUMBER, default=256 * 2**20, help=most)
    connections = "open connections, at most 64 fewer than the open-file limit (default: 4096)"
    add("--max-connections", **NUMBER, default=4096, help=connections)
    add("--header-seconds", **REAL, default=10.0, help="time limit for a request's headers (default: 10)")
    add("--body-seconds", **REAL, default=60.0, help="time limit for a body, or for a stalled reader (default: 60)")
    add("--log-file", **FILE, help="log requests as JSON lines (default: only problems, on standard error)")
    add_checkpoint(parser)
    return parser


_EXPLORE = """\
Serve runs on this machine, as `recurra serve` does, and open the explorer in the browser. It shows the surprisal of
each token, gates as they open and close, and forks of a stream; runs on Memory Horizon become a game."""


def explore(words: Sequence[str]) -> Namespace:
    parser = _server_parser("explore", _EXPLORE, f"{_RUN} (default: books, a text model in the package)", "*")
    parser.add_argument("--no-browser", action="store_true", help="print the address without opening a browser")
    return parsed(parser, words)


_CLASSIFY = """\
Read videos as streams, segment by segment, in constant memory, and print the likeliest classes after each segment. Draw
a contact sheet for each video, with its frames and the class probabilities over time. Videos that cannot be read are
skipped and listed at the end."""


def classify(words: Sequence[str]) -> Namespace:
    parser = command_parser("classify", _CLASSIFY)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a video run")
    add("videos", nargs="+", metavar="VIDEO", help="video files")
    add("--rate", type=float, metavar="R", help="frames per second to read (default: as in training)")
    add("--top", **NUMBER, default=3, help="number of classes to print (default: 3)")
    add("--csv", **FILE, help="write the probabilities of all classes after each segment to FILE")
    add("--out", **FOLDER, help="folder for the contact sheets (default: RUN/figures)")
    add_device(parser, "classify", default="auto")
    add_checkpoint(parser)
    return parsed(parser, words)


_CONVERT = f"""\
Convert a trained language model to another format. The logits of both are compared before the result is saved: in
float32 they may differ by 1e-5, in bfloat16 by 2% of the largest. The format of SOURCE is detected.

  run           a folder as written by `recurra train`, for evaluating and generating; it cannot be
                resumed, because no other format stores the optimiser's state
  hf            a folder for transformers (needs the extra hf)
  safetensors   one file with the weights, and the configuration and tokenizer as metadata
  published     a folder of one of transformers' own classes, or flash-linear-attention's for RWKV-7
                (whose .pth can be read too); can be written if the model has the same architecture.
                Classes: {", ".join(_choices.PUBLISHED_CLASSES.values())}
  gguf          a file for llama.cpp, if it supports the architecture; written in float32, and
                `recurra export gguf` can round (needs the extra hf)"""


def convert(words: Sequence[str]) -> Namespace:
    parser = command_parser("convert", _CONVERT)
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a run, a folder for transformers, a .safetensors or .gguf file")
    add("target", type=Path, metavar="TARGET", help="folder or file to write")
    formats = "format to write (default: from TARGET's extension, .safetensors or .gguf)"
    add("--to", choices=_choices.FORMATS, help=formats)
    add_checkpoint(parser, of="checkpoint of a run to convert")
    dtypes = "precision of the weights (default: that of a run or a safetensors file, else float32)"
    add("--dtype", choices=("float32", "bfloat16"), help=dtypes)
    add("--force", action="store_true", help="write into a folder that is not empty, or over a file")
    return parsed(parser, words)


_HF = """\
Export a text run to a folder that transformers can load after `import recurra.convert.huggingface`: config.json,
generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and manifest.json. `recurra convert`
converts it back to a run. Needs the extra hf.

The logits of both are compared before the folder is saved: in float32 they may differ by 1e-5. If the run has no
tokenizer, give its corpus with --data.path FOLDER."""

_GGUF = """\
Export a text run with its tokenizer to a GGUF file for llama.cpp. The model needs a byte-pair tokenizer and must be a
Mamba, Falcon Mamba, Mamba-2, dense Jamba, Granite 4.0, Falcon-H1, LFM2, dense Qwen3.5 or RWKV-7. Needs the extra hf.

The file is read back before it is saved. With f32, logits may differ by 1e-5; f16, q8_0 and q4_0 round matrices."""

_ONNX = """\
Export a text run to one ONNX file, FILE.onnx: tokens and state in, logits and state out, for any number of tokens and
streams. The tokenizer, FILE.tokenizer.json, and FILE.py, a program that generates text with onnxruntime, are written to
the same folder. Needs the extra export.

Before anything is saved, onnxruntime's logits are compared with the model's: they may differ by 1e-4 of the largest.
If the run has no tokenizer, give its corpus with --data.path FOLDER."""

_WEB = """\
Export runs on text or Memory Horizon to a folder for any static host: the explorer page, each model's step as an ONNX
file, its tokenizer, and onnxruntime-web, which runs the models in the browser. Needs the extra export.

The outputs are compared with those in Python before anything is written."""


_SWITCH = {"action": "store_true"}
_TYPE = {"dest": "stored", "choices": _choices.GGUF_TYPES, "default": "f16"}
_ROUNDED = {"choices": ("int8", "float16", "float32"), "default": "int8"}
_FORCE = _SWITCH | {"help": "overwrite a file, or write into a folder that is not empty"}
_EXPORTS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "hf": (_HF, "a folder for transformers", {"target": FOLDER | {"help": "folder to write"}, "--force": _FORCE}),
    "gguf": (_GGUF, "a file for llama.cpp", {
        "target": FILE | {"help": "file to write"},
        "--type": _TYPE | {"help": "how matrices are stored (default: f16)"},
        "--force": _FORCE,
    }),
    "onnx": (_ONNX, "a file for onnxruntime", {
        "file": FILE | {"help": "file to write; must end in .onnx"},
        "--int8": _SWITCH | {"help": "store matrices as 8-bit integers: smaller, but less precise"},
        "--force": _SWITCH | {"help": "overwrite existing files"},
    }),
    "web": (_WEB, "a static web page that runs the models in the browser", {
        "folder": FOLDER | {"help": "folder to write"},
        "--weights": _ROUNDED | {"help": "how weights are stored (default: int8)"},
        "--webgpu": _SWITCH | {"help": "add WebGPU support (27 MB), used if its outputs agree"},
        "--force": _SWITCH | {"help": "write into a folder that is not empty"},
    }),
}  # fmt: skip
"""Formats: their descriptions, what the list of formats says, and the arguments after the runs."""


def export(words: Sequence[str]) -> Namespace:
    """Parse the arguments of one of the formats, which `to` of the result names."""
    if completing():
        complete_among(_EXPORTS)
    lines = [f"  {name:<6}{text}" for name, (_, text, _) in _EXPORTS.items()]
    end = "`recurra export FORMAT --help` shows its arguments."
    usage = "\n".join(["usage: recurra export FORMAT RUN ...", "", *lines, "", end])
    if not words or words[0] in ("-h", "--help"):
        print(usage)
        raise SystemExit(0 if words else 2)
    if words[0] not in _EXPORTS:
        print(f"recurra export: {unknown('format', words[0], _EXPORTS)}\n\n{usage}", file=sys.stderr)
        raise SystemExit(2)
    text, _, arguments = _EXPORTS[words[0]]
    parser = command_parser(f"export {words[0]}", text)
    if words[0] == "web":
        parser.add_argument("runs", nargs="+", metavar="RUN", help=_RUNS)
    else:
        parser.add_argument("run", metavar="RUN", help=_RUN)
    add_checkpoint(parser, of="checkpoint to export")
    for name, options in arguments.items():
        parser.add_argument(name, **options)
    parser.set_defaults(to=words[0])
    return parsed(parser, words[1:])


_PLOT = """\
Draw the figures of one or more runs as PNG and SVG. Each run's gates or, for videos, its confusion matrix are saved in
its own folder; the curves and the accuracy by memory span compare all runs."""


def plot(words: Sequence[str]) -> Namespace:
    parser = command_parser("plot", _PLOT)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=_RUNS)
    parser.add_argument(
        "--out", **FOLDER, help="folder for shared figures (default: RUN/figures, or figures next to several runs)"
    )
    add_checkpoint(parser)
    return parsed(parser, words)


_COST = """\
Count the FLOPs, parameters and state of recipes or runs for one segment, and compare them with the formulas in the CRT
paper's Table 1. Allocates no weights."""


def cost(words: Sequence[str]) -> Namespace:
    parser = command_parser("cost", _COST)
    add = parser.add_argument
    recipes = "recipe files or names, optionally with #VARIANT, or folders of runs"
    add("recipes", nargs="+", metavar="RECIPE", help=recipes)
    add("--vocabulary", **NUMBER, help="vocabulary size; without it, the corpus is needed")
    add_style(parser)
    add("--plot", **FOLDER, help="draw test perplexity over FLOPs into FOLDER; needs scored runs")
    return parsed(parser, words)


_GRADIENTS = """\
Measure ||dy_k/dy_i|| between the segments of trained Compact Recurrent Transformers, and its bound, CRT (2). Print
tables, write RUN/gradients.json for each run, and draw one figure of all runs."""


def gradients(words: Sequence[str]) -> Namespace:
    parser = command_parser("gradients", _GRADIENTS)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help=_RUNS)
    add("--split", choices=_choices.SPLITS, default="test", help="split to read the text from (default: test)")
    add("--segments", **NUMBER, default=3, help="segments to measure, at least 2 (default: 3)")
    add("--warm-up", **NUMBER, default=4, help="segments to read first, to fill the memory (default: 4)")
    add("--out", **FOLDER, help="folder for the figure (default: RUN/figures, or figures next to several runs)")
    add_checkpoint(parser)
    return parsed(parser, words)


def demo(words: Sequence[str]) -> Namespace:
    parser = command_parser(
        "demo",
        "Train one model with a data-controlled transition and one with a fixed transition on a small Memory Horizon, "
        "and compare them. To continue after an interruption, run the same command again.",
        overrides=False,
    )
    parser.add_argument("--run-dir", **FOLDER, default="runs/demo", help="folder to write (default: runs/demo)")
    return parsed_alone(parser, words)


def info(words: Sequence[str]) -> Namespace:
    description = "Show versions, backends, mixers, models and experiments or, with a RUN, describe the run."
    parser = command_parser("info", description, overrides=False)
    parser.add_argument("run", nargs="?", metavar="RUN", help=_RUN)
    add_checkpoint(parser)
    return parsed_alone(parser, words)


def models(words: Sequence[str]) -> Namespace:
    description = (
        "List the trained models in the package. Commands that take a RUN also take these names; a run with that name "
        "in this folder or in runs/ takes precedence. `recurra info NAME` shows details."
    )
    return parsed_alone(command_parser("models", description, overrides=False), words)
