"""The names and values that options take, for the library and for `recurra COMMAND --help`, which loads no torch."""

from pathlib import Path
from typing import Literal, TypeAlias, get_args

Split: TypeAlias = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

Source: TypeAlias = Literal["folder", "parquet", "jsonl", "hf"]
SOURCES: tuple[Source, ...] = get_args(Source)
VocabularyKind: TypeAlias = Literal["words", "bpe", "bytes"]
VOCABULARY_KINDS: tuple[VocabularyKind, ...] = get_args(VocabularyKind)

RECIPE_KEYS = ("experiment", "data", "model", "init_from", "lora", "optimizer", "schedule", "averaging", "training")
"""The keys at the top of a recipe: the fields of `recurra.train.experiment.Experiment`."""

Numbers: TypeAlias = Literal["float32", "bfloat16", "int8", "int4"]
DTYPES: tuple[Numbers, ...] = get_args(Numbers)
"""How weights can be kept."""
KVCacheNumbers: TypeAlias = Literal["float32", "int8"]
KV_CACHE_DTYPES: tuple[KVCacheNumbers, ...] = get_args(KVCacheNumbers)
"""How a copy for decoding can keep keys and values."""
StateNumbers: TypeAlias = Literal["float32", "int16"]
STATE_DTYPES: tuple[StateNumbers, ...] = get_args(StateNumbers)
"""How a copy for decoding can keep matrices in states."""

Format: TypeAlias = Literal["run", "hf", "safetensors", "published", "gguf"]
FORMATS: tuple[Format, ...] = get_args(Format)
GgufType: TypeAlias = Literal["f32", "f16", "q8_0", "q4_0"]
GGUF_TYPES: tuple[GgufType, ...] = get_args(GgufType)
"""What matrices in GGUF files are written in."""
PUBLISHED_CLASSES = {
    "jamba": "JambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "bamba": "BambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "rwkv7": "RWKV7ForCausalLM",
    "xlstm": "xLSTMForCausalLM",
}
"""Transformers' classes that can be converted, and flash-linear-attention's for RWKV-7, by their model_type."""

RECENT_TOKENS = 64
"""How many of its last tokens a stream remembers, and so how far back a repetition penalty can look."""
TEMPERATURES = (
    *(0.3, 0.4, 0.5, 0.6, 0.7),
    *(round(0.8 + 0.02 * number, 2) for number in range(31)),
    *(1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0),
)
"""What `best_temperature` tries, rising: 0.80, 0.82, ... 1.40, and coarser steps on both sides, from 0.3 to 8."""

_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL, _IN_CLONE = _PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes"


def recipes_folder() -> Path:
    """Locate the recipes that come with Recurra: inside an installed package, beside `src` in a clone.

    Raises:
        FileNotFoundError: there are none; the installation is not complete.
    """
    for folder in (_IN_WHEEL, _IN_CLONE):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"recipes is {_IN_WHEEL}, which does not exist; expected a folder: reinstall Recurra")


def recipe_names() -> list[str]:
    """List the names of the recipes that come with Recurra, FOLDER/NAME each, in alphabetical order."""
    folder = recipes_folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.yaml"))
