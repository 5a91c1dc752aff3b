"""The arguments of each command, parsed before the command's module, and with it torch, is imported."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

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

PATH is a folder with train, valid and test files of text, a text file or a folder of .txt files (cut into 90% train, 5%
valid and 5% test), a folder of .parquet or .jsonl files whose names or folders begin with the split, or a data set of
the Hugging Face hub or on disk. If a preparation is stopped or killed, run the same command again to continue it."""


def prepare(words: Sequence[str]) -> Namespace:
    parser = command_parser("prepare", _PREPARE, overrides=False)
    add = parser.add_argument
    add("path", metavar="PATH", help="where the corpus is")
    add("--out", **FOLDER, required=True, help="folder to write")
    add("--source", choices=_choices.SOURCES, default="folder", help="what PATH is (default: folder)")
    add("--name", help="configuration of a data set of the hub")
    add("--field", default="text", help="column with the text (default: text)")
    add("--vocabulary", choices=_choices.VOCABULARY_KINDS, default="words", help="kind of tokens (default: words)")
    add("--vocab-size", **NUMBER, help="most frequent words to keep, or size of the bpe")
    add("--tokenizer", **FILE, help="take this vocabulary instead of making one")
    add("--workers", **NUMBER, default=1, help="processes (default: 1)")
    return parsed_alone(parser, words)


_TRAIN = """\
Train a recipe, or resume a run that was stopped. `recurra train RECIPE --help` lists every key that the recipe may
set."""


