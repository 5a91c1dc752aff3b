"""Tasks: what a kind of data that cannot do something says, and a new one from its file to a scored run."""

TOY = """
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


def test_a_new_generated_task_is_one_file(run_python):
    program = (
        TOY
        + """
    from recurra.cli import main
    from recurra.train.run import open_run

    with open("copy.yaml", "w") as recipe:
        recipe.write("{experiment: copy, data: {steps_per_epoch: 3, eval_steps: 1}, model: {n_layer: 1, d_model: 8}}")
    words = ["--training.tensorboard=false", "--training.accelerator=cpu", "--data.batch_size=4"]
    assert main(["train", "copy.yaml", "--run", "run", *words]) == 0
    assert main(["eval", "run"]) == 0
    run = open_run("run")
    print("scored", sorted(run.scores["test"])[-3:], run.model.config.vocab_size)
    """
    )
    lines = run_python(program).splitlines()
    assert any(line.startswith("finished at step 3") for line in lines)
    assert "scored ['split', 'step', 'tokens_per_second'] 3" in lines
