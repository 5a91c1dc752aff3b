"""`recurra convert`: write a trained language model in another format."""

from collections.abc import Sequence
from pathlib import Path

from recurra.checks import sentence
from recurra.cli.arguments import add_checkpoint, command_parser, split_overrides
from recurra.convert.published.folder import ARCHITECTURES
from recurra.train.formats import FORMATS, convert_model

_DESCRIPTION = """\
Write a trained language model in another format. The logits of both are compared before the result is put in place: in
float32 they may differ by 1e-5. The format of SOURCE is recognised, and tied weights are stored once.

  run           a folder as `recurra train` writes it: config.yaml, tokenizer.json,
                checkpoints/best.safetensors and checkpoints/step-*.safetensors. It can be evaluated and generated
                from, not resumed: no other format stores the optimiser's state. Its config.yaml
                says so, and lists what else is unknown.
  hf            a folder that transformers loads: config.json, generation_config.json,
                model.safetensors, tokenizer.json, tokenizer_config.json, and manifest.json with
                the experiment. Needs the extra hf.
  safetensors   one file: the weights, and in its metadata `recurra`, JSON with the model's class,
                configuration and experiment, and `tokenizer`.
  published     a folder of one of transformers' own classes, with their weights: read, and written
                where the model has the shape of one. It needs neither transformers nor code of the
                folder. Classes: {classes}."""


def run(words: Sequence[str]) -> int:
    """Convert, and print how much the logits differ."""
    own, overrides = split_overrides(words)
    classes = ", ".join(architecture.class_name for architecture in ARCHITECTURES.values())
    parser = command_parser("convert", _DESCRIPTION.format(classes=classes))
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a run, a folder for transformers or a .safetensors file"
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="folder or file to write")
    parser.add_argument(
        "--to", choices=FORMATS, help="format to write (default: safetensors if TARGET ends in .safetensors)"
    )
    add_checkpoint(parser, of="checkpoint of a run to convert")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty, or over a file")
    arguments = parser.parse_args(own)
    source, target = arguments.source, arguments.target
    to = arguments.to or ("safetensors" if target.suffix == ".safetensors" else None)
    if to is None:
        raise ValueError(sentence("TARGET", f"{target}, which names no format", f"--to {' or --to '.join(FORMATS)}"))
    difference = convert_model(
        source, target, to, checkpoint=arguments.checkpoint, overrides=overrides, force=arguments.force
    )
    print(converted(target, difference))
    return 0


def converted(target: Path, difference: float) -> str:
    """Report a conversion in a line."""
    return f"wrote {target}; the logits of both differ by {difference:.1e} at most"
