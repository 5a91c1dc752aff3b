"""The explorer's page as it is built by `make web`: the files that a server sends, or that a static folder contains.

The sources are in the folder web/ of the repository; users need neither them nor Node.js.
"""

import gzip
from importlib.resources import files

PAGE = ("index.html", "style.css", "app.js", "icon.svg")
"""The files of the page."""
RUNTIME = ("worker.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm", "licenses.txt")
"""What runs models inside the page: the worker and onnxruntime-web, with the licenses of what they contain."""
MODULE = ("recurra.js", "recurra.d.ts")
"""The module that runs them inside other pages, and its types."""
WEBGPU = ("worker-webgpu.js", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm")
"""The same with WebGPU, beside `RUNTIME`."""


def page_file(name: str) -> bytes:
    """Return the content of one of the files of `PAGE`, `RUNTIME`, `MODULE` and `WEBGPU`."""
    folder = files("recurra.convert.export") / "page"
    known = PAGE + RUNTIME + MODULE + WEBGPU
    if name not in known:
        raise FileNotFoundError(f"the file is {name}; expected one of {', '.join(known)}")
    if name.endswith(".wasm"):
        return gzip.decompress((folder / f"{name}.gz").read_bytes())
    return (folder / name).read_bytes()
