from benchmarks.published import parts_of


def test_only_the_slow_part_is_left_out_and_what_is_asked_for_is_measured():
    assert parts_of("mamba", None) == ["prompt", "tokens"]
    assert parts_of("mamba2", None) == ["prompt", "tokens", "gradients"]
    assert parts_of("mamba", ["gradients"]) == ["gradients"]
