"""A new task and a new language model, each from its file to a run."""

TASK = """
    from dataclasses import dataclass

    from recurra.train.tasks import GeneratedConfig, GeneratedTask, Sequences
    from recurra.train import register_task

    @dataclass(frozen=True, kw_only=True)
    class CopyConfig(GeneratedConfig):
        min_length: int = 4
        max_length: int = 4
        eval_min_length: int = 4
        eval_max_length: int = 4

        def make(self):
            def draw(random, batch_size, length):
                tokens = random.integers(0, 3, (batch_size, length))
                return tokens, tokens

            return Sequences(draw, 3, 3, 3)

    @register_task("copy")
    class Copy(GeneratedTask):
        data = CopyConfig
"""

MODEL = """
    from dataclasses import dataclass
    from typing import NamedTuple

    from torch import Tensor, nn

    from recurra.models import LanguageModelShell, negative_log_likelihood, register_model
    from recurra.models.registry import ModelConfig, Size, from_data

    @dataclass(frozen=True, kw_only=True)
    class ToyConfig(ModelConfig):
        vocab_size: Size = from_data()
        d_model: int = 6

    class ToyState(NamedTuple):
        total: Tensor

    @register_model("toy", config=ToyConfig)
    class Toy(LanguageModelShell):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
            self.head = nn.Linear(config.d_model, config.vocab_size)

        def embed(self, tokens):
            return self.embedding(tokens)

        def body(self, x, state, **lengths):
            y = (self.initial_state(len(x)) if state is None else state).total[:, None] + x.cumsum(1)
            return y, ToyState(y[:, -1].clone())

        def losses(self, hidden, targets):
            return negative_log_likelihood(self.head(hidden), targets)

        def initial_state(self, batch):
            return ToyState(self.head.weight.new_zeros(batch, self.config.d_model))

        def require_state(self, state, batch):
            assert state.total.shape == (batch, self.config.d_model)
"""


def test_a_new_task_and_a_new_model_are_one_file_each(run_python, tmp_path):
    """In one process, whose start takes longer than both runs."""
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a cat sat on a mat and a dog ran off\n" * 30)
    program = (
        TASK
        + MODEL
        + f'''
    from recurra.cli import main
    from recurra.train.run import open_run

    with open("copy.yaml", "w") as recipe:
        recipe.write("""
    experiment: copy
    data: {{steps_per_epoch: 3, eval_steps: 1}}
    model: {{n_layer: 1, d_model: 8}}
    """)
    words = ["--training.tensorboard=false", "--training.accelerator=cpu", "--data.batch_size=4"]
    assert main(["train", "copy.yaml", "--run-dir", "run", *words]) == 0
    assert main(["eval", "run"]) == 0
    run = open_run("run")
    print("scored", sorted(run.scores["test"])[-3:], run.model.config.vocab_size)

    with open("toy.yaml", "w") as recipe:
        recipe.write("""
    experiment: text-toy
    data: {{path: {tmp_path}, cache: {tmp_path}/cache, batch_size: 2, segment_length: 4}}
    training: {{max_steps: 2, tensorboard: false, accelerator: cpu}}
    """)
    assert main(["train", "toy.yaml", "--run-dir", "toy", "--model.d_model=5"]) == 0
    model = open_run("toy").model
    print("opened", type(model).__name__, model.config.d_model)
    '''
    )
    lines = run_python(program).splitlines()
    for start in ("finished at step 3", "finished at step 2"):
        assert any(line.startswith(start) for line in lines)
    assert "scored ['split', 'step', 'tokens_per_second'] 3" in lines
    assert "opened Toy 5" in lines