def train(words: Sequence[str]) -> Namespace:
    """Parse; `help` of the result is False, or the text before the help of the recipe."""
    parser = command_parser("train", _TRAIN, add_help=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this help, and every key of RECIPE if given")
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
        "List the recipes that come with Recurra: `recurra train NAME` trains one. With a NAME, print that recipe; to "
        "change it, write it into a file of your own, `recurra recipes NAME > mine.yaml`.",
        overrides=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to print, such as ptb/gateloop")
    return parsed_alone(parser, words)


_SWEEP = """\
Train a recipe with every combination of some values, each run in its own folder, and print a table, the best run first.

A key with commas in its value is varied: --optimizer.learning_rate 0.001,0.003,0.01 --training.seed 0,1 makes six runs.
Values in [brackets] or {braces} are single ones. To continue a sweep that was stopped, run the same command again: it
reads the runs that are finished and resumes the others."""


def sweep(words: Sequence[str]) -> Namespace:
    parser = command_parser("sweep", _SWEEP)
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or FILE#VARIANT")
    parser.add_argument("--out", **FOLDER, help="folder of the runs (default: runs/RECIPE-sweep)")
    add_style(parser)
    return parsed(parser, words)


_COMPARE = """\
Train a recipe with several mixers and seeds, each run in its own folder, and print one table, the best mixer first. The
validation curves, averaged over the seeds, are drawn beside the runs.

  recurra compare RECIPE --mixers gru,s5,mamba2   train, or continue where the command was stopped
  recurra compare RUN RUN ...                     compare finished runs; those that differ only in their
                                                  seed are averaged
  recurra compare --runs FOLDER                   compare the finished runs in a folder

The progress goes to the standard error. Numbers: parameters of the whole model; FLOPs of a forward pass; tokens per
second of training; bytes of the state of one stream; milliseconds of a step of one token on the CPU; and the validation
score of the best checkpoint (`training.monitor` chooses loss or accuracy), as mean ± standard deviation."""


def compare(words: Sequence[str]) -> Namespace:
    parser = command_parser("compare", _COMPARE)
    add = parser.add_argument
    places = "a recipe with --mixers, or folders of finished runs without"
    add("places", nargs="*", metavar="RECIPE", help=places)
    add("--mixers", type=_names, metavar="NAMES", help="mixers to train, as in gru,s5; `recurra info` lists them")
    add("--seeds", **NUMBER, help="runs of each mixer, with the seeds 0 to N - 1 (default: 3)")
    equal = "adapt model.d_model so that all mixers come close to the recipe's own in parameters, or in FLOPs"
    add("--equal", choices=("parameters", "flops"), help=equal)
    add("--runs", **FOLDER, help="folder of the runs (default: runs/RECIPE-compare)")
    add_style(parser)
    arguments = parsed(parser, words)
    if arguments.mixers is None:
        _require_finished_runs(parser, arguments)
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
        raise ArgumentTypeError(f"{word!r}; expected names with commas between them, as in gru,s5")
    return names


def _require_finished_runs(parser: ArgumentParser, arguments: Namespace) -> None:
    if arguments.seeds is not None or arguments.equal or arguments.overrides:
        parser.error("only --mixers trains: without it, omit --seeds, --equal and values of the recipe")
    if bool(arguments.places) == bool(arguments.runs):
        parser.error("give a RECIPE and --mixers, or finished runs, or their folder with --runs")


_EVAL = """\
Score a trained run on a split, in float32, with the state carried along contiguous segments. Prints a table, and writes
RUN/eval-SPLIT.json.

Lengths may differ from those of training: --data.segment_length 17, --model.mem_len 70. For a video run the scores of
all views are averaged, and their number may differ too: --data.test_views 1, --data.test_crops 1. Values that differ
become part of the file's name.

A text can also be scored in windows that overlap, which gives every token a long context and takes as much longer:
--data.eval_stride 10 --data.eval_context 130 --data.eval_batch_size 32."""
TRIED = f"{_choices.TEMPERATURES[0]:g} to {_choices.TEMPERATURES[-1]:g}"
"""The temperatures that `--temperature valid` chooses from."""


def evaluate(words: Sequence[str]) -> Namespace:
    parser = command_parser("eval", _EVAL)
    add = parser.add_argument
    add("run", metavar="RUN", help=_RUN)
    add("--split", choices=_choices.SPLITS, default="test", help="split to score (default: test)")
    divided = f"divide the logits by T; `valid` first finds the T from {TRIED} with the lowest validation loss"
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
Continue a text. The output follows the prompt exactly as it stands; a word-level model begins with the blank between
two words. If the run has no tokenizer of its own, --data.path FOLDER says where its corpus is."""
_PROMPT = """\
text to continue, printed before the continuation on a terminal; - reads the standard input in constant memory, and
continues where it ends (default: the loaded state, or the beginning of a text)"""
_CONTINUATIONS = """\
continue the text N times side by side, with the seeds from --seed on, and print each result under its number; the ranks
that torchrun started share them (default: 1)"""
_BIAS = "add a number to the logit of a token, both given as numbers; may be repeated"
_DRAFT = """\
let a smaller model with the same tokenizer draft tokens that the model then reads in one call; the text keeps its
distribution"""
_WEIGHTS = """\
decode on a CPU with packed weights of this type: float32 is exact up to the order of sums, the others are rounded and
faster (default: the model as it is)"""


def generate(words: Sequence[str]) -> Namespace:
    parser = command_parser("generate", _GENERATE)
    add = parser.add_argument
    add("run", metavar="RUN", help=_RUN)
    add("--prompt", metavar="TEXT", help=_PROMPT)
    add("--max-tokens", **NUMBER, default=100, help="maximum number of tokens to add (default: 100)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--temperature", **REAL, default=1.0, help="0 takes the likeliest token (default: 1)")
    add("--top-k", **NUMBER, help="sample from the N likeliest tokens")
    add("--top-p", **REAL, help="sample from the likeliest tokens with a total probability of X")
    add("--min-p", **REAL, help="sample from tokens at least X times as likely as the likeliest")
    add("--repetition-penalty", **REAL, default=1.0, help="above 1, makes recent tokens less likely (default: 1)")
    window = _choices.RECENT_TOKENS
    add("--repetition-window", **NUMBER, default=window, help=f"recent tokens to penalise (default: {window})")
    add("--presence-penalty", **REAL, default=0.0, help="subtracted from the logits of generated tokens (default: 0)")
    add("--frequency-penalty", **REAL, default=0.0, help="the same, once for each time (default: 0)")
    add("--logit-bias", action="append", default=[], metavar="TOKEN=BIAS", help=_BIAS)
    add("--seed", **NUMBER, default=0, help="seed of the sampling (default: 0)")
    add("-n", "--continuations", **NUMBER, default=1, help=_CONTINUATIONS)
    add("--draft", metavar="RUN", help=_DRAFT)
    add("--draft-tokens", **NUMBER, help="tokens of a draft (default: 4)")
    add("--load-state", metavar="FILE", help="continue from a state that --save-state wrote")
    add("--save-state", metavar="FILE", help="write the state after the last token to FILE")
    add("--weights", choices=_choices.DTYPES, help=_WEIGHTS)
    add_device(parser, "run the model", default="cpu")
    add_checkpoint(parser)
    return parsed(parser, words)


_SERVE = """\
Serve trained runs over HTTP: OpenAI's /v1/completions and /v1/chat/completions, streams by name that last in
/v1/sessions, and the explorer, a page to look into a model. Many streams are written side by side. Sessions are written
to disk after every turn.

Without an API key the server listens on this machine only. RECURRA_API_KEY in the environment, or the lines of
--api-key-file, are the keys."""


def serve(words: Sequence[str]) -> Namespace:
    return parsed(_server_parser("serve", _SERVE, f"{_RUN}; its name is the model's name", "+"), words)


def _server_parser(name: str, description: str, runs: str, nargs: str) -> ArgumentParser:
    parser = command_parser(name, description)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs=nargs, help=runs)
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on; 0 chooses a free one (default: 8000)")
    add("--api-key-file", **FILE, help="file with an API key on each line")
    add("--sessions", **FILE, help="where sessions are kept (default: sessions.sqlite in the first RUN)")
    packed = "type of packed weights; model packs none (default: float32)"
    add("--weights", choices=(*_choices.DTYPES, "model"), default="float32", help=packed)
    add("--threads", **NUMBER, help="threads of the model (default: all cores but one, for HTTP)")
    add("--max-streams", **NUMBER, default=1024, help="streams at the same time (default: 1024)")
    add("--max-queue", **NUMBER, default=1024, help="requests that wait; more get 429 (default: 1024)")
    add("--max-tokens", **NUMBER, default=65_536, help="tokens that a request may bring or ask for (default: 65536)")
    most = "memory for states after prompts that were read before; 0 keeps none (default: 256 MiB)"
    add("--prefix-cache-bytes", **NUMBER, default=256 * 2**20, help=most)
    add("--max-connections", **NUMBER, default=4096, help="at most 64 below the limit of open files (default: 4096)")
    add("--header-seconds", **REAL, default=10.0, help="for the headers of a request (default: 10)")
    add("--body-seconds", **REAL, default=60.0, help="for a body, and to read of a response (default: 60)")
    add("--log-file", **FILE, help="log requests as JSON lines (default: only problems, on the standard error)")
    add_checkpoint(parser)
    return parser


_EXPLORE = """\
Serve runs on this machine, as `recurra serve` does, and open the explorer in the browser. It shows text by surprise,
gates as they open and close, and forks of a stream; runs on Memory Horizon become a game."""


def explore(words: Sequence[str]) -> Namespace:
    parser = _server_parser("explore", _EXPLORE, f"{_RUN} (default: books, a text model in the package)", "*")
    parser.add_argument("--no-browser", action="store_true", help="print the address, and open nothing")
    return parsed(parser, words)


_CLASSIFY = """\
Read videos as streams, segment by segment with the carried state and in constant memory, and print the likeliest
classes after each segment. A contact sheet with the frames and the probabilities over time is drawn for each video.
Videos that cannot be read are named at the end, and the others classified."""


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
Write a trained language model in another format. The logits of both are compared before the result is put in place: in
float32 they may differ by 1e-5. The format of SOURCE is recognised.

  run           a folder as `recurra train` writes it; it can be evaluated and generated from, not
                resumed: no other format stores the optimiser's state
  hf            a folder that transformers loads (needs the extra hf)
  safetensors   one file: the weights, and as metadata the configuration and the tokenizer
  published     a folder of one of transformers' own classes: read, and written if the model has the
                shape of one. Classes: {", ".join(_choices.PUBLISHED_CLASSES.values())}
  gguf          a file that llama.cpp reads, if it has the architecture: read, and written in float32;
                `recurra export gguf` rounds (needs the extra hf)"""


def convert(words: Sequence[str]) -> Namespace:
    parser = command_parser("convert", _CONVERT)
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a run, a folder for transformers, a .safetensors or .gguf file")
    add("target", type=Path, metavar="TARGET", help="folder or file to write")
    formats = "format to write (default: by the ending of TARGET, .safetensors or .gguf)"
    add("--to", choices=_choices.FORMATS, help=formats)
    add_checkpoint(parser, of="checkpoint of a run to convert")
    add("--force", action="store_true", help="write into a folder that is not empty, or over a file")
    return parsed(parser, words)


_HF = """\
Write a text run as a folder that transformers loads after `import recurra.convert.huggingface`: config.json,
generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json, and manifest.json, from which
`recurra convert` makes a run again. Needs the extra hf.

The logits of both are compared before the folder is put in place: in float32 they may differ by 1e-5. If the run has no
tokenizer of its own, --data.path FOLDER says where its corpus is."""

_GGUF = """\
Write a text run as a GGUF file, which llama.cpp reads, with its tokenizer: Mamba, Mamba-2 and hybrids of Mamba and
attention in the shape of a Jamba, with byte pairs. Needs the extra hf.

The file is read back before it is put in place. In f32 logits may differ by 1e-5; f16 and q8_0 round matrices."""


def _portable_parser(to: str, text: str, place: str) -> ArgumentParser:
    parser = command_parser(f"export {to}", text)
    add = parser.add_argument
    add("run", metavar="RUN", help=_RUN)
    add("target", type=Path, metavar=place, help=f"{place.lower()} to write")
    add_checkpoint(parser, of="checkpoint to export")
    if to == "gguf":
        add(
            "--type",
            dest="stored",
            choices=_choices.GGUF_TYPES,
            default="f16",
            help="how matrices are stored (default: f16)",
        )
    add("--force", action="store_true", help="overwrite a file, or write into a folder that is not empty")
    return parser


_ONNX = """\
Write a text run as one ONNX file, FILE.onnx: tokens and state in, logits and state out, for any number of tokens and
streams. Beside it go its tokenizer, FILE.tokenizer.json, and FILE.py, a program that continues a text using onnxruntime
alone. Needs the extra export.

The logits are compared with the model's in onnxruntime before anything is put in place: they may differ by 1e-4 of the
largest. If the run has no tokenizer of its own, --data.path FOLDER says where its corpus is."""


def _onnx_parser() -> ArgumentParser:
    parser = command_parser("export onnx", _ONNX)
    add = parser.add_argument
    add("run", metavar="RUN", help=_RUN)
    add("file", **FILE, help="file to write; must end in .onnx")
    add_checkpoint(parser, of="checkpoint to export")
    add("--int8", action="store_true", help="store matrices as 8-bit integers: smaller, but less exact")
    add("--force", action="store_true", help="overwrite files that exist")
    return parser


_WEB = """\
Write runs over text or on Memory Horizon as a folder that any static host serves: the explorer's page, each model's
step as an ONNX file, its tokenizer, and onnxruntime-web, which runs them inside the browser. Needs the extra export.

The outputs are compared with those in Python before anything is written."""


def _web_parser() -> ArgumentParser:
    parser = command_parser("export web", _WEB)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help=_RUNS)
    add("folder", **FOLDER, help="folder to write")
    add_checkpoint(parser, of="checkpoint to export")
    kinds = ("int8", "float16", "float32")
    add("--weights", choices=kinds, default="int8", help="how weights are stored (default: int8)")
    add("--webgpu", action="store_true", help="add what runs models with WebGPU, 27 MB, used if its outputs agree")
    add("--force", action="store_true", help="write into a folder that is not empty")
    return parser


