import pytest
import torch.distributed as dist

from recurra.cli import launched


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(launched, "n_launched", lambda: 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_command_that_ends_well_leaves_its_group(group):
    with launched.reporting_together():
        assert dist.is_initialized()
    assert not dist.is_initialized()
