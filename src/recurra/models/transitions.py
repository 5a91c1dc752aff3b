"""Which layers of a language model have a transition that can be shown: |a| and a phase for every step and channel."""

from torch import nn

from recurra.checks import kind_of, sentence


def mixers_with_transition(model: nn.Module, *, step_by_step: bool = False) -> dict[int, nn.Module]:
    """Return the mixers with a method `transition(x) -> (magnitude, phase)` by the number of their block, from 0.

    Args:
        model: one that has `blocks`, each with a `mixer`.
        step_by_step: leave out mixers whose transition depends on the steps before as well (Mamba's convolution), which
            `transition` does not know of a single step.

    Raises:
        TypeError: the model has no blocks with mixers.
    """
    try:
        mixers = [block.get_submodule("mixer") for block in model.get_submodule("blocks").children()]
    except AttributeError as error:
        came = f"{kind_of(model)} ({error})"
        raise TypeError(sentence("model", came, "one with blocks, each with a mixer")) from error
    return {
        layer: mixer
        for layer, mixer in enumerate(mixers)
        if callable(getattr(mixer, "transition", None))
        and not (step_by_step and getattr(mixer, "transition_looks_back", False))
    }