_EXPORTS: dict[str, tuple[Callable[[], ArgumentParser], str]] = {
    "hf": (partial(_portable_parser, "hf", _HF, "FOLDER"), "a folder that transformers loads"),
    "gguf": (partial(_portable_parser, "gguf", _GGUF, "FILE"), "a file that llama.cpp runs"),
    "onnx": (_onnx_parser, "a file that onnxruntime runs"),
    "web": (_web_parser, "a folder for a static host that runs inside the browser"),
}


def export(words: Sequence[str]) -> Namespace:
    """Parse the arguments of one of the formats, which `to` of the result names."""
    if completing():
        complete_among(_EXPORTS)
    lines = [f"  {name:<6}{text}" for name, (_, text) in _EXPORTS.items()]
    end = "`recurra export FORMAT --help` shows its arguments."
    usage = "\n".join(["usage: recurra export FORMAT RUN ...", "", *lines, "", end])
    if not words or words[0] in ("-h", "--help"):
        print(usage)
        raise SystemExit(0 if words else 2)
    if words[0] not in _EXPORTS:
        print(f"recurra export: {unknown('format', words[0], _EXPORTS)}\n\n{usage}", file=sys.stderr)
        raise SystemExit(2)
    parser = _EXPORTS[words[0]][0]()
    parser.set_defaults(to=words[0])
    return parsed(parser, words[1:])


