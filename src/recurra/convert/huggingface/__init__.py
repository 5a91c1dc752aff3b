"""Language models as Hugging Face models: importing this registers them with transformers' Auto classes.

    import recurra.convert.huggingface
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)

No code comes from the folder, so that `trust_remote_code` is not needed: the import above is all. A program that does
not import this, such as a command line tool, runs with the models registered as
`python -m recurra.convert.huggingface MODULE ...`.
Needs the extra `hf`: `pip install "recurra[hf]"`.
"""

from recurra.convert.huggingface.backbone import RecurraModel
from recurra.convert.huggingface.configuration import RecurraConfig, RecurrentCache, config_for
from recurra.convert.huggingface.folder import fast_tokenizer, load_folder, read_tokenizer, save_folder
from recurra.convert.huggingface.modeling import RecurraForCausalLM, causal_lm, register

register()

__all__ = [
    "RecurraConfig",
    "RecurraForCausalLM",
    "RecurraModel",
    "RecurrentCache",
    "causal_lm",
    "config_for",
    "fast_tokenizer",
    "load_folder",
    "read_tokenizer",
    "register",
    "save_folder",
]
