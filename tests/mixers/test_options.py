"""Options that no layer can work with are refused in words; what every mixer says of its transition and its dropout."""

import inspect
import math
import typing

import pytest
import torch
from tests.impossible import wrong_numbers

import recurra
from recurra.mixers.base import _mixers, mixer_options

D_MODEL = 12
PROBABILITY, EVEN, POSITIVE = "expected a probability", "expected an even number", "expected a finite number above 0"
REFUSED = [
    ("delta-net", {"n_heads": 3, "d_v": 4}, "n_heads is 3; expected a divisor of d_v = 4"),
    ("gated-delta-net", {"n_heads": 4, "n_qk_heads": 3}, "n_qk_heads is 3; expected a divisor of n_heads = 4"),
    ("gated-attention", {"norm_epsilon": 0.0, "n_heads": 2}, f"norm_epsilon is 0.0; {POSITIVE}"),
    ("gateloop", {"transition": "learned"}, "transition is 'learned'; expected one of data, fixed"),
    ("gateloop", {"ring": {"max_phase": math.inf}}, r"ring\.max_phase is inf; expected a finite number of at least 0"),
    ("gateloop-attention", {"window": 0}, "window is 0; expected at least 1, the step itself, or None for all steps"),
    ("h3", {"d_state": 5}, f"d_state is 5; {EVEN} from 2"),
    ("h3", {"discretisation": "euler"}, "discretisation is 'euler'; expected one of zoh, bilinear"),
    ("h3", {"head_dim": 5}, "head_dim is 5; expected a divisor of d_model = 12"),
    ("hgrn2", {"lower_bound": 1.0}, rf"lower_bound is 1.0; {PROBABILITY} in \[0, 1\)"),
    ("hyena", {"order": 1}, "order is 1; expected at least 2"),
    ("linear-rnn", {"transition": "full"}, "transition is 'full'; expected one of diagonal, dense"),
    ("lru", {"r_min": 0.9, "r_max": 0.9}, "r_min is 0.9 and r_max 0.9; expected 0 <= r_min < r_max <= 1"),
    ("mamba", {"d_conv": 1}, "d_conv is 1; expected at least 2"),
    ("mamba", {"selection_scales": True}, "selection_scales is True; expected False where selection_norm is None"),
    ("mamba2", {"n_heads": 4, "n_groups": 3}, "n_groups is 3; expected a divisor of n_heads = 4"),
    ("mamba2", {"norm": "first"}, "norm is 'first'; expected 'after', 'before' or None"),
    ("mamba2", {"d_inner": 0}, "d_inner is 0; expected at least 1"),
    ("rotary-attention", {"n_heads": 2, "query_scale": 0.0}, f"query_scale is 0.0; {POSITIVE}"),
    ("mamba3", {"decay_activation": "exp"}, "decay_activation is 'exp'; expected one of heavy-tail, softplus"),
    ("mamba3", {"d_state": 6}, "d_state is 6; expected a multiple of 4"),
    ("mla", {"n_heads": 2, "d_shared": 3}, f"d_shared is 3; {EVEN}: channels rotate in pairs: or set rotation_base"),
    ("mla", {"n_heads": 2, "norm_epsilon": 0.0}, f"norm_epsilon is 0.0; {POSITIVE}"),
    ("mlstm", {"n_heads": 2, "d_v": 2}, "d_v is 2; expected at least 2 channels a head"),
    ("reformer", {"n_buckets": 5}, f"n_buckets is 5; {EVEN} from 2"),
    ("relative-attention", {"n_heads": 5}, "n_heads is 5; expected a divisor of d_model = 12: or set d_head"),
    ("relative-attention", {"d_model": 9, "n_heads": 3}, f"d_model is 9; {EVEN}"),
    ("retnet", {"n_heads": 12}, "d_qk / n_heads is 1; expected an even number of key channels a head"),
    ("rg-lru", {"r_max": 1.0}, "r_min is 0.9 and r_max 1.0; expected 0 < r_min < r_max < 1"),
    ("rotary-attention", {"n_heads": 2, "rotated_share": 0.1}, f"rotated channels a head is 0; {EVEN}"),
    ("rotary-attention", {"n_heads": 6, "n_kv_heads": 4}, "n_kv_heads is 4; expected a divisor of n_heads = 6"),
    ("rotary-attention", {"n_heads": 2, "qk_norm": 0.0}, f"qk_norm is 0.0; {POSITIVE}"),
    ("rotary-attention", {"n_heads": 2, "qk_norm_over": "both"}, "qk_norm_over is 'both'; expected one of head, all"),
    ("short-conv", {"kernel_size": 0}, "kernel_size is 0; expected at least 1"),
    ("s5-hyena", {"activation": "relu"}, "activation is 'relu'; expected one of gelu, half-glu, none"),
    ("s5-hyena", {"d_state": 12, "blocks": 4}, "blocks is 4; expected a divisor of d_state / 2 = 6"),
    ("s4d", {"discretisation": "euler"}, "discretisation is 'euler'; expected one of zoh, bilinear"),
    ("s5", {"d_state": 12, "blocks": 4}, "blocks is 4; expected a divisor of d_state / 2 = 6"),
    ("s5", {"max_step": 0.0001}, "min_step is 0.001; expected at most max_step = 0.0001"),
    ("slstm", {"n_heads": 12}, "d_model is 12; expected at least 2 channels a head for the norm, 24 in all"),
    ("zamba2", {"n_heads": 5}, "n_heads is 5; expected a divisor of d_model = 24: or set d_head"),
    ("reformer", {"dropout": math.nan, "n_heads": 2}, f"dropout is nan; {PROBABILITY}"),
]
TRANSITIONS = {
    "gated-delta-net": {"A_log", "decay_projection.weight", "dt_bias"},
    "gateloop": {"transition.projection.bias", "transition.projection.weight"},
    "gateloop-attention": {"transition.projection.bias", "transition.projection.weight"},
    "gla": {"gate_projection.0.weight", "gate_projection.1.bias", "gate_projection.1.weight"},
    "h3": {"frequency", "log_decay", "log_step"},
    "hgrn2": {"forget.weight"},
    "lightning-attention": {"log_rate"},
    "kda": {"A_log", "decay_projection.0.weight", "decay_projection.1.weight", "dt_bias"},
    "linear-rnn": {"recurrence.alpha"},
    "lru": {"nu", "theta"},
    "mamba": {"log_decay", "step_bias"},
    "mamba2": {"log_decay", "step_bias"},
    "mamba2-attention": {"mamba.log_decay", "mamba.step_bias"},
    "mamba3": {"step_bias"},
    "zamba2": {"mamba.log_decay", "mamba.step_bias"},
    "rg-lru": {"decay", "recurrence_gate.bias", "recurrence_gate.weight"},
    "rwkv4": {"bonus", "log_decay"},
    "rwkv7": {"decay_bias", "decay_projection.0.weight", "decay_projection.2.weight"},
    "s4d": {"frequency", "log_decay", "log_step"},
    "s5": {"frequency", "log_decay", "log_step"},
    "s5-hyena": {"frequency", "log_decay", "log_step"},
}


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        recurra.create_mixer(name, **{"d_model": D_MODEL, **options})


@pytest.mark.parametrize("name", recurra.list_mixers())
def test_no_option_takes_a_number_that_cannot_be(name, unchecked):
    hints = typing.get_type_hints(_mixers[name].__init__)
    for option in mixer_options(name):
        for wrong in wrong_numbers(hints[option]):
            if (name, option, wrong) != ("relative-attention", "mem_len", 0):
                with pytest.raises(ValueError, match=option):
                    recurra.create_mixer(name, 64, **{option: wrong})


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
