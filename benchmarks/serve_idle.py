"""Memory of idle sessions, those that stay in memory and those on disk.

    python -m benchmarks.serve_idle --resident 10000
    python -m benchmarks.serve_idle --resident 1024

Sessions of a model with the state of the 88M GateLoop (12 layers of 624 channels, 60 kB) are opened in the server's own
classes, each with a state of its own and 100 tokens of transcript, and written to its database. The figure is the
growth of the process's own memory.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.table import megabytes
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._http import ServeSettings
from recurra.serve._model import PausedStream, ServedModel
from recurra.serve._service import Service
from recurra.state import map_tensors


async def measure(service: Service, count: int) -> dict[str, float]:
    sessions = service.sessions
    model = service.model(None)
    before, start = 0.0, time.process_time()
    for number in range(-50, count):
        if number == 0:
            before = megabytes("RssAnon")
        session = await sessions.open("", model, f"s{number + 50}")
        for token in range(100):
            session.transcript.append(token, -1.0, 0)
        session.state = PausedStream(map_tensors(torch.clone, model.start.model_state), tuple(range(64)), 100)
        await sessions._write(session)
    found = {"sessions": count, "resident": sessions.n_resident, "MB": megabytes("RssAnon") - before}
    return found | {"ms of CPU each": 1e3 * (time.process_time() - start) / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--resident", type=int, default=1024, help="that stay in memory (default: %(default)s)")
    arguments = parser.parse_args()
    options = {"d_qk": 624, "d_v": 624, "n_heads": 624}
    model = LanguageModel(LanguageModelConfig(300, None, 12, 624, 32, mixer_options=options)).eval()
    with tempfile.TemporaryDirectory() as folder:
        settings = ServeSettings(
            sessions_file=Path(folder) / "sessions.sqlite", max_resident_sessions=arguments.resident + 50
        )
        service = Service([ServedModel("state", model)], settings, threads=1)
        print({name: round(value, 2) for name, value in asyncio.run(measure(service, arguments.sessions)).items()})
        service.store.close()


if __name__ == "__main__":
    main()
