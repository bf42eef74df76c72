"""The cast policy as a value: which kinds of modules, and which names, stay in fp32."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
SOFTMAX: tuple[type[nn.Module], ...] = (nn.Softmax, nn.Softmax2d, nn.Softmin)
# What comes out of these is a loss or goes into one: it stays fp32.
LOSSES: tuple[type[nn.Module], ...] = (_Loss, nn.LogSoftmax, nn.AdaptiveLogSoftmaxWithLoss)


@dataclass(frozen=True, slots=True)
class CastPolicy:
    """Which parts of a model stay in fp32; everything else becomes half.

    A module that stays in fp32 is an *island*: its floating inputs are cast to
    fp32, it computes there with fp32 parameters, and its floating outputs are
    cast back to half (those of loss modules and ``LogSoftmax`` stay fp32).
    Buffers keep their dtype everywhere. A rule works on modules; a softmax
    that is *called* (``F.softmax``, ``nn.MultiheadAttention``) is out of its
    reach.

    Args:
        fp32_types: module types whose instances are islands, subclasses too.
        fp32_names: globs over dotted module and parameter names.

    Example:
        >>> CastPolicy.default().keep("head", "*.router").fp32_names
        ('head', '*.router')
    """

    fp32_types: tuple[type[nn.Module], ...] = (*NORMS, *SOFTMAX, *LOSSES)
    fp32_names: tuple[str, ...] = ()

    @classmethod
    def default(cls) -> CastPolicy:
        """Norm, softmax and loss modules in fp32, the rest half."""
        return cls()

    @classmethod
    def none(cls) -> CastPolicy:
        """All half, as ``model.half()``, as far as fp32 buffers allow.

        Norm layers with running statistics and parametrized modules compute
        with fp32 buffers, so they stay fp32.
        """
        return cls(fp32_types=(_NormBase,))

    @classmethod
    def fp32(cls) -> CastPolicy:
        """All fp32: the wrapper then does what the inner optimizer does."""
        return cls(fp32_types=(nn.Module,))

    def keep(self, *globs: str) -> CastPolicy:
        """Return a policy that also keeps these names in fp32.

        Args:
            globs: dotted names of modules or parameters, with ``*``, ``?`` and
                ``[...]``. A module's whole subtree stays fp32. A glob that
                matches nothing raises when the policy meets a model.
        """
        for glob in globs:
            if not isinstance(glob, str) or not glob:
                raise TypeError(f"CastPolicy.keep({glob!r}): must be names, such as 'head' or '*.router'.")
        return replace(self, fp32_names=(*self.fp32_names, *globs))
