"""Training, evaluation and decoding with CUDA graphs beside those without: equal numbers bit for bit, time, memory.

python -m benchmarks.gpu.graphs

Each case makes 20 updates of a recipe through the trainer, three times from one seed: twice without graphs, which shows
whether the card repeats itself, and once with them. Weights, the optimiser's state, the carried state and all losses
are compared, then more updates are timed. The trained model is then evaluated both ways on its validation split.
Decoding steps the 88M GateLoop of `benchmarks.decoding` from one state, twice without graphs and once with them, and
compares all logits and states; times are medians, and the host waits for each step, as for a token that is chosen.
Without a card, `RecordedCapture` takes the place of CUDA graphs.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.decoding import gateloop
from benchmarks.gpu.card import arguments, distance, machine, place, write
from recurra.data.batches import Batch, BatchSource
from recurra.decoding.steps import CapturedStep
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.ops._toolkit.graphs import CudaCapture
from recurra.state import tensors
from recurra.train.evaluate import evaluate
from recurra.train.loop import Trainer
from recurra.train.recipe import load_recipe
from recurra.train.run_folder import RunFolder

UPDATES, TIMED, STEPS, BATCHES = 20, 40, 50, 32
DECODING = {"decoding-1": 1, "decoding-8": 8, "decoding-64": 64}
"""Streams side by side."""
# 320 training sequences are 10 updates of 32, so that the window grows in the middle.
CASES = {
    "gateloop": (
        "recipes/memory-horizon/data-controlled-muon.yaml",
        "--data.n_samples=400 --data.window_lengths=[32,48] --data.window_epochs=[1,99]",
        "--data.n_samples=100 --data.batch_size=8 --data.sequence_length=16 --data.window_lengths=[4,6] "
        "--data.window_tokens=12 --data.resets_per_sample=1 --model.n_layer=1 --model.d_model=8 "
        "--model.mixer_options.d_qk=8 --model.mixer_options.d_v=8 --model.mixer_options.n_heads=8",
    ),
    "crt-gru": (
        "recipes/ptb/three-layers-muon.yaml#crt-gru-n70-40-epochs",
        "",
        "--data.batch_size=2 --data.segment_length=5 --model.n_layer=1 --model.d_model=8 --model.n_heads=2 "
        "--model.d_channel_mixing=8",
    ),
}
"""The recipe, what is changed in it, and what else in a dry run."""


class Dispatched(TorchDispatchMode):
    """Takes all operators through torch's dispatcher, as a recording does: kernels on the CPU then are the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Lists the operators of a run with their arguments and results, and puts back what they change outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, Tensor] = {}
        self._before: dict[Any, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args)) | (kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(given.get(argument.name)):
                    if _memory(tensor) not in self.made:
                        part = tensor.data_ptr(), tensor.shape, tensor.stride()
                        self._before.setdefault(part, (tensor, tensor.clone()))
        known = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        # As they are now: an operator may turn its argument over in place.
        recorded = tree_map(_detached, (args, kwargs or {}))
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, *recorded, tree_map(_detached, results)))
        self.made |= {_memory(new): new for new in _tensors(results) if _memory(new) not in known}
        return results

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, before in reversed(self._before.values()):
            tensor.copy_(before)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


