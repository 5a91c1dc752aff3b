"""Every recipe can be read and built, and those of published experiments say what the papers' tables say."""

import functools
import itertools
import json
import re
import warnings
from pathlib import Path

import pytest
import yaml
from torch import nn

import recurra
from recurra.data import BatchSource, Split
from recurra.data.text import TextConfig
from recurra.models.registry import VideoSizes, on_meta
from recurra.models.transformer_xl import TransformerXL
from recurra.train import recipe as recipe_family
from recurra.train.config import ScheduleConfig
from recurra.train.experiment import Experiment
from recurra.train.optimizer import parameter_groups
from recurra.train.recipe import _recipe_keys, load_recipe, read_family, recipe_help
from recurra.train.run import default_run_folder
from recurra.train.tasks.generated import GeneratedConfig

FOLDER = Path(__file__).parents[1] / "recipes"
FILES = sorted(FOLDER.glob("*/*.yaml"))
read_file = functools.cache(recipe_family._read)  # each of a family's hundred variants would read the whole file again
FAMILIES = [path for path in FILES if "axes" in read_file(path)]
INDEPENDENT = {"state-tracking", "recall", "induction"}
"""Folders of families whose axes set different things: every choice is read once, not every combination of them."""


def variants(path: Path) -> list[str]:
    family = read_file(path)
    if path.parent.name not in INDEPENDENT:
        return list(recipe_family._family(path, family).variants)
    axes = [list(choices) for choices in family["axes"].values()]
    first = [choices[0] for choices in axes]
    chosen = ([*first[:n], choice, *first[n + 1 :]] for n, choices in enumerate(axes) for choice in choices)
    return list(dict.fromkeys(map("-".join, chosen)))


RECIPES = [
    *(str(path) for path in FILES if path not in FAMILIES),
    *(f"{path}#{name}" for path in FAMILIES for name in variants(path)),
]
OF_EACH_FILE = {next(recipe for recipe in RECIPES if recipe.partition("#")[0] == str(path)) for path in FILES}
QUICK = OF_EACH_FILE | {*RECIPES[::20]}
"""Recipes that are built by default; the others are with `-m slow`."""
VOCABULARIES = {"wikitext-103": 267_735, "ptb": 10_000, "my-text": 50_277}


class Sizes:
    """A data set without data."""

    def __init__(self, vocab_size: int, output_size: int) -> None:
        self.vocab_size, self.output_size = vocab_size, output_size

    def source(self, split: Split) -> BatchSource:
        raise NotImplementedError


@pytest.fixture(autouse=True, scope="module")
def _files_are_read_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_family, "_read", read_file)
        yield


@functools.cache
def load(recipe: str) -> Experiment:
    """The recipe's experiment, which every test that asks for it only reads."""
    return load_recipe(recipe)


@functools.cache
def build(recipe: str) -> nn.Module:
    """The recipe's model without its corpus, to be read; a large one is outlined."""
    experiment = load(recipe)
    if experiment.task.reads is VideoSizes:
        with on_meta():
            return experiment.model.build(VideoSizes(31, experiment.data.n_frames, experiment.data.image_size))
    if isinstance(experiment.data, GeneratedConfig):  # nothing is drawn yet
        return experiment.build_model(experiment.build_data())
    if not isinstance(experiment.data, TextConfig):  # small models
        return experiment.build_model(Sizes(experiment.data.largest_number + 2, experiment.data.modulus))
    n_words = experiment.data.bpe_vocab_size or VOCABULARIES[Path(experiment.data.path).name]
    with on_meta():
        return experiment.build_model(Sizes(n_words, n_words))


def n_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def name_of(recipe: str) -> str:
    return Path(recipe).relative_to(FOLDER).as_posix()


def sampled(recipes: list[str]) -> list:
    return [pytest.param(recipe, marks=() if recipe in QUICK else pytest.mark.slow) for recipe in recipes]


@pytest.mark.parametrize("recipe", sampled(RECIPES), ids=name_of)
def test_a_recipe_makes_a_model_and_groups_for_all_its_parameters(recipe):
    experiment, model = load(recipe), build(recipe)
    groups = parameter_groups(model, experiment.optimizer)
    assert sum(parameter.numel() for group in groups for parameter in group["params"]) == n_parameters(model)


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, path in enumerate(FILES)], ids=name_of
)
def test_the_help_of_a_recipe_lists_all_its_keys_and_no_others(path):
    word = next(word for word in RECIPES if word.partition("#")[0] == str(path))
    keys = set(_recipe_keys(load(word).experiment))
    listed = set(re.findall(r"^  --([\w.]+)", recipe_help(word), re.MULTILINE))
    assert listed == keys | {key.partition(".")[0] for key in keys}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_runs_that_a_recipe_scores_are_those_that_it_trains(path):
    header = path.read_text()
    trained = {default_run_folder(str(FOLDER.parent / recipe)) for recipe in re.findall(r"recurra train (\S+)", header)}
    scored = {Path(run) for run in re.findall(r"recurra eval (\S+)", header)}
    assert scored <= trained


