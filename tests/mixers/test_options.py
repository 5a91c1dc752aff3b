"""Options that no layer can work with are refused in words; what every mixer says of its transition and its dropout."""

import inspect
import math

import pytest
import torch

import recurra
from recurra.mixers.segment_attention import SegmentAttention

D_MODEL = 12
PROBABILITY, EVEN, POSITIVE = "expected a probability", "expected an even number", "expected a finite number above 0"
REFUSED = [
    ("delta-net", {"n_heads": 3, "d_v": 4}, "n_heads is 3; expected a divisor of d_v = 4"),
    ("delta-net", {"n_heads": 0}, "n_heads is 0; expected at least 1"),
    ("delta-net", {"d_qk": 0, "n_heads": 1}, "d_qk is 0; expected at least 1"),
    ("delta-net", {"kernel_size": 0, "n_heads": 1}, "kernel_size is 0; expected at least 1"),
    ("gated-delta-net", {"n_heads": 4, "n_qk_heads": 3}, "n_qk_heads is 3; expected a divisor of n_heads = 4"),
    ("gated-delta-net", {"n_heads": 2, "d_qk": 9}, "n_heads is 2; expected a divisor of d_qk = 9"),
    ("gated-delta-net", {"norm_epsilon": 0.0}, f"norm_epsilon is 0.0; {POSITIVE}"),
    ("gated-attention", {"norm_epsilon": 0.0, "n_heads": 2}, f"norm_epsilon is 0.0; {POSITIVE}"),
    ("gateloop", {"transition": "learned"}, "transition is 'learned'; expected one of data, fixed"),
    ("gateloop", {"magnitude_activation": "relu"}, "magnitude_activation is 'relu'.*sigmoid, stable_exponential"),
    ("gateloop", {"phase_activation": "tanh"}, "phase_activation is 'tanh'.*identity"),
    ("gateloop", {"n_heads": 5}, "n_heads is 5; expected a divisor of d_qk = 12"),
    ("gateloop", {"d_v": 6}, "n_heads is 12; expected a divisor of d_v = 6"),
    ("gateloop", {"ring": {"max_phase": math.inf}}, r"ring\.max_phase is inf; expected a finite number of at least 0"),
    ("gateloop", {"ring": {"input_share": math.nan}}, r"ring\.input_share is nan; expected a finite number of"),
    ("gateloop-attention", {"window": 0}, "window is 0; expected at least 1, the step itself, or None for all steps"),
    ("gateloop-attention", {"transition": "learned"}, "transition is 'learned'; expected one of data, fixed"),
    ("gla", {"n_heads": 4, "d_v": 6}, "n_heads is 4; expected a divisor of d_qk = 6"),
    ("gla", {"n_heads": 2, "gate_rank": 0}, "gate_rank is 0; expected at least 1"),
    ("gla", {"n_heads": 2, "gate_temperature": 0.0}, f"gate_temperature is 0.0; {POSITIVE}"),
    ("gru", {"d_model": 0}, "d_model is 0"),
    ("h3", {"d_state": 5}, f"d_state is 5; {EVEN} from 2"),
    ("h3", {"head_dim": 5}, "head_dim is 5; expected a divisor of d_model = 12"),
    ("h3", {"min_step": 0.2}, "min_step is 0.2; expected at most max_step = 0.1"),
    ("hgrn2", {"n_heads": 5}, "n_heads is 5; expected a divisor of d_model = 12"),
    ("hgrn2", {"lower_bound": 1.0}, rf"lower_bound is 1.0; {PROBABILITY} in \[0, 1\)"),
    ("hyena", {"order": 1}, "order is 1; expected at least 2"),
    ("hyena", {"window": 0}, "window is 0; expected at least 1"),
    ("linear-attention", {"d_v": 6}, "n_heads is 4; expected a divisor of d_v = 6"),
    ("linear-rnn", {"transition": "full"}, "transition is 'full'; expected one of diagonal, dense"),
    ("linear-rnn", {"d_state": 0}, "d_state is 0; expected at least 1"),
    ("lru", {"r_min": 0.9, "r_max": 0.9}, "r_min is 0.9 and r_max 0.9; expected 0 <= r_min < r_max <= 1"),
    ("lru", {"r_max": 1.1}, "r_max 1.1"),
    ("lru", {"max_phase": math.inf}, f"max_phase is inf; {POSITIVE}"),
    ("mamba", {"dt_rank": 0}, "dt_rank is 0; expected at least 1"),
    ("mamba", {"d_conv": 1}, "d_conv is 1; expected at least 2"),
    ("mamba", {"selection_norm": 0.0}, "selection_norm is 0.0; expected a number above 0, or None"),
    ("mamba", {"selection_scales": True}, "selection_scales is True; expected False where selection_norm is None"),
    ("mamba2", {"n_heads": 5}, r"n_heads is 5; expected a divisor of expand \* d_model = 24"),
    ("mamba2", {"n_heads": 4, "n_groups": 3}, "n_groups is 3; expected a divisor of n_heads = 4"),
    ("mamba2", {"min_step": 0.0}, f"min_step is 0.0; {POSITIVE}"),
    ("mamba3", {"d_state": 6}, "d_state is 6; expected a multiple of 4"),
    ("mamba3", {"d_state": 5, "rope_fraction": 1.0}, "d_state is 5; expected a multiple of 2"),
    ("mamba3", {"rope_fraction": 0.3}, "rope_fraction is 0.3; expected one of 0.5, 1.0"),
    ("mamba3", {"max_step": math.inf}, f"max_step is inf; {POSITIVE}"),
    ("mlstm", {"n_heads": 2, "d_qk": 5}, "n_heads is 2; expected a divisor of d_qk = 5"),
    ("mlstm", {"n_heads": 2, "d_v": 2}, "d_v is 2; expected at least 2 channels a head"),
    ("performer", {"n_features": 0}, "n_features is 0; expected at least 1"),
    ("reformer", {"n_buckets": 5}, f"n_buckets is 5; {EVEN} from 2"),
    ("reformer", {"n_rounds": 0}, "n_rounds is 0; expected at least 1"),
    ("reformer", {"window": 0}, "window is 0; expected at least 1"),
    ("relative-attention", {"n_heads": 5}, "n_heads is 5; expected a divisor of d_model = 12: or set d_head"),
    ("relative-attention", {"segment_length": 0}, "segment_length is 0"),
    ("relative-attention", {"mem_len": -1}, "mem_len is -1"),
    ("relative-attention", {"d_model": 9, "n_heads": 3}, f"d_model is 9; {EVEN}"),
    ("retnet", {"n_heads": 12}, "d_qk / n_heads is 1; expected an even number of key channels a head"),
    ("retnet", {"n_heads": 6, "d_v": 6}, "d_v is 6; expected at least 2 channels a head for the group norm, 12 in all"),
    ("rg-lru", {"lru_width": 6, "n_heads": 4}, "n_heads is 4; expected a divisor of lru_width = 6"),
    ("rg-lru", {"d_conv": 0}, "d_conv is 0; expected at least 1"),
    ("rg-lru", {"r_max": 1.0}, "r_min is 0.9 and r_max 1.0; expected 0 < r_min < r_max < 1"),
    ("rotary-attention", {"n_heads": 4}, f"rotated channels a head is 3; {EVEN}"),
    ("rotary-attention", {"n_heads": 2, "rotated_share": 0.1}, f"rotated channels a head is 0; {EVEN}"),
    ("rotary-attention", {"n_heads": 6, "n_kv_heads": 4}, "n_kv_heads is 4; expected a divisor of n_heads = 6"),
    ("rotary-attention", {"n_heads": 2, "window": 0}, "window is 0"),
    ("rotary-attention", {"n_heads": 2, "rotation_base": -1.0}, f"rotation_base is -1.0; {POSITIVE}"),
    ("rwkv4", {"d_wkv": 0}, "d_wkv is 0; expected at least 1"),
    ("rwkv4-channel-mixing", {"d_hidden": 0}, "d_hidden is 0; expected at least 1"),
    ("s4d", {"init": "legs"}, "init is 'legs'; expected one of lin, inv"),
    ("s4d", {"discretisation": "euler"}, "discretisation is 'euler'; expected one of zoh, bilinear"),
    ("s4d", {"d_state": 5}, f"d_state is 5; {EVEN}"),
    ("s5", {"d_state": 12, "blocks": 4}, "blocks is 4; expected a divisor of d_state / 2 = 6"),
    ("s5", {"max_step": 0.0001}, "min_step is 0.001; expected at most max_step = 0.0001"),
    ("s5-hyena", {"kernel_size": 0}, "kernel_size is 0; expected at least 1"),
    ("s5-hyena", {"d_state": 5}, f"d_state is 5; {EVEN} from 2"),
    ("slstm", {"n_heads": 12}, "d_model is 12; expected at least 2 channels a head for the norm, 24 in all"),
    *(
        (name, {"dropout": dropout, "n_heads": 2}, f"dropout is {dropout}; {PROBABILITY}")
        for name in ("gated-attention", "reformer", "relative-attention", "rotary-attention")
        for dropout in (1.0, math.nan)
    ),
]
TRANSITIONS = {
    "gated-delta-net": {"A_log", "decay_projection.weight", "dt_bias"},
    "gateloop": {"transition.projection.bias", "transition.projection.weight"},
    "gateloop-attention": {"transition.projection.bias", "transition.projection.weight"},
    "gla": {"gate_projection.0.weight", "gate_projection.1.bias", "gate_projection.1.weight"},
    "h3": {"frequency", "log_decay", "log_step"},
    "hgrn2": {"forget.weight"},
    "linear-rnn": {"recurrence.alpha"},
    "lru": {"nu", "theta"},
    "mamba": {"log_decay", "step_bias"},
    "mamba2": {"log_decay", "step_bias"},
    "mamba3": {"step_bias"},
    "rg-lru": {"decay", "recurrence_gate.bias", "recurrence_gate.weight"},
    "rwkv4": {"bonus", "log_decay"},
    "s4d": {"frequency", "log_decay", "log_step"},
    "s5": {"frequency", "log_decay", "log_step"},
    "s5-hyena": {"frequency", "log_decay", "log_step"},
}


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        recurra.create_mixer(name, **{"d_model": D_MODEL, **options})


def test_segments_take_a_probability_too():
    with pytest.raises(ValueError, match=f"dropout is 1.0; {PROBABILITY}"):
        SegmentAttention(8, dropout=1.0)


@pytest.mark.parametrize("name", recurra.list_mixers())
def test_transition_parameters_and_the_zeros_of_the_start(name):
    layer = recurra.create_mixer(name, 48)
    owned = {name for name, parameter in layer.named_parameters() if parameter in layer.transition_parameters()}
    assert owned == TRANSITIONS.get(name, set())
    assert not any(part.any() for part in layer.initial_state(2))


@pytest.mark.parametrize("name", recurra.list_mixers())
def test_dropout_acts_in_training_alone(name):
    if "dropout" not in inspect.signature(recurra.create_mixer(name, D_MODEL * 4).__init__).parameters:
        return
    layer, x = recurra.create_mixer(name, 48, dropout=0.5), torch.randn(1, 9, 48)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
