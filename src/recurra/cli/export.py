"""`recurra export` and `recurra convert`: write a trained run in another format."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from recurra.checks import sentence
from recurra.cli.arguments import add_checkpoint, command_parser, split_overrides
from recurra.convert.published.folder import ARCHITECTURES, GgufType
from recurra.train.formats import FORMATS, SUFFIXES, convert_model, export_onnx, export_web
from recurra.train.run import open_run
from recurra.train.run_folder import RunFolder

_CONVERT = """\
Write a trained language model in another format. The logits of both are compared before the result is put in place: in
float32 they may differ by 1e-5. The format of SOURCE is recognised.

  run           a folder as `recurra train` writes it; it can be evaluated and generated from, not
                resumed: no other format stores the optimiser's state
  hf            a folder that transformers loads (needs the extra hf)
  safetensors   one file: the weights, and as metadata the configuration and the tokenizer
  published     a folder of one of transformers' own classes: read, and written if the model has the
                shape of one. Classes: {classes}
  gguf          a file that llama.cpp reads, if it has the architecture: read, and written in float32;
                `recurra export gguf` rounds (needs the extra hf)"""


def convert(words: Sequence[str]) -> int:
    own, overrides = split_overrides(words)
    classes = ", ".join(architecture.class_name for architecture in ARCHITECTURES.values())
    parser = command_parser("convert", _CONVERT.format(classes=classes))
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a run, a folder for transformers, a .safetensors or .gguf file")
    add("target", type=Path, metavar="TARGET", help="folder or file to write")
    add("--to", choices=FORMATS, help="format to write (default: by the ending of TARGET, .safetensors or .gguf)")
    add_checkpoint(parser, of="checkpoint of a run to convert")
    add("--force", action="store_true", help="write into a folder that is not empty, or over a file")
    arguments = parser.parse_args(own)
    source, target = arguments.source, arguments.target
    to = arguments.to or SUFFIXES.get(target.suffix)
    if to is None:
        raise ValueError(sentence("TARGET", f"{target}, which names no format", f"--to {' or --to '.join(FORMATS)}"))
    difference = convert_model(
        source, target, to, checkpoint=arguments.checkpoint, overrides=overrides, force=arguments.force
    )
    print(f"wrote {target}; the logits of both differ by {difference:.1e} at most")
    return 0


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


def _export_portable(to: str, text: str, place: str, words: Sequence[str]) -> int:
    """Write a run in a format that `recurra convert` reads."""
    own, overrides = split_overrides(words)
    parser = command_parser(f"export {to}", text)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a text run")
    add("target", type=Path, metavar=place, help=f"{place.lower()} to write")
    add_checkpoint(parser, of="checkpoint to export")
    if to == "gguf":
        kinds = get_args(GgufType)
        add("--type", dest="stored", choices=kinds, default="f16", help="how matrices are stored (default: f16)")
    add("--force", action="store_true", help="overwrite a file, or write into a folder that is not empty")
    options = vars(parser.parse_args(own))
    run, target = options.pop("run"), options.pop("target")
    RunFolder(run).require_run()
    difference = convert_model(Path(run), target, to, overrides=overrides, **options)
    print(f"wrote {target}; the logits of both differ by {difference:.1e} at most")
    return 0


_ONNX = """\
Write a text run as one ONNX file, FILE.onnx: tokens and state in, logits and state out, for any number of tokens and
streams. Beside it go its tokenizer, FILE.tokenizer.json, and FILE.py, a program that continues a text using onnxruntime
alone. Needs the extra export.

The logits are compared with the model's in onnxruntime before anything is put in place: they may differ by 1e-4 of the
largest. If the run has no tokenizer of its own, --data.path FOLDER says where its corpus is."""


def _export_onnx(words: Sequence[str]) -> int:
    own, overrides = split_overrides(words)
    parser = command_parser("export onnx", _ONNX)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run of a recurrent language model")
    add("file", type=Path, metavar="FILE", help="file to write; must end in .onnx")
    add_checkpoint(parser, of="checkpoint to export")
    add("--int8", action="store_true", help="store matrices as 8-bit integers: smaller, but less exact")
    add("--force", action="store_true", help="overwrite files that exist")
    arguments = parser.parse_args(own)
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=overrides)
    export = export_onnx(trained, arguments.file, int8=arguments.int8, force=arguments.force)
    print(f"the logits differ from the model's by {export.difference:.1e} of the largest at most")
    if export.int8_difference is not None:
        print(f"with matrices of 8-bit integers, by {export.int8_difference:.1e}")
    print(f"wrote {', '.join(map(str, export.files))}")
    return 0


_WEB = """\
Write runs over text or on Memory Horizon as a folder that any static host serves: the explorer's page, each model's
step as an ONNX file, its tokenizer, and onnxruntime-web, which runs them inside the browser. Needs the extra export.

The outputs are compared with those in Python before anything is written."""


def _export_web(words: Sequence[str]) -> int:
    own, overrides = split_overrides(words)
    parser = command_parser("export web", _WEB)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folders of runs of recurrent language models")
    add("folder", type=Path, metavar="FOLDER", help="folder to write")
    add_checkpoint(parser, of="checkpoint to export")
    kinds = ("int8", "float16", "float32")
    add("--weights", choices=kinds, default="int8", help="how weights are stored (default: int8)")
    add("--webgpu", action="store_true", help="add what runs models with WebGPU, 27 MB, used if its outputs agree")
    add("--force", action="store_true", help="write into a folder that is not empty")
    arguments = parser.parse_args(own)
    runs = [open_run(run, checkpoint=arguments.checkpoint, overrides=overrides) for run in arguments.runs]
    export = export_web(
        runs, arguments.folder, weights=arguments.weights, webgpu=arguments.webgpu, force=arguments.force
    )
    models = [n_bytes for name, n_bytes in export.files.items() if name.endswith(".onnx")]
    taken = f"the model takes {sum(models) / 1e6:.1f}" if len(models) == 1 else f"models take {sum(models) / 1e6:.1f}"
    folder = arguments.folder
    print(f"the outputs differ from those in Python by {export.difference:.1e} at most")
    print(f"wrote {folder}: {sum(export.files.values()) / 1e6:.1f} MB, of which {taken}")
    print(f"to look at it: python -m http.server --directory {folder} --bind 127.0.0.1")
    return 0


_EXPORTS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "hf": (partial(_export_portable, "hf", _HF, "FOLDER"), "a folder that transformers loads"),
    "gguf": (partial(_export_portable, "gguf", _GGUF, "FILE"), "a file that llama.cpp runs"),
    "onnx": (_export_onnx, "a file that onnxruntime runs"),
    "web": (_export_web, "a folder for a static host that runs inside the browser"),
}


def export(words: Sequence[str]) -> int:
    lines = [f"  {name:<6}{text}" for name, (_, text) in _EXPORTS.items()]
    end = "`recurra export FORMAT --help` shows its arguments."
    usage = "\n".join(["usage: recurra export FORMAT RUN ...", "", *lines, "", end])
    if not words or words[0] in ("-h", "--help"):
        print(usage)
        return 0 if words else 2
    if words[0] not in _EXPORTS:
        print(f"recurra export: unknown format {words[0]!r}\n\n{usage}", file=sys.stderr)
        return 2
    return _EXPORTS[words[0]][0](words[1:])
