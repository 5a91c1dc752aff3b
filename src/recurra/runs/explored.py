"""What the explorer has to know of a run: its task, its tokens, its state and its gates."""

from typing import Any

from recurra.export.gated_program import gate_layers
from recurra.export.programs import state_tensors
from recurra.models import LanguageModelShell
from recurra.runs.run import Run

_BYTES = 4  # of a float32 number


def explored(run: Run, model: LanguageModelShell) -> dict[str, Any]:
    """Describe a run for the explorer, as JSON.

    The key-value cache is that of a Transformer with as many layers and channels: 2 float16 numbers per layer, channel
    and token.

    Args:
        run: a run over text or on Memory Horizon.
        model: its model, on the CPU in float32.

    Raises:
        ValueError: the run is of another kind, or its model cannot be exported.
    """
    config: Any = model.config
    layers = gate_layers(model)
    return {
        "name": run.name,
        "task": require_task(run),
        "vocab_size": config.vocab_size,
        "n_outputs": getattr(config, "output_size", None) or config.vocab_size,
        "n_layer": config.n_layer,
        "d_model": config.d_model,
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": _BYTES * sum(_numbers(tensor.shape) for tensor in state_tensors(model)),
        "cache_bytes_per_token": 2 * 2 * config.n_layer * config.d_model,
        "gates": [{"layer": layer.layer, "channels": layer.channels} for layer in layers],
    }


def require_task(run: Run) -> dict[str, Any]:
    """Say what a run's tokens are. Raises ValueError if the explorer has no view for them."""
    found = run.task.explored(run)
    if found is None:
        raise run.task.refusal(run, "over text or on Memory Horizon, which the explorer shows")
    return found


def _numbers(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
