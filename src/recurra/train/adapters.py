"""Low-rank adapters on a model's linear layers, trained in place of its weights (LoRA, peft underneath)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from recurra._files.digests import content_digest
from recurra.checks import fields_of, require, require_positive, require_probability, require_whole_number, sentence

_ALL = "all-linear"
_OWN = ".lora_"  # in the names of peft's parameters
_LAST_PART = re.compile(r"[^.\d][^.]*(\.\d+)*$")  # with the numbers of a list behind it


@dataclass(frozen=True)
class LoraConfig:
    """Adapters: y = W x + (alpha / rank) B A x, with the W of `init_from` (Hu et al., arXiv 2106.09685, section 4.1).

    B starts at 0. Checkpoints hold the adapters alone; a run that is opened has merged weights.
    """

    rank: int | None = None
    """Rows of A and columns of B; null: no adapters, all weights are trained."""
    alpha: float | None = None
    """Scale of the product of B and A, times the rank; null: twice the rank."""
    dropout: float = 0.0
    """Probability of dropping an input of A."""
    target_modules: list[str] | str = _ALL
    """The linear layers with adapters: "all-linear" for all but the head's, or names, or ends of names, such as [qkv,
    output_projection]."""

    def __post_init__(self) -> None:
        require_whole_number(1, **fields_of(self, "lora", "rank"))
        require_probability(**fields_of(self, "lora", "dropout"))
        if self.alpha is not None:
            require_positive(**fields_of(self, "lora", "alpha"))
        others = (self.alpha, self.dropout, self.target_modules)
        is_used = self.rank is not None or others == (None, 0.0, _ALL)
        require(is_used, "lora.rank", None, "the rank of the adapters that the other keys of lora describe")


class Adapters:
    """The adapters on a model, which from now on are its `state_dict` and all that is trained of it.

    model: with its weights loaded; changed in place.

    Raises:
        ImportError: peft is missing.
        ValueError: `target_modules` fits no linear layer.
    """

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        try:
            import peft
        except ImportError as error:
            raise ImportError('peft is missing: pip install "recurra[hf]"', name="peft") from error
        self.base = content_digest({}, model.state_dict())
        """The digest of the weights that they are trained on."""
        self._model, self.targets = model, _targets(model, config.target_modules)
        alpha: Any = 2 * config.rank if config.alpha is None else config.alpha  # type: ignore[operator]
        options = {"r": config.rank, "lora_alpha": alpha, "lora_dropout": config.dropout}
        self._tuner = peft.LoraModel(model, peft.LoraConfig(target_modules=self.targets, **options), "default")
        self._hooks = [
            model.register_state_dict_post_hook(_keep_adapters),
            model.register_load_state_dict_post_hook(_require_adapters),
        ]

    def __str__(self) -> str:
        n_all = sum(parameter.numel() for parameter in self._model.parameters())
        n = sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)
        return f"trains {n:,} of {n_all:,} parameters ({n / n_all:.2%}), in adapters on {len(self.targets)} layers"

    def require_base(self, base: str | None, path: Path) -> None:
        """Refuse other weights than those that the adapters of a checkpoint, `path`, were trained on."""
        if base != self.base:
            hint = "put the weights back, or say with --init_from where they are"
            expected = f"those that the adapters in {path} were trained on"
            raise ValueError(sentence("init_from", "other weights", expected, hint))

    def merge(self) -> None:
        """Add the adapters to the weights; the model is then one like any other."""
        for hook in self._hooks:
            hook.remove()
        self._tuner.merge_and_unload()
        self._model.requires_grad_(True)


def _targets(model: nn.Module, asked: list[str] | str) -> list[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    words = [asked] if isinstance(asked, str) else asked
    if asked == _ALL:
        words = [name for name in names if name.partition(".")[0] != "head"]
    unknown = [word for word in words if not any(_fits(name, word) for name in names)]
    if unknown or not words:
        known = ", ".join(dict.fromkeys(_LAST_PART.search(name)[0] for name in names)) or "none here"  # type: ignore
        raise ValueError(sentence("lora.target_modules", ", ".join(unknown) or asked, f"linear layers: {known}"))
    return [name for name in names if any(_fits(name, word) for word in words)]


def _fits(name: str, word: str) -> bool:
    return f".{name}".endswith(f".{word}")


def _keep_adapters(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(prefix) and _OWN not in name]:
        del state[name]


def _require_adapters(model: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if _OWN in name]
