"""Calls as CUDA graphs: the launches of one call are recorded, and later calls of the same form replay them.

A small model leaves a card idle while the host launches kernels. A graph holds all launches of a training update, of a
step of decoding or of a batch of an evaluation, with their addresses: whatever changes between calls has to lie in
memory that stays where it is. Inputs are therefore copied into static buffers, numbers included, and outputs stay where
the graph writes them, until the next one runs.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

WARM_UPS = 3
"""Calls of a form that run without a graph first: kernels are compiled, and an optimiser gets its state."""
MOST_GRAPHS = 8
IDLE = 100
"""A graph gives way to a new form once it has not run for this many calls. Lengths drawn anew for every batch would
otherwise be captured again and again; those beyond the limit run without a graph."""


class Capture(Protocol):
    """What turns launches into a graph."""

    device: torch.device

    def warm_up(self, run: Callable[[], Any]) -> tuple[Any, str]:
        """Run without a graph; return the outputs, and why no graph can repeat the run, or ""."""

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record a run without executing it; return its outputs and what executes it."""

    def fresh(self) -> "Capture":
        """Make another one, whose graphs leave the outputs of these alone."""


class CudaCapture:
    """CUDA graphs in one memory pool: each uses again what the others need only while they run.

    Warm-ups run on the stream of the captures, since autograd runs backward on the streams of the forward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._first: torch.cuda.CUDAGraph | None = None  # a pool without a graph must not be used again

    def warm_up(self, run: Callable[[], Any]) -> tuple[Any, str]:
        """Run on the stream of captures, and look for what a replay would leave out: reads and draws on the host."""
        current, drawn = torch.cuda.current_stream(self.device), _host_generators()
        self._stream.wait_stream(current)
        with _watching() as waits, torch.cuda.stream(self._stream):
            outputs = run()
        current.wait_stream(self._stream)
        if waits:
            return outputs, "the model or its loss waits for the device"
        return outputs, "" if drawn == _host_generators() else "the model draws random numbers on the host"

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record the run; if that fails, raise RuntimeError with the stream as it was."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                outputs = run()
        except BaseException:
            torch.cuda.set_stream(current)  # torch.cuda.graph leaves its own one behind if the capture cannot end
            raise
        self._first = self._first or graph
        return outputs, graph.replay

    def fresh(self) -> "CudaCapture":
        """Make another memory pool."""
        return CudaCapture(self.device)


def capture_on(device: torch.device, graphs: str) -> Capture | None:
    """Return what captures on a device, or None if `graphs` is "off" or there is no card."""
    return CudaCapture(device) if graphs != "off" and device.type == "cuda" else None


@contextmanager
def _watching() -> Iterator[list[str]]:
    """Collect the warnings that torch gives for operations that wait for the device; pass all others on."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        text = str(warning.message)
        if "called a synchronizing" in text:
            found.append(text)
        elif "prototype feature" not in text and "capturable=True" not in text:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _host_generators() -> tuple[Any, bytes]:
    return random.getstate(), torch.get_rng_state().numpy().tobytes()


class Graph:
    """The static inputs of one form of calls and, after its warm-ups, its graph."""

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec, device: torch.device) -> None:
        number = torch.zeros((), dtype=torch.float32, device=device)
        self.leaves = [
            torch.empty_like(leaf) if isinstance(leaf, Tensor) else number.clone() if _is_number(leaf) else leaf
            for leaf in leaves
        ]
        self.inputs = tree_unflatten(self.leaves, spec)
        self.n_runs = self.used = 0
        self.outputs: Any = None
        self.replay: Callable[[], None] | None = None
        self._own = {leaf.untyped_storage().data_ptr() for leaf in self.leaves if isinstance(leaf, Tensor)}

    def fill(self, leaves: Sequence[Any]) -> None:
        """Copy the inputs of a call; a number is the argument of a kernel, for which nothing waits."""
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if places:
            torch._foreach_copy_([self.leaves[place] for place in places], [leaves[place] for place in places])
        for own, leaf in zip(self.leaves, leaves):
            if _is_number(leaf):
                own.fill_(leaf)

    def apart(self, output: Any) -> Any:
        """Copy an output that is an input: the next call fills its inputs one after the other."""
        is_input = isinstance(output, Tensor) and output.untyped_storage().data_ptr() in self._own
        return output.clone() if is_input else output


