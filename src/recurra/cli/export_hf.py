"""`recurra export hf`: a run as a folder that transformers loads."""

from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import command_parser, split_overrides
from recurra.cli.convert import convert
from recurra.training import RunFolder


def run(words: Sequence[str]) -> int:
    """Export, and say how much the logits differ."""
    own, overrides = split_overrides(words)
    parser = command_parser(
        "export hf",
        "Write a run over text as transformers loads it, after `import recurra.huggingface`: config.json, "
        "generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json, and recurra.json, from "
        "which `recurra convert` makes a run again. The logits of both are compared before the folder is put in its "
        "place: they may differ by 1e-5, in float32. Needs the extra hf. With --data.path FOLDER a run that has no "
        "tokenizer of its own finds its corpus.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder; of a model over text")
    parser.add_argument("folder", metavar="FOLDER", help="the folder to write")
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), last, previous or a file"
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    arguments = parser.parse_args(own)
    RunFolder(arguments.run).require_run()
    convert(
        Path(arguments.run),
        Path(arguments.folder),
        "hf",
        checkpoint=arguments.checkpoint,
        overrides=overrides,
        force=arguments.force,
    )
    return 0
