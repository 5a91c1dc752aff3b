"""Put the model of a run into the package, as `recurra.pretrained.memory_horizon()` opens it.

recurra train demo/data-controlled --training.threads 1 --training.precision 32-true --run-dir runs/shipped
python -m tools.pretrained runs/shipped
"""

import argparse
from pathlib import Path

from recurra import open_run
from recurra.convert.portable import PortableModel, save_single_file
from recurra.train.experiment import to_plain

FILE = Path(__file__).parents[1] / "src" / "recurra" / "pretrained_models" / "memory-horizon.safetensors"


def main() -> None:
    """Write the weights and the experiment of the run's best checkpoint as one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = open_run(parser.parse_args().run)
    experiment = to_plain(run.experiment)
    save_single_file(PortableModel(run.model, None, experiment, run.step), FILE)
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
