"""How the weights of every mixer start: the mean and the root mean square of each parameter, as they were reviewed.

A change of an initialisation shows as a change of initial_values.json, which
`python -m tests.mixers.test_initial_values` writes anew.
"""

import json
from pathlib import Path

import pytest
import torch

import recurra

RECORD = Path(__file__).with_name("initial_values.json")
D_MODEL = 64


def measured(name: str) -> dict[str, list[float]]:
    """Return [number of values, mean, root mean square] of each parameter."""
    torch.manual_seed(0)
    mixer = recurra.create_mixer(name, D_MODEL)
    found = {}
    for parameter_name, parameter in mixer.named_parameters():
        values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        values = values.detach().double()
        statistics = values.mean(), values.square().mean().sqrt()
        found[parameter_name] = [values.numel(), *(float(f"{x.item():.3g}") for x in statistics)]
    return found


@pytest.mark.parametrize("name", recurra.list_mixers())
def test_weights_start_as_recorded(name):
    recorded, now = json.loads(RECORD.read_text())[name], measured(name)
    assert list(now) == list(recorded)
    for parameter, (n, mean, rms) in recorded.items():
        assert now[parameter][0] == n, parameter
        room = (6 / n**0.5 + 0.01) * rms  # of other random numbers: six standard deviations
        assert now[parameter][1] == pytest.approx(mean, abs=room), parameter
        assert now[parameter][2] == pytest.approx(rms, abs=room), parameter


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(measured(name))}" for name in recurra.list_mixers()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
