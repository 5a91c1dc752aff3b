"""States after prompts that were read before: a request continues from the longest prefix that its key has sent.

A tree for each key and model has a node wherever a state is kept or will be: at the end of a prompt, at the end of an
answer, where two prompts part, and every 1,024 tokens. A request that shares a prefix with one that is being read waits
for the state after it. Only the engine's thread uses the tree.
"""

import math
import time
from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from recurra.serve._model import ServedModel
from recurra.serve._requests import SHORTEST_CHUNK, Request
from recurra.state import n_bytes

_SPACING = 1024
"""Tokens between two states along a prompt."""
_MANY = 256
"""States along a prompt are kept only if the cache holds this many: large ones would drive out those of the ends."""
_OVERHEAD = 1024
"""Bytes that a node takes beside its tokens and the numbers of its state, roughly."""
_SAVED_AGAIN = 600.0
"""Seconds after which a state that is used is saved again, so that the store forgets it later than others."""

_Save: TypeAlias = Callable[[str, str, bytes, Any], None]


@dataclass(eq=False, slots=True)
class Node:
    """The end of a prefix, which adds `tokens` to that of its parent."""

    parent: "Node | None"
    tokens: "array[int]"
    end: int  # the number of tokens of the prefix
    children: dict[int, "Node"] = field(default_factory=dict)
    state: Any = None  # after the prefix, with batch size 1; None if it is not kept
    reader: Request | None = None  # which will bring the state
    saved: float = -math.inf

    def prefix(self) -> bytes:
        """Return all tokens, as bytes of int32."""
        parts, node = [], self
        while node.parent is not None:
            parts.append(node.tokens.tobytes())
            node = node.parent
        return b"".join(reversed(parts))


def prefix_model(model: ServedModel) -> str:
    """Name a model by everything that its states depend on."""
    return f"{model.fingerprint} {model.weights}"


