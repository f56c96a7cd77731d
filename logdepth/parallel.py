"""One run in many processes, which torchrun starts: who they are, what they agree on, and how they share the weights.

Everything that knows of ranks is here and in its callers, the training loop and `evaluate`. Models, losses and
optimizers are those of a single process; `Shared` wraps them from outside with PyTorch's DistributedDataParallel or
`fully_shard`. With one process nothing is wrapped and no message is sent, and the slow imports that these need are not
made.
"""

import contextlib
import datetime
import json
import math
import os
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from logdepth.errors import UserError
from logdepth.runs import device_named
from logdepth.runs.environment import environment

ARRIVAL_SECONDS = 300.0
"""How long a rank waits for the others at the start."""
MESSAGE_HOURS = 24
"""How long a rank waits for a message: another may be preparing a corpus. A process that ends is noticed at once."""
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets."""
ALIKE = ("logdepth", "code", "torch", "python", "numpy")
"""Facts of the environment in which the processes of a run must agree."""

Value = TypeVar("Value")


class LostRankError(UserError):
    """Another process of the run has ended, or cannot be reached."""


class Ranks:
    """This process among those of a run. With one process, every method is as if there were no others."""

    def __init__(self, rank: int = 0, world_size: int = 1, local_rank: int = 0) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def device(self, name: str, flag: str = "--train.device") -> torch.device:
        """The device with this name. On a machine with several GPUs, each of its processes has its own."""
        device = device_named(name, flag)
        if self.world_size == 1 or device.type == "cpu" or device.index is not None:
            return device
        count = torch.cuda.device_count()
        if self.local_rank >= count:
            raise UserError(
                f"rank {self.rank} is process {self.local_rank + 1} of its machine, which has {count} GPUs; start "
                f"--nproc-per-node {count} processes, or share one GPU with {flag} cuda:0"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def from_first(self, function: Callable[[], Value]) -> Value:
        """What the function returns on the first rank, on every rank. Only the first one calls it."""
        if self.world_size == 1:
            return function()
        found: list[Any] = [function() if self.is_first else None]
        with _readable_losses():
            dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        value: Value = found[0]
        return value

    def highest(self, *values: int) -> tuple[int, ...]:
        """The highest of each value over all ranks."""
        if self.world_size == 1:
            return values
        found = torch.tensor(values, dtype=torch.int64)
        with _readable_losses():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return tuple(int(one) for one in found)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all ranks of each value."""
        if self.world_size == 1:
            return values
        found = values.detach().cpu()
        with _readable_losses():
            dist.all_reduce(found)
        return found / self.world_size

    def sum(self, values: Any) -> Any:
        """The sum over all ranks of a NumPy array."""
        if self.world_size == 1:
            return values
        found = torch.from_numpy(values.copy())
        with _readable_losses():
            dist.all_reduce(found)
        return found.numpy()

    def wait(self) -> None:
        """Returns when every rank is here."""
        self.highest(0)

    def machines_first(self, function: Callable[[], Value]) -> Value:
        """Calls a function on all ranks, on one of each machine first: the others find what it has left on disk."""
        if self.local_rank == 0:
            value = function()
        self.wait()
        if self.local_rank != 0:
            value = function()
        self.wait()
        return value


ALONE = Ranks()
"""A process without others."""
_joined: Ranks | None = None
_store: Any = None
"""Where the processes find each other; it outlives any of them where torchrun keeps it."""


def under_torchrun() -> bool:
    """Whether torchrun has started this process, perhaps as the only one."""
    return all(name in os.environ for name in TORCHRUN)