_PLOT = """\
Draw the figures of one or more runs as PNG and SVG. Each run's gates or, over videos, its confusion matrix go into its
own folder; the curves, and the accuracy by memory span, compare all the runs."""


def plot(words: Sequence[str]) -> Namespace:
    parser = command_parser("plot", _PLOT)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=_RUNS)
    parser.add_argument(
        "--out", **FOLDER, help="for the figures of all runs (default: RUN/figures, or figures beside several)"
    )
    add_checkpoint(parser)
    return parsed(parser, words)


_COST = """\
Count what the models of recipes or runs do for one segment, beside the formulas of the CRT paper's Table 1. No weight
is allocated."""


def cost(words: Sequence[str]) -> Namespace:
    parser = command_parser("cost", _COST)
    add = parser.add_argument
    recipes = "recipes, files or names, with #VARIANT, or folders of runs"
    add("recipes", nargs="+", metavar="RECIPE", help=recipes)
    add("--vocabulary", **NUMBER, help="size of the vocabulary, so that the corpus is not needed")
    add_style(parser)
    add("--plot", **FOLDER, help="draw test perplexity over FLOPs into FOLDER; needs scored runs")
    return parsed(parser, words)


_GRADIENTS = """\
Measure ||dy_k/dy_i|| between the segments of trained Compact Recurrent Transformers, and its bound, CRT (2). Prints
tables, writes RUN/gradients.json for each run, and draws one figure of all runs."""


