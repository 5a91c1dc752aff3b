"""A sequence over several ranks: outputs, last states and all gradients are those of one rank."""

from pathlib import Path

import pytest
import torch
from tests.processes import Program, run_file

from recurra.mixers.base import create_mixer
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors

# Those whose states compose, in every way that their operators compute; then others, and states of growing length.
MIXERS = {
    "gateloop": {},
    "gla": {"n_heads": 2},
    "linear-attention": {"n_heads": 2},
    "min-gru": {},
    "retnet": {"n_heads": 2},
    "mamba2": {},
    "slstm": {"n_heads": 2},
    "rotary-attention": {"n_heads": 2},
}
LENGTHS = {2: [11, 8], 3: [7, 1, 11]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The results of 2 and of 3 ranks."""
    folder = tmp_path_factory.mktemp("pieces")
    torch.manual_seed(5)
    problems = {}
    for name, options in MIXERS.items():
        module = create_mixer(name, 8, **options).double()
        with torch.no_grad():
            _, state = module(torch.randn(2, 6, 8, dtype=torch.float64))
        x = torch.randn(2, 19, 8, dtype=torch.float64)
        problems[name] = {"options": options, "x": x, "state": list(state), "lengths": LENGTHS}
    torch.save(problems, folder / "problems.pt")
    file = Path(__file__).with_name("pieces_worker.py")
    ended = Program(run_file(file, folder), folder, OMP_NUM_THREADS="1").wait()
    assert ended.status == 0, ended.said
    return folder


def results(folder: Path, name: str, world: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """The outputs put together, the gradients summed over the ranks, and the last state, alike on all."""
    ranks = [torch.load(folder / f"{world}-{rank}.pt")[name] for rank in range(world)]
    gradients = [sum(parts) for parts in zip(*(rank["gradients"] for rank in ranks))]
    for rank in ranks[1:]:
        torch.testing.assert_close(rank["last"], ranks[0]["last"], rtol=0, atol=0)
    return torch.cat([rank["y"] for rank in ranks], 1), gradients, ranks[0]["last"]


@pytest.fixture
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("world", LENGTHS)
@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_over_ranks_is_the_mixer(folder, float64, name, world):
    problem = torch.load(folder / "problems.pt")[name]
    torch.manual_seed(0)
    module = create_mixer(name, 8, **problem["options"])
    x = problem["x"].requires_grad_()
    given = [t.requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in problem["state"]]
    y, last = module(x, type(module.initial_state(2))(*given))
    weights = torch.linspace(-1, 1, 19)[:, None]
    loss = (y * weights * torch.arange(1, y.shape[-1] + 1)).sum()
    loss = loss + sum(t.abs().square().sum() for t in tensors(last) if t.requires_grad)
    loss.backward()
    gradients = [x.grad, *(p.grad for p in module.parameters()), *(t.grad for t in given)]
    got_y, got_gradients, got_last = results(folder, name, world)
    torch.testing.assert_close(got_y, y.detach(), rtol=1e-10, atol=1e-10)
    for got, expected in zip(got_gradients, gradients, strict=True):
        expected = torch.zeros(()) if expected is None else expected
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for got, expected in zip(got_last, last, strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world", LENGTHS)
def test_a_model_over_ranks_is_the_model(folder, float64, world):
    """Layers that exchange and layers that wait, one above the other."""
    torch.manual_seed(0)
    config = LanguageModelConfig(11, n_layer=3, d_model=8, d_channel_mixing=8, mixer=["gateloop", "gru", "mamba"])
    model = LanguageModel(config)
    tokens = torch.arange(62).view(2, 31) * 7 % 11
    losses, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
    losses.sum().backward()
    got, gradients, _ = results(folder, "model", world)
    torch.testing.assert_close(got, losses.detach(), rtol=1e-10, atol=1e-10)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world", LENGTHS)
def test_second_derivatives_are_refused(folder, world):
    for rank in range(world):
        refusals = torch.load(folder / f"{world}-{rank}.pt")["second derivatives"]
        for name, refusal in refusals.items():  # one exchanges its states, the other passes them on
            assert "differentiated once only" in refusal, (rank, name)
