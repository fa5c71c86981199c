"""Find gradients that a layer does not write in its first backward pass.

    before    all bytes of the layer's gradients become 0xFE
    after     an element with these bytes was not written: an error names the layer

Without this check, the layer would be trained with values of another layer or microbatch, which the
memory of the gradient contained before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...errors import ConfigError

#: As float32 the mark is -1.7e38, as float64 -5e303, and as float16 a NaN that no operation makes.
#: A gradient that is added to the mark does not change it, so a layer that only adds is found, too.
_BYTE = b"\xfe"


class Checked:
    """A layer whose methods raise an error if they do not write all of its gradients."""

    def __init__(self, layer):
        self._layer, self._names = layer, list(layer.shapes())

    def backward(self, parameters, saved, dy, gradients, ready, first=False):
        """Call the layer's `backward`; raise ConfigError if a gradient is not written."""
        _mark(gradients, self._names)
        dx = self._layer.backward(parameters, saved, dy, gradients, ready, first=first)
        self._check(gradients)
        return dx

    def backward_weights(self, parameters, saved, dy, gradients, ready) -> None:
        """Call the layer's `backward_weights`; raise ConfigError if a gradient is not written."""
        _mark(gradients, self._names)
        self._layer.backward_weights(parameters, saved, dy, gradients, ready)
        self._check(gradients)

    def _check(self, gradients: Mapping) -> None:
        for name in self._names:
            words, mark = _words(gradients[name])
            left = int((words == mark).sum())
            if left:
                raise ConfigError(
                    f"layer {type(self._layer).__name__} has not written {left} of {words.size} "
                    f"numbers of the gradient of {name!r}; its backward pass must write each "
                    "gradient whole (gradients[name][...] = ...), also zeros, and not add to it"
                )


def _mark(gradients: Mapping, names: Iterable[str]) -> None:
    for name in names:
        words, mark = _words(gradients[name])
        words[...] = mark


def _words(gradient):
    """Return the gradient as whole numbers, and the mark (bytes 0xFE) as such a number."""
    words = gradient.view(f"u{min(gradient.itemsize, 8)}")
    return words, words.dtype.type(int.from_bytes(_BYTE * words.itemsize, "big"))