def test_every_recipe_takes_every_mixer():
    distinct = {}
    for recipe in RECIPES:
        content = recipe_family._read_recipe(recipe)
        model = content.get("model", {})
        if model.get("mixer_options"):
            distinct.setdefault(json.dumps([model.get(key) for key in ("mixer", "mixer_options", "d_model")]), content)
    pairs = itertools.product(distinct.values(), recurra.list_mixers())
    for recipe, mixer in itertools.islice(pairs, 0, None, 23):  # all of them take seconds
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = recipe_family._with_mixer_of({"mixer": mixer}, recipe)["model"]
        with on_meta():
            assert recurra.create_mixer(mixer, model.get("d_model", 64), **model["mixer_options"])


# CRT paper: the rows of each table as (model, segment length), and how often the two names of a row stand in its words
CRT_TABLES = {
    ("ptb", 2): ("3-layers", ["transformer", "transformer-xl", "crt-ncgru"], [70, 35, 17]),
    ("ptb", 3): ("16-layers", ["transformer", "transformer-xl", "crt-ncgru"], [70, 35, 17]),
    ("wikitext-103", 4): ("3-layers", ["transformer", "transformer-xl", "crt-ncgru"], [150, 70, 35]),
    ("wikitext-103", 5): ("16-layers", ["transformer", "transformer-xl", "crt-ncgru"], [150, 70, 35]),
    ("ptb", 8): ("3-layers", ["transformer", "memory-only", "position-only", "crt-ncgru"], [70]),
    ("ptb", 9): ("3-layers", ["crt-gru", "crt-ncgru"], [70, 35, 17]),
    ("ptb", 10): ("16-layers", ["crt-gru", "crt-ncgru"], [70, 35, 17]),
    ("wikitext-103", 11): ("3-layers", ["crt-gru", "crt-ncgru"], [150, 70, 35]),
    ("wikitext-103", 12): ("16-layers", ["crt-gru", "crt-ncgru"], [150, 70, 35]),
}


@pytest.mark.parametrize(("corpus", "number"), list(CRT_TABLES))
def test_every_row_of_the_papers_tables_has_its_recipe(corpus, number):
    layers, models, lengths = CRT_TABLES[corpus, number]
    published = json.loads((FOLDER / corpus / "results.json").read_text())["published"]
    rows = {name for name, row in published.items() if number in row["tables"]}
    assert rows <= set(read_family(FOLDER / corpus / "transformers.yaml").variants)
    assert rows == {f"{model}-{layers}-n{length}" for model in models for length in lengths}


@pytest.mark.parametrize(
    "recipe", sampled([recipe for recipe in RECIPES if "transformers.yaml#" in recipe]), ids=name_of
)
def test_a_row_is_what_its_name_says(recipe):
    name = recipe.rpartition("#")[2]
    experiment, model = load(recipe), build(recipe)
    config = model.config
    assert f"-{config.n_layer}-layers-n{config.segment_length}" in name
    what = name.partition(f"-{config.n_layer}-layers")[0]
    if isinstance(model, TransformerXL):
        assert config.mem_len == {"transformer": 0, "transformer-xl": config.segment_length}[what]
    else:
        assert (config.memory, config.position) == {
            "crt-gru": ("gru", "rnn-gru"),
            "crt-ncgru": ("ncgru", "rnn-ncgru"),
            "memory-only": ("ncgru", "relative"),
            "position-only": ("none", "rnn-ncgru"),
        }[what]
    assert experiment.data.bptt_segments >= 2
    assert config.cutoffs == ([] if config.vocab_size == 10_000 else [20_000, 40_000, 200_000])


@pytest.mark.parametrize(
    ("model", "published"),
    [("transformer", 151e6), ("transformer-xl", 151e6), ("crt-gru", 150e6), ("crt-ncgru", 150e6)],
)
def test_the_16_layer_wikitext_103_models_have_the_published_parameters(model, published):
    recipe = f"{FOLDER}/wikitext-103/transformers.yaml#{model}-16-layers-n150"
    assert n_parameters(build(recipe)) == pytest.approx(published, rel=0.01)


ACTIVATIONS = {"magnitude_activation": "sigmoid", "phase_activation": "identity"}


