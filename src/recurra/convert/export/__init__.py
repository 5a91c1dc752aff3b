"""Language models for other runtimes: torch.export programs here, ONNX files in `recurra.convert.export.onnx_file`.

The latter, and `recurra.convert.export.onnx_file`, which runs such files, need the extra `export`:
`pip install "recurra[export]"`.
"""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
