"""A whole training iteration in one CUDA graph: forward, backward and step, launched at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map_only

from mixedopt.device_tier import DeviceTier
from mixedopt.errors import in_one_line
from mixedopt.optimizer import MixedPrecisionOptimizer

# Iterations that run as they are before the capture: kernels are compiled, libraries set up, state is made.
WARMUP = 3


def graphed(train_step: Callable[..., Any], *sample_args: Any) -> Graphed:
    """Return ``train_step`` as a function that replays it from a CUDA graph.

    The first three calls run ``train_step`` as it is: they are iterations of
    your training like all others. The fourth captures it; from then on a call
    copies its arguments to the place of the captured ones, brings changed
    hyperparameters to the device, and launches the whole iteration at once.
    Overflows, growth of the loss scale and every learning-rate scheduler work
    as without a graph; call ``scheduler.step()`` outside. ``last_step`` tells
    of the latest call, also one that was kept from an earlier call.

    Args:
        train_step: one iteration: forward, ``optimizer.backward``,
            ``optimizer.step``; with any number of optimizers, all of them
            sync-free (``optimizer.tier`` ``"compiled"`` or ``"fused"``). What it
            does on the host happens at the capture alone: no ``.item()``, no
            ``print`` of a tensor, no branch on a value, shapes that stay.
        sample_args: arguments as they will come: tensors on the GPU, whose
            shapes and dtypes are kept, and constants.

    Returns:
        A function of the same arguments. It returns copies of the tensors that
        ``train_step`` returns.

    Raises:
        ValueError: an argument has another shape, dtype or device than its
            sample, or is another constant.
        StepOrderError: the conversion of an optimizer's model was removed.
        RuntimeError: ``train_step`` cannot be captured, and why; or it steps
            no sync-free optimizer.

    Syncs: none, but for the capture.

    Example::

        step = graphed(train_step, x, y)
        for x, y in loader:
            loss = step(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
            scheduler.step()

    References: torch.cuda.graph; CUDA programming guide, CUDA graphs.
    """
    return Graphed(train_step, sample_args)


class Graphed:
    """What ``graphed`` returns."""

    def __init__(self, train_step: Callable[..., Any], sample_args: tuple[Any, ...]) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("graphed(): needs a CUDA GPU. Call train_step itself elsewhere.")
        if not callable(train_step):
            raise TypeError(f"graphed({train_step!r}): must be a function of one iteration. Pass it, uncalled.")
        self._train_step = train_step
        leaves, self._form = tree_flatten(sample_args)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device.type != "cuda":
                raise ValueError(
                    f"graphed(): a sample tensor is on {leaf.device}. Move samples and arguments to the GPU."
                )
        self._inputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._calls = 0
        self._optimizers: list[MixedPrecisionOptimizer] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None
        self._tokens: list[object] = []

    def __call__(self, *args: Any) -> Any:
        """Run one iteration; see ``graphed``."""
        self._take_(args)
        self._calls += 1
        if self._calls <= WARMUP:
            return self._run()
        for optimizer in self._optimizers:
            optimizer._parts.check_in_force()  # what a graph writes to is gone
        tokens = [tier.before_replay_() for tier in self._tiers()]
        if self._graph is not None and any(now is not then for now, then in zip(tokens, self._tokens, strict=True)):
            self._graph = None  # the optimizer has other state now, or other hyperparameters
            return self._run()
        graph = self._capture_() if self._graph is None else self._graph
        graph.replay()
        outputs = tree_map_only(Tensor, lambda output: output.detach().clone(), self._outputs)
        for tier in self._tiers():
            tier.after_replay_()
        return outputs

    @torch.no_grad()
    def _take_(self, args: tuple[Any, ...]) -> None:
        """Copy the arguments to their places, after checking all of them."""
        leaves, form = tree_flatten(args)
        if form != self._form:
            raise ValueError(f"graphed step: called with {form}, captured with {self._form}. Build another one for it.")
        for index, (mine, leaf) in enumerate(zip(self._inputs, leaves, strict=True)):
            if isinstance(mine, Tensor) and isinstance(leaf, Tensor):
                if (leaf.shape, leaf.dtype) != (mine.shape, mine.dtype):
                    raise ValueError(
                        f"graphed step: argument {index} is {leaf.dtype}{list(leaf.shape)}, captured was "
                        f"{mine.dtype}{list(mine.shape)}: a graph has fixed shapes. Pad the batch, drop the last one, "
                        "or build another graphed step for that shape."
                    )
            elif isinstance(mine, Tensor) or isinstance(leaf, Tensor) or mine != leaf:
                raise ValueError(
                    f"graphed step: argument {index} is {leaf!r}, captured was {mine!r}, as a constant. "
                    "Pass what changes as a tensor on the GPU."
                )
        for mine, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(mine, Tensor) and mine is not leaf:
                mine.copy_(leaf, non_blocking=True)

    def _call(self) -> Any:
        return self._train_step(*torch.utils._pytree.tree_unflatten(self._inputs, self._form))

    def _run(self) -> Any:
        """Run the iteration as it is, on the stream that will capture it, and see who steps."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._watching():
            outputs = self._call()
        current.wait_stream(self._stream)
        return outputs

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Context that notes the optimizers that step."""

        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            known = any(optimizer is other for other in self._optimizers)
            if isinstance(optimizer, MixedPrecisionOptimizer) and not known:
                self._optimizers.append(optimizer)

        handle = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def _tiers(self) -> list[DeviceTier]:
        tiers = [optimizer._tier for optimizer in self._optimizers]
        free = [tier for tier in tiers if isinstance(tier, DeviceTier)]
        if not free or len(free) < len(tiers):
            names = ", ".join(repr(tier.name) for tier in tiers) or "none"
            raise RuntimeError(
                f"graphed(): train_step stepped optimizers of the tiers {names}: a graph needs at least one, and all "
                "sync-free. Build MixedPrecisionOptimizer with tier='compiled' or 'fused', and call its step() inside."
            )
        return free

    def _capture_(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as those of a DataLoader, may go on with what they do.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._outputs = self._call()
        except Exception as error:
            raise RuntimeError(
                f"graphed(): train_step cannot be captured ({in_one_line(error)}). "
                "Nothing in it may wait for the device (.item(), float(loss), print of a tensor, an if on a value, "
                "nonzero, masks as indices), copy from memory that is not pinned, or change shapes. The traceback "
                "above shows the line; move it outside, or call train_step itself."
            ) from error
        self._graph = graph
        self._tokens = [tier.before_replay_() for tier in self._tiers()]
        return graph