class Form(NamedTuple):
    """What two calls have in common if one graph serves both: all but the tensors' values and the numbers."""

    spec: TreeSpec
    leaves: tuple[Any, ...]


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, float)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return float if _is_number(leaf) else leaf


class GraphedFunction:
    """A function of trees of tensors and numbers, captured once for every form of its inputs if `capture` is not None.

    In a graph, floats are float32 tensors of no dimension; all else that is no tensor is a constant of the form.
    Outputs hold their values until the next call.

    Args:
        function: computes without gradients that leave it, and reads nothing that changes but its arguments.
        capture: None to call the function itself, always.
        changes: what it changes in place. A replay would leave their versions, by which caches know them, as they are.
        refuse: called with the reason why there can be no graphs; afterwards there are none.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        capture: Capture | None,
        *,
        changes: Sequence[Tensor] = (),
        refuse: Callable[[str], None],
    ) -> None:
        self._function, self.capture, self._changes, self._refuse = function, capture, changes, refuse
        self._graphs: dict[Form, Graph] = {}
        self._n_calls = 0

    def forget(self) -> None:
        """Drop all graphs, because what they change lies elsewhere now."""
        self._graphs.clear()

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Compute the function of these."""
        self._n_calls += 1
        graph = None
        if self.capture is not None:
            leaves, spec = tree_flatten((given, options))
            if any(isinstance(leaf, Tensor) and leaf.device != self.capture.device for leaf in leaves):
                self._give_up("a batch has lengths that are read on the host")
            else:
                graph = self._find(Form(spec, tuple(map(_form, leaves))), leaves)
        if graph is None:
            return self._function(*given, **options)
        graph.fill(leaves)
        if graph.replay is None:
            return self._run(graph, given, options)
        graph.replay()
        increment_version(self._changes)
        return graph.outputs

    def _find(self, form: Form, leaves: Sequence[Any]) -> Graph | None:
        """Return the graph of a form, a new one if there is room."""
        graph = self._graphs.get(form)
        if graph is None:
            if len(self._graphs) >= MOST_GRAPHS:
                oldest = min(self._graphs, key=lambda known: self._graphs[known].used)
                if self._n_calls - self._graphs[oldest].used <= IDLE:
                    return None
                del self._graphs[oldest]
            assert self.capture is not None
            graph = self._graphs[form] = Graph(leaves, form.spec, self.capture.device)
        graph.used = self._n_calls
        return graph

    def _run(self, graph: Graph, given: Sequence[Any], options: dict[str, Any]) -> Any:
        """Warm a graph up, or capture and replay it."""
        assert self.capture is not None

        def run() -> Any:
            own, own_options = graph.inputs
            return tree_map(graph.apart, self._function(*own, **own_options))

        graph.n_runs += 1
        if graph.n_runs <= WARM_UPS:
            outputs, hinders = self.capture.warm_up(run)
            if hinders and graph.n_runs == WARM_UPS:  # the first ones wait while they compile
                self._give_up(hinders)
            return outputs
        try:
            graph.outputs, graph.replay = self.capture.capture(run)
        except RuntimeError as error:
            self._give_up(f"a call cannot be captured ({str(error).splitlines()[0]})")
            return self._function(*given, **options)
        graph.replay()
        increment_version(self._changes)
        return graph.outputs

    def _give_up(self, why: str) -> None:
        self.capture = None
        self._graphs.clear()
        self._refuse(why)
