"""The models under their names in transformers' Auto classes."""

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

from recurra.convert.huggingface.modeling import MODELS


def register() -> None:
    """Make the models known to AutoConfig and AutoModelForCausalLM; a second call changes nothing.

    transformers' Trainer finds the names of causal language models in a table that AutoModelForCausalLM does not fill.
    It smooths the labels of others without shifting them: those models would learn to copy.
    """
    names = getattr(modeling_auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    for model in MODELS:
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
        names[model.config_class.model_type] = model.__name__
