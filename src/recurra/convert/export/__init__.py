"""Language models for other runtimes: torch.export programs here, ONNX files in `recurra.convert.export.onnx_file`.

Writing and running the latter needs the extra `export`: `pip install "recurra[export]"`.
"""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