class RecordedCapture:
    """Stands in for CUDA graphs on the CPU: a replay repeats a run's operators on the same memory, without its Python.

    What Python computed is baked in, and memory of the runs that is not an input of theirs is lost at every replay, as
    graphs in one pool take it from each other: here it becomes NaN.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self.n_captures = self.n_replays = 0

    def warm_up(self, run: Callable[[], Any]) -> tuple[Any, str]:
        return run(), ""

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        recorder, drawn = _Recorder(), torch.get_rng_state()
        with recorder:
            outputs = run()
        recorder.undo()
        torch.set_rng_state(drawn)
        self._made += recorder.made.values()
        self.n_captures += 1
        return outputs, lambda: self._replay(recorder.calls)

    def fresh(self) -> "RecordedCapture":
        return RecordedCapture()

    @torch.no_grad()
    def _replay(self, calls: Sequence[tuple[Any, Any, Any, Any]]) -> None:
        self.n_replays += 1
        for tensor in self._made:
            tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 1)
        for func, args, kwargs, results in calls:
            for old, new in zip(_tensors(results), _tensors(func(*args, **kwargs))):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextmanager
def corpus(dry: bool) -> Iterator[Path]:
    """A text of words drawn at random, as many different ones as Penn Treebank has."""
    with tempfile.TemporaryDirectory() as folder:
        words, random_ = [f"w{number}" for number in range(50 if dry else 9_999)], random.Random(0)
        for split, n_tokens in {"train": 2_000 if dry else 400_000, "valid": 500, "test": 500}.items():
            drawn = (words + random_.choices(words, k=n_tokens)) if split == "train" else words[:n_tokens]
            lines = (" ".join(drawn[first : first + 20]) for first in range(0, len(drawn), 20))
            Path(folder, f"{split}.txt").write_text("\n".join(lines))
        yield Path(folder)


def trainer_of(case: str, text: Path, folder: Path, *, graphs: bool, dry: bool) -> Trainer:
    recipe, changes, smaller = CASES[case]
    words = [*changes.split(), *(smaller.split() if dry else ())]
    words += ["--training.accelerator", "cpu" if dry else "cuda", "--training.tensorboard", "false"]
    words += ["--training.graphs", "on" if graphs and not dry else "off"]
    if "ptb" in recipe:
        words += ["--data.path", str(text)]
    trainer = Trainer(load_recipe(recipe, words), RunFolder(folder), evaluate)
    if graphs and dry:
        trainer.graphs.capture = RecordedCapture()
    return trainer


def compared(trainer: Trainer) -> list[Tensor]:
    """All that two equal runs have equal after an update."""
    optimizer = tensors(trainer.optimizer.state_dict()["state"])
    return [*trainer.model.state_dict().values(), *optimizer, *tensors(trainer.state), trainer.sums.loss]


def is_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def run(trainer: Trainer, n_timed: int) -> tuple[dict[str, Any], list[Tensor]]:
    """Make the updates that are compared, and then those that are timed."""
    on_card = trainer.fabric.device.type == "cuda"
    if on_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    norms = [trainer._update().clone() for _ in range(UPDATES)]
    results = [x.clone() for x in (*compared(trainer), *norms)]
    float(norms[-1])  # the clock starts on an idle card
    began = time.perf_counter()
    for _ in range(n_timed):
        norm = trainer._update()
    float(norm)  # waits for the card
    found: dict[str, Any] = {"milliseconds": 1e3 * (time.perf_counter() - began) / n_timed}
    found["forms"] = len(trainer.graphs._graphs)
    if on_card:
        found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return found, results


def measured(case: str, text: Path, dry: bool) -> dict[str, Any]:
    with Dispatched() if dry else torch.enable_grad():
        found = decoded(DECODING[case], dry) if case in DECODING else trained(case, text, dry)
    return {"case": case, **found}


def trained(case: str, text: Path, dry: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"updates": UPDATES}
    results = {}
    for name in ("eager", "again", "graphs"):
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(case, text, Path(folder), graphs=name == "graphs", dry=dry)
            found[name], results[name] = run(trainer, 2 if dry else TIMED)
            found[name]["refused"] = [*trainer._notes]
            if name == "again":
                found["evaluation"] = evaluated(trainer, dry)
            del trainer
    found["eager_repeats"] = is_equal(results["eager"], results["again"])
    found["equal"] = is_equal(results["eager"], results["graphs"]) and found["evaluation"]["equal"]
    return found


class Repeated(NamedTuple):
    """The batches of a source, several times over."""

    source: BatchSource
    n_times: int

    def __len__(self) -> int:
        return self.n_times * len(self.source)

    def batch(self, epoch: int, step: int) -> Batch:
        return self.source.batch(epoch, step % len(self.source))


def evaluated(trainer: Trainer, dry: bool) -> dict[str, Any]:
    """Scores of the validation split, with enough batches for graphs to be worth while: equality and tokens/s."""
    source = Repeated(trainer.validation, -(-BATCHES // len(trainer.validation)))
    evaluate(trainer.model, source)  # compiles
    eager = evaluate(trainer.model, source)
    graphs = evaluate(trainer.model, source, capture=RecordedCapture() if dry else CudaCapture(trainer.fabric.device))
    rates = {"eager": eager.tokens_per_second, "graphs": graphs.tokens_per_second}
    return {"tokens_per_second": rates, "equal": eager[:5] == graphs[:5], "batches": len(source)}


@cache
def model_of(dry: bool) -> LanguageModel:
    if not dry:
        return gateloop().cuda()
    options = {"d_qk": 8, "d_v": 8, "n_heads": 8}
    return LanguageModel(LanguageModelConfig(31, None, 1, 8, 8, mixer_options=options)).eval()


@torch.inference_mode()
def decoded(n_streams: int, dry: bool) -> dict[str, Any]:
    """Steps of streams side by side: whether all logits and states are equal, and milliseconds a step."""
    model, results, found = model_of(dry), {}, {}
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary, (STEPS // 10 if dry else STEPS, n_streams, 1), device=model.head.weight.device)
    _, start = model(tokens[0])
    graphs = CapturedStep(model, vocabulary, RecordedCapture() if dry else None)
    if graphs.program(n_streams) is None:
        raise RuntimeError("there is no graph of these steps")
    for name, step in {"eager": model, "again": model, "graphs": graphs}.items():
        state, results[name], seconds = start, [], []
        for token in tokens:
            began = time.perf_counter()
            logits, state = step(token, state)
            logits[0, 0, 0].item()  # waits for the card
            seconds.append(time.perf_counter() - began)
            results[name] += [logits, *tensors(state)]
        found[name] = {"milliseconds": 1e3 * median(seconds)}
    found["eager_repeats"] = is_equal(results["eager"], results["again"])
    found["equal"] = is_equal(results["eager"], results["graphs"])
    return found | {"distance": max(map(distance, results["graphs"], results["eager"]))}


def main(words: list[str] | None = None) -> None:
    parser, cases = arguments(__doc__, "graphs.json"), [*CASES, *DECODING]
    parser.add_argument("--only", nargs="+", choices=cases, default=cases, metavar="CASE")
    given = parser.parse_args(words)
    device = place(given.dry)
    found: list[dict[str, Any]] = []
    with corpus(given.dry) as text:
        for case in given.only:
            try:
                found.append(measured(case, text, given.dry))
            except Exception as error:
                found.append({"case": case, "error": f"{type(error).__name__}: {str(error)[:500]}"})
            print(found[-1], flush=True)
            write(given.out, {"machine": machine(device), "results": found})
    bad = [one["case"] for one in found if "error" in one or (one["eager_repeats"] and not one["equal"])]
    if bad:
        sys.exit(f"with graphs, other numbers or none: {', '.join(bad)}")


if __name__ == "__main__":
    main()
