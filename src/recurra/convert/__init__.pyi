from recurra.convert.portable import PortableModel, load_single_file, read_weights, save_single_file
from recurra.convert.published.folder import from_huggingface, to_huggingface, to_pth
from recurra.convert.published.gguf_file import to_gguf
from recurra.convert.transformer_xl import transformer_xl_from_original

__all__ = [
    "PortableModel",
    "from_huggingface",
    "load_single_file",
    "read_weights",
    "save_single_file",
    "to_gguf",
    "to_huggingface",
    "to_pth",
    "transformer_xl_from_original",
]
