"""`recurra classify` over a short and a much longer video: its resident memory along the way.

    python -m benchmarks.long_video RUN --frames 16 --times 1 10 1000

Each video shows a square that moves; its frames are written one by one. The command runs in a process of its own,
whose memory is looked at while it runs.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import av
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.table import keep

SIZE, RATE = (240, 320), 8
EVERY = 0.05  # seconds between two looks


def write_video(path: Path, n_frames: int) -> None:
    """Write an mp4 file of so many frames."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=RATE)
        stream.height, stream.width, stream.pix_fmt = *SIZE, "yuv420p"
        noise = np.random.default_rng(0).integers(0, 60, (*SIZE, 3), dtype=np.uint8)
        for number in range(n_frames):
            picture = noise.copy()
            at = number * 20 % (SIZE[1] - 60)
            picture[90:150, at : at + 60] = 230
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())


def resident(pid: int) -> float:
    """Megabytes of a process that are its own; files mapped into it are not counted."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


def watch(run: str, video: Path, folder: Path) -> dict:
    """Classify a video and keep the memory over time, from the first segment's line on."""
    program = [sys.executable, "-u", str(Path(sys.executable).with_name("recurra"))]
    command = [*program, "classify", run, str(video), "--rate", str(RATE), "--out", str(folder)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = [resident(process.pid)]
        with tempfile.TemporaryFile("w+") as said:  # a full pipe would hold the command up
            lines = subprocess.Popen(["cat"], stdin=process.stdout, stdout=said)
            while process.poll() is None:
                time.sleep(EVERY)
                seen.append(resident(process.pid))
            lines.wait()
    if process.returncode:
        raise SystemExit(f"recurra classify ended with {process.returncode}")
    along = [round(value, 1) for value in seen if value]
    tenth = max(1, len(along) // 10)
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "MB at the first segment": along[0],
        "MB along the way": along[::tenth],
        "MB at the most": max(along),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="the folder of a run over video")
    parser.add_argument("--frames", type=int, default=16, help="frames of a training clip (default: 16)")
    parser.add_argument("--times", type=int, nargs="+", default=[1, 10, 1000], help="lengths in training clips")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as place:
        for times in arguments.times:
            video = Path(place) / f"{times}-clips.mp4"
            write_video(video, times * arguments.frames)
            results[f"{times * arguments.frames:,} frames"] = watch(arguments.run, video, Path(place))
    table = Table("video", *next(iter(results.values())))
    for name, row in results.items():
        table.add_row(name, *map(str, row.values()))
    Console().print(table)
    keep(Path("runs/benchmarks-long-video.json"), results)


if __name__ == "__main__":
    main()
