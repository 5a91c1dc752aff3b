"""`recurra export` and `recurra convert`: write a trained run in another format."""

import shlex
import sys
from argparse import Namespace

import torch

from recurra._choices import FORMATS
from recurra.checks import sentence
from recurra.train.formats import SUFFIXES, convert_model, export_onnx, export_web
from recurra.train.run import open_run
from recurra.train.shipped import find_run


def convert(arguments: Namespace) -> int:
    source, target = arguments.source, arguments.target
    if not (source.exists() or source.suffix):  # a name
        source = find_run(source)
    to = arguments.to or SUFFIXES.get(target.suffix)
    if to is None:
        raise ValueError(sentence("TARGET", f"{target}, which names no format", f"--to {' or --to '.join(FORMATS)}"))
    options = {name: getattr(arguments, name) for name in ("checkpoint", "overrides", "force")}
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    difference = convert_model(source, target, to, dtype=dtype, **options)
    print(f"wrote {target}; the logits of both differ by {difference:.1e} at most")
    return 0


def export(arguments: Namespace) -> int:
    print("exporting and comparing outputs; this may take half a minute", file=sys.stderr, flush=True)
    {"onnx": _export_onnx, "web": _export_web}.get(arguments.to, _export_portable)(arguments)
    return 0


def _export_portable(arguments: Namespace) -> None:
    """Write a run in a format that `recurra convert` reads."""
    options = vars(arguments)
    run, target, to = (options.pop(name) for name in ("run", "target", "to"))
    difference = convert_model(find_run(run), target, to, **options)
    print(f"wrote {target}; the logits of both differ by {difference:.1e} at most")


def _export_onnx(arguments: Namespace) -> None:
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=arguments.overrides)
    export = export_onnx(trained, arguments.file, int8=arguments.int8, force=arguments.force)
    print(f"logits differ from the model's by at most {export.difference:.1e} of the largest")
    if export.int8_difference is not None:
        print(f"with int8 matrices, by {export.int8_difference:.1e}")
    print(f"wrote {', '.join(map(str, export.files))}")


def _export_web(arguments: Namespace) -> None:
    runs = [open_run(run, checkpoint=arguments.checkpoint, overrides=arguments.overrides) for run in arguments.runs]
    export = export_web(
        runs, arguments.folder, weights=arguments.weights, webgpu=arguments.webgpu, force=arguments.force
    )
    models = [n_bytes for name, n_bytes in export.files.items() if name.endswith(".onnx")]
    taken = f"the model takes {sum(models) / 1e6:.1f}" if len(models) == 1 else f"models take {sum(models) / 1e6:.1f}"
    folder = arguments.folder
    print(f"outputs differ from those in Python by at most {export.difference:.1e}")
    print(f"wrote {folder}: {sum(export.files.values()) / 1e6:.1f} MB, of which {taken}")
    print(f"to view it: python -m http.server --directory {shlex.quote(str(folder))} --bind 127.0.0.1")
