"""The command that trains a run again."""

from tests.scored_runs import HORIZON

from recurra.runs.places import without_outer_places
from recurra.runs.training_command import training_command
from recurra.training import load_recipe


def test_a_run_of_no_recipe_is_trained_by_its_own_configuration(tmp_path):
    (tmp_path / "mine.yaml").write_text(HORIZON)
    experiment = load_recipe(tmp_path / "mine.yaml")
    assert training_command("x", experiment, tmp_path / "none") == "recurra train config.yaml --run runs/x"


def test_no_command_is_named_that_gives_another_run(tmp_path):
    """The recipe has an option that the run has not, and no word of a command line takes one away."""
    other = HORIZON.replace("transition: data}", "transition: data, magnitude_activation: sigmoid}")
    for name, text in (("recipes/toy/other.yaml", other), ("mine.yaml", HORIZON)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    recipes = tmp_path / "recipes"
    assert training_command("x", load_recipe(tmp_path / "mine.yaml"), recipes) == (
        "recurra train config.yaml --run runs/x"
    )
    changed = load_recipe(recipes / "toy" / "other.yaml", ["--data.seed", "2", "--optimizer.gradient_clip", "0.5"])
    assert training_command("toy-other", changed, recipes) == (
        "recurra train recipes/toy/other.yaml --data.seed 2 --optimizer.gradient_clip 0.5"
    )


def test_no_place_of_a_machine_is_told(tmp_path):
    toy = tmp_path / "recipes" / "toy"
    toy.mkdir(parents=True)
    (toy / "text.yaml").write_text("experiment: text\ndata: {path: data}\n")
    words = ["--data.path", "/home/alice/texts", "--init_from", "/home/alice/old/weights.safetensors"]
    run = load_recipe(toy / "text.yaml", words)
    assert training_command("toy-text", run, tmp_path / "recipes") == (
        "recurra train recipes/toy/text.yaml --data.path FOLDER --init_from weights.safetensors"
    )
    config = {"mixture": {"/home/alice/a/shards": 1.0, "~/b/shards": 2.0, "own/shards": 3.0}, "files": ["../x.txt", 4]}
    assert without_outer_places(config) == {
        "mixture": {"shards": 1.0, "shards-2": 2.0, "own/shards": 3.0},
        "files": ["x.txt", 4],
    }


def test_a_precision_that_the_recipe_left_to_the_machine_is_named(tmp_path):
    """So the command makes the same run on any machine."""
    toy = tmp_path / "recipes" / "toy"
    toy.mkdir(parents=True)
    (toy / "auto.yaml").write_text(HORIZON.replace("training: {", "training: {precision: auto, "))
    (toy / "else.yaml").write_text(HORIZON)
    run = load_recipe(toy / "auto.yaml", ["--training.precision", "bf16-mixed"])
    assert training_command("toy-auto", run, tmp_path / "recipes") == (
        "recurra train recipes/toy/auto.yaml --training.precision bf16-mixed"
    )
