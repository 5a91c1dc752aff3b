"""Our side of `benchmarks.serve`: the 88M GateLoop with random weights behind the server, in a process of its own.

python -m benchmarks.serve_ours PORT WEIGHTS THREADS SESSIONS_FILE RESIDENT

WEIGHTS may be "model", which prepares nothing, or "dry", a tiny model; RESIDENT sessions stay in memory.
"""

import sys
from pathlib import Path

from benchmarks.decoding import gateloop
from recurra._process import keep_large_blocks
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._app import run_service
from recurra.serve._http import ServeSettings
from recurra.serve._model import ServedModel


def main(words: list[str]) -> None:
    port, weights, threads, sessions, resident = words
    keep_large_blocks()

    def load() -> list[ServedModel]:
        if weights == "dry":
            model = LanguageModel(LanguageModelConfig(300, None, 1, 32, 64)).eval()
            return [ServedModel("gateloop", model, weights="float32")]
        return [ServedModel("gateloop", gateloop(), weights=None if weights == "model" else weights)]

    settings = ServeSettings(
        port=int(port),
        sessions_file=Path(sessions),
        max_streams=2048,
        max_queue=2048,
        max_resident_sessions=int(resident),
    )
    run_service(load, settings, int(threads))


if __name__ == "__main__":
    main(sys.argv[1:])