def joined() -> Ranks:
    """This process among those that torchrun has started. The first call waits for the others."""
    global _joined
    if not under_torchrun():
        return ALONE
    if _joined is None:
        rank, local_rank, world_size = (_number(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        if world_size > 1:
            _join(rank, world_size)
        _joined = Ranks(rank, world_size, local_rank)
    return _joined


def _number(name: str) -> int:
    value = os.environ[name]
    if not value.isdigit():
        raise UserError(f"the variable {name} is {value!r}, not a number; start the processes with torchrun")
    return int(value)


def _join(rank: int, world_size: int) -> None:
    """Meets the other ranks, checks that all run the same code, and opens the ways for their messages."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    global _store
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    patience = datetime.timedelta(seconds=ARRIVAL_SECONDS)
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=patience))
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {rank} of {world_size} did not reach the others at {where} within {ARRIVAL_SECONDS:.0f} s "
            f"({_first_line(error)}); are all processes started, with the same --rdzv-endpoint?"
        ) from None
    _store = PrefixStore(_gathered(store, rank, world_size), store)
    every = [json.loads(_store.get(f"facts/{one}")) for one in range(world_size)]
    for other, theirs in enumerate(every):
        for name in ALIKE:
            if theirs[name] != every[0][name]:
                what = "another state of logdepth's code" if name == "code" else f"{name} {theirs[name]}"
                raise UserError(
                    f"rank {other} runs {what}, and rank 0 {every[0][name]}; install the same versions on all machines"
                )
    backend = "cpu:gloo,cuda:nccl" if _has_own_gpu() else "gloo"
    dist.init_process_group(
        backend,
        store=_store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(hours=MESSAGE_HOURS),
    )


def _gathered(store: Any, rank: int, world_size: int) -> str:
    """Waits for all ranks; returns a name for their meeting, under which each has left its facts.

    The store may be that of torchrun, which outlives its processes: it holds what ranks wrote that were killed since.
    So each announces a token of its own, the first rank calls the roll of all tokens, and a roll counts when every rank
    has found its token in it.
    """
    mine, until = secrets.token_hex(8), time.monotonic() + ARRIVAL_SECONDS
    facts = environment(torch.device("cpu"))
    store.set(f"token/{rank}", mine)
    called: dict[str, Any] = {}
    answered = ""
    while True:
        if rank == 0 and all(store.check([f"token/{one}"]) for one in range(world_size)):
            tokens = [store.get(f"token/{one}").decode() for one in range(world_size)]
            if tokens != called.get("tokens"):
                called = {"tokens": tokens, "meeting": secrets.token_hex(8)}
                store.set("roll", json.dumps(called))
        roll = json.loads(store.get("roll")) if store.check(["roll"]) else {"tokens": []}
        if mine in roll["tokens"]:
            meeting: str = roll["meeting"]
            if meeting != answered:
                answered = meeting
                store.set(f"{meeting}/facts/{rank}", json.dumps({name: facts[name] for name in ALIKE}))
                store.add(f"{meeting}/answers", 1)
            if store.add(f"{meeting}/answers", 0) == world_size:
                return meeting
        if time.monotonic() > until:
            key = f"{answered}/facts/{{}}" if answered else "token/{}"
            missing = [one for one in range(world_size) if not store.check([key.format(one)])]
            raise UserError(
                f"{_ranks_in_words(missing)} of {world_size} did not arrive within {ARRIVAL_SECONDS:.0f} s; are all "
                "machines started, with the same --nnodes and --rdzv-endpoint?"
            )
        time.sleep(0.02)


def _has_own_gpu() -> bool:
    """Whether each process of this machine can have a GPU of its own, which NCCL demands."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.cuda.is_available() and dist.is_nccl_available() and local <= torch.cuda.device_count()


def _ranks_in_words(ranks: Sequence[int]) -> str:
    some = ", ".join(str(one) for one in ranks[:8]) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


@contextlib.contextmanager
def _readable_losses() -> Iterator[None]:
    """Turns what torch raises when the other end of a message is gone into one line."""
    try:
        yield
    except RuntimeError as error:
        raise lost_rank() from error


def lost_rank() -> LostRankError:
    """The error to raise where a message failed."""
    return LostRankError(
        "another process of this run has ended or cannot be reached: nothing older than the last checkpoint is lost; "
        "with the same command under torchrun, the run resumes"
    )


def is_lost_rank(error: BaseException) -> bool:
    """Whether torch raised this because another process is gone: in a backward pass, its own messages fail."""
    texts = ("connection closed by peer", "connection reset by peer", "gloo/transport", "broken pipe")
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)


def speaks_for_all() -> bool:
    """Whether this process is to say what went wrong: the first that asks, so that one error is one line."""
    if _store is not None:
        with contextlib.suppress(RuntimeError):
            return bool(_store.add("spoken", 1) == 1)
    # It has met no other, or the store has ended with the first rank: one of each machine speaks.
    return os.environ.get("LOCAL_RANK", "0") == "0"


def leave(code: int) -> None:
    """Ends this process if it is one of several. In the interpreter's own exit, gloo's threads may abort it."""
    if _store is None:
        return
    if code == 0:
        with contextlib.suppress(Exception):  # all work is done
            joined().wait()
            dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


class Shared:
    """How the ranks share the weights of one model and the work of its loss.

    Args:
        model: the model; with sharded weights, its parameters become DTensors, of which each rank has a part.
        loss: the module of which `model` is a part, and that the training step differentiates.
        ranks: the processes.
        words: `train.parallel`.
    """

    def __init__(self, model: nn.Module, loss: nn.Module, ranks: Ranks = ALONE, words: Sequence[str] = ()) -> None:
        self.model, self.ranks = model, ranks
        self.loss = loss
        """What the training step calls."""
        self.sizes = degrees(words, ranks.world_size)
        self.units: list[Any] = []
        """The modules whose weights are sharded: every block, and the model with the rest."""
        self.replica: Any = None
        """The loss with gradients that are averaged over all ranks."""
        if ranks.world_size == 1:
            return
        device = next(model.parameters()).device
        if self.sizes["shard"] > 1:
            self._shard(device)
        else:
            from torch.nn.parallel import DistributedDataParallel

            # Buckets are never rebuilt with find_unused_parameters: sums of floats would come in another order after a
            # run is resumed than before. It also allows operators that a short context never calls.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers has another name from torch 2.13 on
                self.loss = self.replica = DistributedDataParallel(
                    loss,
                    device_ids=None if device.type == "cpu" else [device],
                    broadcast_buffers=False,
                    find_unused_parameters=True,
                )

    def _shard(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        # Blocks return views of new tensors, and nothing changes them in place.
        warnings.filterwarnings(
            "ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning
        )
        replicas, shards = self.sizes["replicate"], self.sizes["shard"]
        names = ("replicate", "shard") if replicas > 1 else ("shard",)
        shape = (replicas, shards) if replicas > 1 else (shards,)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.units = [*getattr(self.model, "blocks", ()), self.model]  # the last has what is in no block
        for unit in self.units:
            fully_shard(unit, mesh=mesh)
        register_fsdp_forward_method(self.model, "loss")
        if hasattr(self.model, "product_weights"):  # a block has none before its turn
            setattr(self.model, "product_weights", lambda: iter(()))  # noqa: B010

    def in_words(self) -> str:
        """How the ranks share the run."""
        return " × ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1)

    @contextlib.contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """A scope of one micro-batch: ranks exchange gradients in the last one only."""
        if self.units:
            self.units[-1].set_requires_gradient_sync(is_last)
        with self.replica.no_sync() if self.replica is not None and not is_last else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """A scope in which every rank has all weights, so that each can call the model when it likes."""
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in self.units:
                unit.reshard()
                unit.set_reshard_after_forward(unit is not self.model, recurse=False)

    def on_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the first rank, and nothing on the others. All ranks must call it."""
        found = {}
        for name, one in tensors.items():
            tensor = whole(one)
            if self.ranks.is_first:
                found[name] = tensor.to("cpu") if tensor is not one else tensor  # one whole weight at a time
        return found


def degrees(words: Sequence[str], world_size: int) -> dict[str, int]:
    """How many ranks share a dimension of the mesh, from words such as `replicate:2` and `shard`; one may be open."""
    sizes = {"replicate": 1, "shard": 1}
    open_word = "replicate" if not words else None
    for word in words:
        name, _, number = word.partition(":")
        if number:
            sizes[name] = int(number)
        else:
            open_word = name
    fixed = math.prod(sizes.values())
    if open_word is not None and world_size % fixed == 0:
        sizes[open_word] = world_size // fixed
    elif fixed != world_size and world_size > 1:
        open_one = "a multiple of " if open_word is not None else ""
        raise UserError(
            f"--train.parallel {' '.join(words)} needs {open_one}{fixed} ranks, and there are {world_size}; start as "
            "many, or leave one number out"
        )
    elif world_size == 1:
        return {"replicate": 1, "shard": 1}
    return sizes


def whole(tensor: Any) -> Tensor:
    """The whole of a tensor of which each rank may have a part. All ranks must call it."""
    found: Tensor = tensor.full_tensor() if _is_part(tensor) else tensor
    return found


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor, in the same memory."""
    found: Tensor = tensor.to_local() if _is_part(tensor) else tensor
    return found


def part_like(tensor: Tensor, like: Any) -> Tensor:
    """A whole tensor, which every rank has, in the form of `like`: this rank's part of it, or as it is."""
    tensor = tensor.to(like.device)
    if not _is_part(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _is_part(tensor: Any) -> bool:
    """Whether this is a DTensor. Their class is not imported where there are none."""
    return hasattr(tensor, "full_tensor")
