"""The Neumann series around the last exact inverse: its result, its error, and what is kept."""

import copy
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recurra.ops.cells.orthogonal import Cayley, Neumann, NeumannCayley, _exact_inverse, _series, _skew_symmetric

SIZE = 8
BELOW = SIZE * (SIZE - 1) // 2


def random_entries(scale=1.0, dtype=torch.float64):
    return scale * torch.randn(BELOW, dtype=dtype)


def make(settings, dtype=torch.float64):
    return NeumannCayley(SIZE, 3, settings).to(dtype)


def norm(matrix):
    return float(torch.linalg.matrix_norm(matrix.detach()))


def drifting(cayley, updates, step=3e-3):
    """Call the transform along a walk of A; yield A, U and whether the inverse was exact."""
    entries = random_entries(dtype=cayley.reference.dtype)
    for _ in range(updates):
        entries = entries + step * torch.randn_like(entries)
        u = cayley(entries)
        yield entries, u, bool(torch.equal(cayley.reference, entries))


@pytest.mark.parametrize("order", [1, 2, 5])
def test_the_series(order):
    """Against powers of the dense matrix, and against the exact inverse within the bound."""
    reference, step = random_entries(), random_entries(0.01)
    a_0, identity = _skew_symmetric(reference, SIZE), torch.eye(SIZE, dtype=torch.float64)
    inverse = torch.linalg.inv(identity + a_0)
    ratio = -inverse @ _skew_symmetric(step, SIZE)
    expected = sum(torch.linalg.matrix_power(ratio, k) for k in range(order + 1)) @ inverse
    actual, bound = _series(reference + step, reference, inverse, order)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
    left_out = norm(actual - torch.linalg.inv(identity + a_0 + _skew_symmetric(step, SIZE)))
    assert left_out <= float(bound) < 30 * left_out


def test_a_step_too_large_has_no_bound():
    reference = random_entries()
    _, bound = _series(reference + 10.0, reference, _exact_inverse(reference, SIZE), 3)
    assert float(bound) == math.inf


@pytest.mark.parametrize(("tolerance", "step"), [(1e-4, 3e-3), (1e-8, 3e-4)])
def test_the_error_keeps_to_its_tolerance(tolerance, step):
    cayley = make(Neumann(order=2, tolerance=tolerance))
    errors, exact = [], []
    for entries, u, was_exact in drifting(cayley, 60, step):
        errors.append(norm(u - Cayley(SIZE, 3)(entries)))
        assert float(cayley.error(entries)) == pytest.approx(errors[-1], abs=1e-14)
        exact.append(was_exact)
    assert max(errors) <= 2 * tolerance
    assert max(errors) > 1e-3 * tolerance
    assert 1 < sum(exact) < 60


def test_a_shorter_series_needs_more_exact_inverses():
    counts = {}
    for order in (1, 3, 6):
        torch.manual_seed(0)
        cayley = make(Neumann(order=order, refresh_interval=10**6, tolerance=1e-6))
        counts[order] = sum(was_exact for *_, was_exact in drifting(cayley, 60))
    assert counts[1] > counts[3] > counts[6]


def test_the_refresh_interval():
    cayley = make(Neumann(order=4, refresh_interval=7, tolerance=1.0))
    exact = [was_exact for *_, was_exact in drifting(cayley, 22, step=1e-6)]
    assert [update for update, was_exact in enumerate(exact) if was_exact] == [0, 7, 14, 21]


def test_calls_do_not_count_updates_do():
    """The transform depends on how A changed, not on how often it was called."""
    cayley = make(Neumann(order=2, refresh_interval=3, tolerance=1e-2))
    often = copy.deepcopy(cayley)
    for entries, u, _ in drifting(cayley, 12):
        for _ in range(4):
            assert torch.equal(often(entries), u)
        assert int(often.age) == int(cayley.age)


def test_gradients_are_those_of_the_exact_transform():
    """To a relative error of the order of the tolerance if the inverse is approximated."""
    tolerance = 1e-6
    cayley, weights = make(Neumann(order=3, tolerance=tolerance)), torch.randn(SIZE, SIZE, dtype=torch.float64)
    approximated = 0
    for entries, _, was_exact in drifting(cayley, 20):
        leaf = entries.clone().requires_grad_()
        (actual,) = torch.autograd.grad((weights * cayley(leaf)).sum(), leaf)
        (expected,) = torch.autograd.grad((weights * Cayley(SIZE, 3)(leaf)).sum(), leaf)
        distance = torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)
        assert distance <= 10 * tolerance
        approximated += not was_exact and distance > 0
    assert approximated > 5


def test_gradients_of_first_and_second_order():
    cayley = NeumannCayley(4, 1, Neumann(order=4, tolerance=1e-14)).double()
    entries = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cayley, entries)
    assert torch.autograd.gradgradcheck(cayley, entries)


def test_an_earlier_graph_survives_later_updates():
    """Autograd must not save the buffer that the next update overwrites."""
    cayley = make(Neumann())
    entries = random_entries().requires_grad_()
    u = cayley(entries)
    before = u.detach().clone()
    (expected,) = torch.autograd.grad(u.square().sum() + u[0, 1], entries, retain_graph=True)
    cayley(entries.detach() + 1.0)
    assert torch.equal(u, before)
    assert torch.equal(torch.autograd.grad(u.square().sum() + u[0, 1], entries)[0], expected)