class PrefixCache:
    """Keeps at most `most_bytes` of states, those that were used last; `save` gets owner, model, tokens and state."""

    def __init__(self, most_bytes: int, save: _Save | None = None) -> None:
        self._most_bytes, self._save = most_bytes, save
        self._roots: dict[tuple[str, str], Node] = {}
        self._kept: OrderedDict[Node, int] = OrderedDict()  # with their bytes; the least recently used first
        self.n_bytes = 0
        self.n_lookups = self.n_hits = self.n_tokens = 0
        """Requests, those of them that found a prefix, and the tokens that these did not have to read."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, owner: str, model: str, prefix: bytes, state: Any) -> None:
        """Add a state that was saved."""
        node = self._node(self._root(owner, model), array("i", prefix))
        node.saved = time.monotonic()
        self._keep(node, state)

    def claim(self, request: Request) -> None:
        """Let a request begin after the longest prefix that is known, or wait for a longer one that is being read.

        If it does not wait, it will bring the states that are missing on its way (`request.marks`).
        """
        tokens = array("i", request.to_read)
        if len(tokens) < SHORTEST_CHUNK:
            return
        root = self._root(request.owner or "", prefix_model(request.model))
        path = self._path(root, tokens)
        found = next((node for node in reversed(path) if node.state is not None), root)
        awaited = next((node for node in reversed(path) if node.reader is not None and node.end > found.end), None)
        request.waits_for = awaited
        if awaited is None:
            request.prompt_state, request.n_read, request.n_cached = found.state, found.end, found.end
            self._count(request, found)
            self._mark(request, root, tokens)

    def _count(self, request: Request, found: Node) -> None:
        if found.end:
            self._kept.move_to_end(found)
            self._save_again(request, found)
        if not request.is_background:
            self.n_lookups += 1
            self.n_hits += found.end > 0
            self.n_tokens += found.end

    def _mark(self, request: Request, root: Node, tokens: "array[int]") -> None:
        """Note at which nodes a request will leave its state; those that were there before come first."""
        path = self._path(root, tokens)
        self._node(root, tokens)
        if request.model.state_bytes * _MANY <= self._most_bytes:
            for end in range(_SPACING * (request.n_read // _SPACING + 1), len(tokens), _SPACING):
                self._node(root, tokens[:end])
        for node in (*reversed(path), *reversed(self._path(root, tokens))):
            if node.state is None and node.reader is None and _fits(request, node.end):
                node.reader = request
                insort(request.marks, node, key=_end)

    def take(self, request: Request) -> None:
        """Take the state of a request that has come to a mark."""
        if request.marks and request.marks[0].end == request.n_read:
            node = request.marks.pop(0)
            node.reader = None
            self._keep(node, request.prompt_state)
            self._save_again(request, node)

    def release(self, request: Request) -> None:
        """Forget the marks of a request that has ended early."""
        marks, request.marks = request.marks, []
        for node in marks:
            node.reader = None
            self._prune(node)

    def _keep(self, node: Node, state: Any) -> None:
        if node.state is None:
            node.state = state
            self._kept[node] = n_bytes(state) + 4 * len(node.tokens) + _OVERHEAD
            self.n_bytes += self._kept[node]
        while self.n_bytes > self._most_bytes:
            oldest, size = self._kept.popitem(last=False)
            self.n_bytes -= size
            oldest.state = None
            self._prune(oldest)

    def _save_again(self, request: Request, node: Node) -> None:
        now = time.monotonic()
        if self._save is not None and node.state is not None and now - node.saved > _SAVED_AGAIN:
            node.saved = now
            self._save(request.owner or "", prefix_model(request.model), node.prefix(), node.state)

    def _root(self, owner: str, model: str) -> Node:
        return self._roots.setdefault((owner, model), Node(None, array("i"), 0))

    def _path(self, root: Node, tokens: "array[int]") -> list[Node]:
        """Return the nodes along `tokens`, with a new one where they leave the tree or end within an edge."""
        path, node = [], root
        while node.end < len(tokens) and (child := node.children.get(tokens[node.end])) is not None:
            common = _n_common(child.tokens, tokens[node.end : child.end])
            is_whole = common == len(child.tokens)
            node = child if is_whole else self._split(child, common)
            path.append(node)
            if not is_whole:
                break
        return path

    def _node(self, root: Node, tokens: "array[int]") -> Node:
        """Return the node at the end of `tokens`, which is made if there is none."""
        last = (self._path(root, tokens) or [root])[-1]
        if last.end == len(tokens):
            return last
        node = last.children[tokens[last.end]] = Node(last, tokens[last.end :], len(tokens))
        return node

    def _split(self, child: Node, n: int) -> Node:
        """Put a node into the edge to `child`, after `n` of its tokens; who is on the way there brings its state."""
        assert child.parent is not None
        node = Node(child.parent, child.tokens[:n], child.end - len(child.tokens) + n)
        child.parent.children[node.tokens[0]] = node
        child.parent, child.tokens = node, child.tokens[n:]
        node.children[child.tokens[0]] = child
        if child.reader is not None and _fits(child.reader, node.end):
            node.reader = child.reader
            insort(child.reader.marks, node, key=_end)
        return node

    def _prune(self, node: Node) -> None:
        """Remove a node that nobody needs, and those before it that end at nothing then."""
        while node.parent is not None and node.state is None and node.reader is None and len(node.children) < 2:
            parent = node.parent
            for child in node.children.values():  # one edge instead of two
                child.parent, child.tokens = parent, node.tokens + child.tokens
                parent.children[child.tokens[0]] = child
                return
            del parent.children[node.tokens[0]]
            node = parent


def _end(node: Node) -> int:
    return node.end


def _fits(request: Request, end: int) -> bool:
    """Whether a request that is being read can stop at a position: at its end, or far enough from its other stops."""
    n = request.n_read + request.n_left
    stops = (request.n_read, *(mark.end for mark in request.marks if mark.end < n))
    return end == n or (end > request.n_read and all(abs(end - stop) >= SHORTEST_CHUNK for stop in stops))


def _n_common(one: "array[int]", other: "array[int]") -> int:
    """Return how many tokens two arrays have in common at their beginning."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(index for index in range(n) if one[index] != other[index])
