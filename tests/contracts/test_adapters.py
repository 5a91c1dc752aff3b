"""Low-rank adapters of peft on every module: all of them learn, under DDP too, and merging changes nothing."""

import pytest
import torch
import torch.distributed as dist
from tests.contracts.conftest import build_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recurra import state as states
from recurra.data.batches import Poses
from recurra.decoding.packing import pack_linear_layers
from recurra.models.language_model import LanguageModel, LanguageModelConfig

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def _one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def add_adapters(module: nn.Module, targets="all-linear") -> list[str]:
    """Put adapters on the module, neither of whose matrices is zero, and return the names of their weights."""
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False), module)
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def merge(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, peft.tuners.tuners_utils.BaseTunerLayer):
            part.merge()


def dead(module: nn.Module, names: list[str]) -> list[str]:
    gradients = {name: module.get_parameter(name).grad for name in names}
    return [name for name, gradient in gradients.items() if gradient is None or not gradient.any()]


def outputs(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Read a piece of several steps, and then a single one."""
    y, state = module(x[:, :-1])
    last, state = module(x[:, -1:], state)
    return [y, last, *states.tensors(state)]


@pytest.mark.usefixtures("_one_rank")
def test_every_adapter_learns_and_merges(case, module):
    x = case.draw(2, 9)
    if not any(isinstance(part, nn.Linear) for part in module.modules()):
        pytest.skip("a cell without linear layers, which peft refuses")
    names = add_adapters(module)
    before = outputs(module, x)
    sum(y.abs().square().sum() for y in before).backward()
    assert dead(module, names) == []
    replica = DistributedDataParallel(module)
    for _ in range(2):  # the second one fails if an adapter had no gradient
        replica(x[:, :1])[0].sum().backward()
    merge(module)
    torch.testing.assert_close(outputs(module, x), before)


def test_adapters_of_a_timesformer_and_its_tasks_learn_and_merge():
    model = build_model("pi-vit", n_layer=1)
    with torch.no_grad():
        model.encoder.blocks[0].time_projection.weight.normal_()  # at 0 no gradient passes
    names, clip = add_adapters(model), torch.randn(2, 2, 3, 4, 4)
    poses, before = Poses(torch.rand(2, 2, 13, 2) * 4, torch.randn(2, 1, 216)), model(clip)[0]
    model.loss(clip, torch.ones(2, 1, dtype=torch.long), None, poses)[0].sum().backward()
    assert dead(model, names) == []
    merge(model)
    torch.testing.assert_close(model(clip)[0], before)


@pytest.mark.parametrize(
    ("name", "options", "target"),
    [
        ("transformer-xl", {}, "position_keys"),
        ("recurrent", {"mixer": "hyena"}, "filters.output"),
        ("recurrent", {"mixer": "s5", "tie_embeddings": True, "logit_cap": 3.0}, "head.linear"),
    ],
)
def test_weights_that_others_read_take_no_adapter(name, options, target):
    with pytest.raises(ValueError, match=r"Target module (LinearWeights|TiedLinear)\(\) is not supported"):
        add_adapters(build_model(name, **options), [target])


def test_an_adapter_on_an_embedding_is_scaled_with_it():
    model = LanguageModel(LanguageModelConfig(11, 11, 1, 8, 8, mixer="s5", embedding_scale=3.0)).double()
    tokens = torch.randint(11, (2, 5))
    add_adapters(model, ["embedding"])
    before = outputs(model, tokens)
    merge(model)
    torch.testing.assert_close(outputs(model, tokens), before)


def test_packing_takes_merged_weights_alone():
    model = build_model("recurrent", mixer="s5", n_layer=1)
    add_adapters(model)
    with pytest.raises(ValueError, match=r"one with an adapter, the Linear blocks\.0.*: call merge_and_unload"):
        pack_linear_layers(model, "int8")
