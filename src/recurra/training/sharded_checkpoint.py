"""Checkpoints of several ranks: each writes its own part of the tensors, and any number of ranks reads them again.

A checkpoint is a folder, written by torch.distributed.checkpoint (DCP): its files of tensors and their index, and
`rest.pt`, an archive like the checkpoints of one process, with everything else and the digests of the other files. The
folder gets its name when all of it is on disk, so that no kill leaves a half of one under that name.

DCP keeps its index as a pickle. It is read by an unpickler that knows DCP's own records and nothing else.
"""

import io
import pickle
import secrets
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from recurra.checks import sentence
from recurra.files.archives import ArchiveError, load_archive, seal_archive
from recurra.files.digests import file_sha256
from recurra.files.writing import discard, replacing, sync_folder
from recurra.training.checkpoint import REST
from recurra.training.ranks import Ranks
from recurra.training.strategy import local

_MARK = "tensor of this checkpoint"
_INDEX = ".metadata"
_OF_THE_INDEX = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix", "StorageMeta"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "torch._C": {"_strided"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
}  # fmt: skip
"""What an index may name, by module: whole names, for one with a dot would reach into what a module imports."""

Target = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Makes the empty tensor that an entry of a checkpoint is read into, from its path, whole shape and type."""


class Writer:
    """Writes checkpoints with all ranks; every method is called by all of them together.

    Args:
        ranks: the ranks of the run.
        asynchronous: let training go on while a checkpoint is written, from a copy of its tensors.
    """

    def __init__(self, ranks: Ranks, *, asynchronous: bool = False) -> None:
        self._ranks, self._asynchronous = ranks, asynchronous
        self._group = dist.new_group(backend="gloo")  # of its own: it may be in use while the ranks train
        self._pending: tuple[Future, Callable[[], None]] | None = None

    def write(self, target: Path, payload: Mapping[str, Any], done: Callable[[], None]) -> None:
        """Write a checkpoint, or begin to. `done` is called on the first rank once it is there under its name.

        Raises:
            OSError: this checkpoint or the one before it could not be written, on any rank.
        """
        self.finish()
        plain, tensors = split_tensors(payload)
        temporary = target.with_name(f".{target.name}.{self._ranks.from_first(secrets.token_hex(8))}.tmp")
        writer = dcp.FileSystemWriter(temporary)
        options: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}

        def name_it() -> None:
            if self._ranks.is_first:
                _seal(temporary, plain)
                discard(target)  # there if a killed process wrote it after the checkpoint that this run goes on from
                temporary.rename(target)
                sync_folder(target.parent)
                done()

        if self._asynchronous:
            future = dcp.async_save(tensors, **options)
            assert isinstance(future, Future)
            self._pending = future, name_it
            return
        with _as_os_error(target):
            dcp.save(tensors, **options)
            self._agree(name_it)

    def finish(self) -> None:
        """Wait for a checkpoint that is being written, and give it its name. Raises OSError as `write`."""
        if self._pending is None:
            return
        (future, name_it), self._pending = self._pending, None
        with _as_os_error(Path("the checkpoint that was being written")):
            future.result()
            self._agree(name_it)

    def poll(self) -> None:
        """Name a checkpoint that has been written in the meantime; returns at once if it has not."""
        if self._pending is not None and self._ranks.total(float(self._pending[0].done()))[0] == self._ranks.count:
            self.finish()

    def _agree(self, act: Callable[[], None]) -> None:
        """Let the first rank act, and tell its error to all."""
        error: OSError | None = None
        try:
            act()
        except OSError as failed:
            error = failed
        message = self._ranks.from_first(None if error is None else str(error))
        if message is not None:
            raise error or OSError(message)


def load_sharded(path: Path, target: Target | None = None) -> Any:
    """Check and read a checkpoint folder: all of it in this process, or, with a `target`, this rank's part.

    Raises:
        OSError: it cannot be read.
        ArchiveError: it is damaged, or something else.
    """
    plain = load_archive(path / REST)
    if not isinstance(plain, dict) or not isinstance(files := plain.pop("files", None), dict):
        raise ArchiveError(f"{REST} is another kind of file")
    for name, digest in files.items():
        if Path(name).name != name or not (path / name).is_file() or file_sha256(path / name) != digest:
            raise ArchiveError(f"{name} is missing or damaged")
    reader = _Reader(path)
    entries = reader.read_metadata().state_dict_metadata
    make = target or (lambda key, size, dtype: torch.empty(size, dtype=dtype))
    tensors = {key: make(key, entry.size, entry.properties.dtype) for key, entry in entries.items()}  # type: ignore
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as is meant
        dcp.load(tensors, storage_reader=reader, no_dist=target is None)
    return join_tensors(plain, tensors)


def split_tensors(payload: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the tensors out of nested dicts and lists, under paths such as model/head.weight; tied ones once.

    `random` stays as it is: it belongs to single ranks.
    """
    tensors: dict[str, Tensor] = {}
    paths: dict[Any, str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            here = local(value)
            # by its memory, which FSDP pads: a rank that has nothing of a tied tensor must count it once, too
            memory = here.untyped_storage().data_ptr()
            key = (memory, here.storage_offset(), value.shape, here.stride()) if memory else path
            first = paths.setdefault(key, path)
            tensors[first] = value
            return {_MARK: first}
        if isinstance(value, Mapping):
            return {key: walk(item, f"{path}/{key}") for key, item in value.items()}
        return (
            [walk(item, f"{path}/{n}") for n, item in enumerate(value)] if isinstance(value, (list, tuple)) else value
        )

    plain = {key: value if key == "random" else walk(value, key) for key, value in payload.items()}
    return plain, tensors


def join_tensors(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put tensors back where `split_tensors` took them from."""
    if isinstance(plain, Mapping):
        if plain.keys() == {_MARK}:
            return tensors[plain[_MARK]]
        return {key: join_tensors(item, tensors) for key, item in plain.items()}
    return [join_tensors(item, tensors) for item in plain] if isinstance(plain, list) else plain


def _seal(folder: Path, plain: Mapping[str, Any]) -> None:
    digests = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    with replacing(folder / REST) as file:
        torch.save({**plain, "files": digests}, file)
        seal_archive(file, Path(file.name))


class _as_os_error:
    """Turns what DCP raises for a rank that could not write into an OSError with its reason."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, dcp.api.CheckpointException):
            first = next(iter(error.failures.values()))[0]
            came = f"a checkpoint that cannot be written ({first})"
            raise OSError(sentence(str(self._target), came, "a folder that can be written")) from error


class _Reader(dcp.FileSystemReader):
    """A reader whose index cannot name anything but DCP's records."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            metadata = _Unpickler(io.BytesIO((Path(self.path) / _INDEX).read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, LookupError) as error:
            raise ArchiveError(f"{_INDEX} is damaged ({error})") from error
        if not isinstance(metadata, Metadata) or any(
            not hasattr(e, "size") for e in metadata.state_dict_metadata.values()
        ):
            raise ArchiveError(f"{_INDEX} is not an index of tensors")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in _OF_THE_INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
