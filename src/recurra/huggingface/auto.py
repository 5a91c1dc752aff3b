"""The models under their names in transformers' Auto classes."""

from transformers import AutoConfig, AutoModelForCausalLM

from recurra.huggingface.modeling import MODELS


def register() -> None:
    """Make the models known to AutoConfig and AutoModelForCausalLM; a second call changes nothing."""
    for model in MODELS:
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