@pytest.mark.parametrize(("name", "transition"), [("data-controlled", "data"), ("fixed", "fixed")])
def test_memory_horizon_is_table_2_and_table_3(name, transition):
    experiment = load(f"{FOLDER}/memory-horizon/{name}.yaml")
    data, model, optimizer, training = experiment.data, experiment.model, experiment.optimizer, experiment.training
    # Table 2
    assert (data.largest_number, data.sequence_length, data.resets_per_sample) == (4, 1024, 3)
    assert (data.modulus, data.n_samples) == (51, 2000)
    # Table 3
    assert training.epochs == 300
    assert data.batch_size * training.accumulate == 32
    assert training.max_steps is None
    assert (optimizer.learning_rate, optimizer.betas, optimizer.weight_decay) == (0.0025, (0.9, 0.98), 0.05)
    assert (optimizer.transition_learning_rate, optimizer.transition_weight_decay) == (None, 0.05)
    assert experiment.schedule == ScheduleConfig(warmup_steps=10_000)
    assert (model.n_layer, model.d_channel_mixing, model.d_model) == (4, 128, 64)
    assert model.mixer == "gateloop"
    assert model.mixer_options == {"d_qk": 64, "d_v": 64, "n_heads": 64, "transition": transition, **ACTIVATIONS}


def test_wikitext_103_is_table_4():
    experiment = load(f"{FOLDER}/wikitext-103/gateloop.yaml")
    assert isinstance(experiment.data, TextConfig)
    data, model, optimizer, training = experiment.data, experiment.model, experiment.optimizer, experiment.training
    assert training.epochs == 100
    assert data.batch_size * training.accumulate == 16
    assert training.max_steps is None
    assert (optimizer.learning_rate, optimizer.transition_learning_rate) == (0.000125, 0.0001)
    assert (optimizer.weight_decay, optimizer.transition_weight_decay) == (0.25, 0.0)
    assert optimizer.betas == (0.9, 0.98)
    assert experiment.schedule == ScheduleConfig(warmup_steps=5000)
    assert (model.n_layer, model.d_channel_mixing, model.d_model) == (12, 1872, 624)
    assert model.mixer_options == {"d_qk": 624, "d_v": 624, "n_heads": 624, "transition": "data", **ACTIVATIONS}
    assert (data.vocabulary, data.bpe_vocab_size) == ("bpe", 50_257)
    assert n_parameters(build(f"{FOLDER}/wikitext-103/gateloop.yaml")) == pytest.approx(125e6, rel=0.06)


def load_yaml(folder: str, name: str) -> dict:
    return yaml.safe_load((FOLDER / folder / f"{name}.yaml").read_text())


@pytest.mark.parametrize("folder", ["memory-horizon", "demo"])
def test_the_two_variants_differ_in_the_transition_alone(folder):
    one, other = (load_yaml(folder, name) for name in ("data-controlled", "fixed"))
    assert one["model"]["mixer_options"].pop("transition") == "data"
    assert other["model"]["mixer_options"].pop("transition") == "fixed"
    assert one == other


@pytest.mark.parametrize("name", ["data-controlled", "fixed"])
def test_the_ring_s_recipes_differ_in_the_ring_and_in_clipping_alone(name):
    one, other = (load_yaml("memory-horizon", stem) for stem in (name, f"{name}-ring"))
    assert other["optimizer"].pop("gradient_clip") == 1.0
    assert sorted(other["model"]["mixer_options"].pop("ring")) == ["input_share", "max_phase", "r_max", "r_min"]
    assert one == other


@pytest.mark.parametrize(
    ("row", "epochs", "segments", "published"),
    [("timesformer", 15, 1, 68.4), ("pi-vit", 15, 1, 72.9), ("crvit-gru", 40, 2, 73.4), ("crvit-ncgru", 40, 2, 72.2)],
)
def test_smarthome_is_what_was_published(row, epochs, segments, published):
    path = FOLDER / "smarthome" / "models.yaml"
    experiment = load(f"{path}#{row}")
    assert experiment.task.name == "video"
    data, optimizer, model = experiment.data, experiment.optimizer, build(f"{path}#{row}")
    assert (data.layout, data.protocol) == ("smarthome", "cross-subject")
    assert (data.n_frames, data.image_size, data.n_segments) == (8, 224, segments)
    assert data.batch_size * experiment.training.accumulate == 64
    assert (optimizer.algorithm, optimizer.learning_rate, optimizer.weight_decay) == ("sgd", 0.005, 1e-4)
    assert optimizer.options == {"momentum": 0.9, "nesterov": False}
    assert experiment.schedule.options == {"steps": [11, 14], "factor": 0.1}
    assert experiment.training.epochs == epochs
    assert model.config.head_dropout == 0.5
    assert (model.config.n_layer, model.config.d_model, model.config.patch_size) == (12, 768, 16)
    assert n_parameters(model) > 121e6  # TimeSformer's published 121.4M
    if segments == 2:
        assert model.config.cell == row.removeprefix("crvit-")
    results = json.loads((FOLDER / "smarthome" / "results.json").read_text())
    assert results["published"][row]["test_mean_class_accuracy"] == published