def test_a_jump_of_the_weights_is_seen():
    cayley = make(Neumann())
    for scale in (1.0, 100.0, 0.0):
        entries = random_entries(scale)
        torch.testing.assert_close(cayley(entries), Cayley(SIZE, 3)(entries), rtol=1e-12, atol=1e-12)


def test_nan_travels_and_does_not_stay():
    cayley = make(Neumann())
    entries = random_entries()
    assert cayley(entries * math.nan).isnan().all()
    torch.testing.assert_close(cayley(entries), Cayley(SIZE, 3)(entries), rtol=1e-12, atol=1e-12)


def test_saved_and_loaded_it_goes_on_as_before(tmp_path):
    """Bit for bit, even across later exact inverses."""
    torch.manual_seed(3)
    cayley, walked, other = (NeumannCayley(SIZE, 3, Neumann(2, 5, 1e-4)) for _ in range(3))
    walk = [entries for entries, _, _ in drifting(walked, 33)]
    for entries in walk[:13]:
        cayley(entries)
    assert not torch.equal(cayley.reference, walk[12])
    torch.save(cayley.state_dict(), tmp_path / "cayley.pt")
    expected = [cayley(entries) for entries in walk[12:]]
    other.load_state_dict(torch.load(tmp_path / "cayley.pt", weights_only=True))
    twin = copy.deepcopy(other)
    for entries, u in zip(walk[12:], expected):
        assert torch.equal(other(entries), u)
        assert torch.equal(twin(entries), u)
    assert all(torch.equal(one, two) for one, two in zip(other.buffers(), cayley.buffers()))


def test_inverses_are_computed_anew_rather_than_saved():
    cayley = NeumannCayley(SIZE, 3, Neumann(2, 5, 1e-4))
    assert cayley.state_dict().keys() - Cayley(SIZE, 3).state_dict().keys() == {"reference", "latest", "age"}


def test_what_is_kept_is_computed_anew_after_a_load():
    cayley, other = make(Neumann()), make(Neumann())
    entries = random_entries()
    cayley(entries)
    other(random_entries())
    with torch.no_grad():  # wrong on purpose, because it must not be used
        other.inverse.fill_(7.0)
        other.current.fill_(7.0)
    other.load_state_dict(cayley.state_dict())
    torch.testing.assert_close(other(entries), Cayley(SIZE, 3)(entries), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loaded", ["reference", "latest"])
def test_half_a_state_is_not_believed(loaded):
    cayley, other = make(Neumann()), make(Neumann())
    mine, its = random_entries(), random_entries()
    cayley(its)
    other(mine)
    other.load_state_dict({loaded: cayley.state_dict()[loaded]}, strict=False)
    for entries in (mine, its):
        torch.testing.assert_close(other(entries), Cayley(SIZE, 3)(entries), rtol=1e-6, atol=1e-6)


def test_a_change_of_type_leaves_no_rounding_behind():
    cayley = make(Neumann(), torch.float32)
    entries = random_entries(dtype=torch.float32)
    cayley(entries)
    u = cayley.double()(entries.double())
    torch.testing.assert_close(u, Cayley(SIZE, 3)(entries.double()), rtol=1e-13, atol=1e-14)


def test_processes_share_all_that_is_kept():
    """Or one of them would take what it has for what another one has made of newer weights."""
    cayley = make(Neumann(order=2), torch.float32)
    cayley(random_entries(dtype=torch.float32))
    buffers = dict(cayley.share_memory().named_buffers())
    assert buffers.keys() == {"signs", "reference", "latest", "age", "inverse", "current"}
    assert [name for name, buffer in buffers.items() if not buffer.is_shared()] == []


def test_autocast_does_not_reach_it():
    outside, inside = make(Neumann(), torch.float32), make(Neumann(), torch.float32)
    for entries, expected, _ in drifting(outside, 8):
        leaf, other = entries.clone().requires_grad_(), entries.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            u = inside(leaf)
            (gradient,) = torch.autograd.grad(u.sum(), leaf)
        assert torch.equal(u, expected)
        assert torch.equal(gradient, torch.autograd.grad(outside(other).sum(), other)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_are_refused(dtype):
    with pytest.raises(TypeError, match="expected float32 or float64: use the exact inverse"):
        make(Neumann(), dtype)(random_entries(dtype=dtype))


@pytest.mark.parametrize(
    "options", [{"order": 0}, {"refresh_interval": 0}, {"tolerance": 0.0}, {"tolerance": math.nan}]
)
def test_impossible_settings_are_named(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} is"):
        Neumann(**options)


def test_the_operator_is_sound():
    cayley = make(Neumann())
    cayley(random_entries())
    buffers = cayley.reference, cayley.latest, cayley.age, cayley.inverse, cayley.current
    for entries in (cayley.latest.clone(), cayley.latest + 1e-4, random_entries()):
        arguments = (entries, *(buffer.clone() for buffer in buffers), 2, 100, 1e-6)
        torch.library.opcheck(torch.ops.recurra.neumann_inverse, arguments)


def test_flops_are_the_products_of_the_series():
    cayley = make(Neumann(order=3))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        cayley(random_entries())
    assert counter.get_total_flops() == 4 * 2 * SIZE**3
