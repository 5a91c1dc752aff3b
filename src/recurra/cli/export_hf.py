"""`recurra export hf`: write a run as a folder that transformers loads."""

from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import add_checkpoint, command_parser, split_overrides
from recurra.cli.convert import converted
from recurra.train.formats import convert_model
from recurra.train.run_folder import RunFolder

_DESCRIPTION = """\
Write a text run as a folder that transformers loads after `import recurra.convert.huggingface`: config.json,
generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json, and manifest.json, from which
`recurra convert` makes a run again. Needs the extra hf.

The logits of both are compared before the folder is put in place: in float32 they may differ by 1e-5. If the run has no
tokenizer of its own, --data.path FOLDER says where its corpus is."""


def run(words: Sequence[str]) -> int:
    """Export, and print how much the logits differ."""
    own, overrides = split_overrides(words)
    parser = command_parser("export hf", _DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="folder of a text run")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write")
    add_checkpoint(parser, of="checkpoint to export")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    arguments = parser.parse_args(own)
    RunFolder(arguments.run).require_run()
    difference = convert_model(
        Path(arguments.run),
        arguments.folder,
        "hf",
        checkpoint=arguments.checkpoint,
        overrides=overrides,
        force=arguments.force,
    )
    print(converted(arguments.folder, difference))
    return 0
