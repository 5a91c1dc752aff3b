"""`recurra convert`: a trained language model in another form."""

from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import command_parser, split_overrides
from recurra.cli.forms import FORMS, form_of, read_model, write_model

DESCRIPTION = """\
Write a trained language model in another form, and compare the logits of both before it is put in its place: they may
differ by 1e-5, in float32.

  run           a folder as `recurra train` writes it: config.yaml, tokenizer.json, checkpoints/best.pt and
                checkpoints/step-*.pt. It can be evaluated and generated from. It cannot be resumed, for no other form
                keeps the optimiser; config.yaml says so, and what else is not known.
  hf            a folder that transformers loads: config.json, generation_config.json, model.safetensors,
                tokenizer.json, tokenizer_config.json, and recurra.json with the experiment. Needs the extra hf.
  safetensors   one file: the weights, and in its metadata `recurra`, JSON with the model's class, configuration and
                experiment, and `tokenizer`.

The form of SOURCE is seen from what is there. Tied weights are stored once."""


def run(words: Sequence[str]) -> int:
    """Convert, and say what was compared."""
    own, overrides = split_overrides(words)
    parser = command_parser("convert", DESCRIPTION)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("source", metavar="SOURCE", help="a run, a folder for transformers or a .safetensors file")
    parser.add_argument("target", metavar="TARGET", help="the folder or file to write")
    parser.add_argument("--to", choices=FORMS, help="the form (default: safetensors for a TARGET that ends so)")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="of a run: best (default), last, ...")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty, or over a file")
    arguments = parser.parse_args(own)
    source, target = Path(arguments.source), Path(arguments.target)
    form = arguments.to or ("safetensors" if target.suffix == ".safetensors" else None)
    if form is None:
        raise ValueError(f"say in which form to write {target}, with --to {' or --to '.join(FORMS)}")
    if form == form_of(source):
        raise ValueError(f"{source} has the form {form} already")
    convert(source, target, form, checkpoint=arguments.checkpoint, overrides=overrides, force=arguments.force)
    return 0


def convert(source: Path, target: Path, form: str, *, checkpoint: str, overrides: Sequence[str], force: bool) -> None:
    """Read, write and compare, and print how much the logits differ."""
    portable = read_model(source, checkpoint=checkpoint, overrides=overrides)
    difference = write_model(portable, form, target, source=source, force=force)
    print(f"wrote {target}; the logits of both differ by {difference:.1e} at most")