def gradients(words: Sequence[str]) -> Namespace:
    parser = command_parser("gradients", _GRADIENTS)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help=_RUNS)
    add("--split", choices=_choices.SPLITS, default="test", help="split to read the text from (default: test)")
    add("--segments", **NUMBER, default=3, help="segments to measure, at least 2 (default: 3)")
    add("--warm-up", **NUMBER, default=4, help="segments to read first, so that the memory is full (default: 4)")
    add("--out", **FOLDER, help="folder for the figure (default: RUN/figures, or figures beside several)")
    add_checkpoint(parser)
    return parsed(parser, words)


def demo(words: Sequence[str]) -> Namespace:
    parser = command_parser(
        "demo",
        "Train a model with a data-controlled and one with a fixed transition on a small Memory Horizon, and compare "
        "them. Stopped in the middle, it continues when it is started again.",
        overrides=False,
    )
    parser.add_argument("--run-dir", **FOLDER, default="runs/demo", help="folder to write (default: runs/demo)")
    return parsed_alone(parser, words)


def info(words: Sequence[str]) -> Namespace:
    description = "Show versions, backends, mixers, models and experiments; or, with a RUN, what it is."
    parser = command_parser("info", description, overrides=False)
    parser.add_argument("run", nargs="?", metavar="RUN", help=_RUN)
    add_checkpoint(parser)
    return parsed_alone(parser, words)


def models(words: Sequence[str]) -> Namespace:
    description = (
        "List the trained models that come with Recurra. Commands that take the folder of a RUN take their names too; "
        "a run of that name, in this folder or in runs/, comes first. `recurra info NAME` tells more."
    )
    return parsed_alone(command_parser("models", description, overrides=False), words)
