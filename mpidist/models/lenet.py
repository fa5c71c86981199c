"""LeNet-5: two convolutions with pooling, three dense layers.

    image 1 x 28 x 28
      conv 5x5, pad 2     6 x 28 x 28     pool, relu     6 x 14 x 14
      conv 5x5           16 x 10 x 10     pool, relu    16 x 5 x 5
      dense                       120     relu
      dense                        84     relu
      dense                   classes

Max pooling and ReLU replace the average pooling and tanh of the paper, because the model then
trains faster.

Reference: LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document
recognition, Proc. IEEE 86(11), 1998.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from ..registry import checked_whole
from .layers import Convolution, Dense, Features, Images, MaxPool, Relu
from .logistic import sample_shape
from .network import Network


def lenet(
    image_shape: Sequence[int] = (1, 28, 28),
    classes: int = 10,
    seed: int = 0,
    channels: Sequence[int] = (6, 16),
    hidden: Sequence[int] = (120, 84),
) -> Network:
    """Make LeNet-5 for images of 4 x 4 pixels or more.

    Images smaller than 16 x 16 get 3 x 3 kernels, with a border of one zero around each image.
    Larger images get 5 x 5 kernels, and the first convolution adds a border of two zeros.

    Parameters
    ----------
    image_shape : (channels, height, width)
        Shape of one sample.
    classes : int
        Number of classes, at least 2.
    seed : int
        Seed of the weights.
    channels, hidden : two ints each
        Number of maps of each convolution, and widths of the hidden dense layers.
    """
    shape = sample_shape("lenet: image_shape", image_shape)
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ConfigError(
            f"lenet: image_shape is {list(shape)}, expected [channels, height, width] with height "
            "and width of at least 4"
        )
    (maps1, maps2), (wide, narrow) = _pair("channels", channels), _pair("hidden", hidden)
    kernel, pad1, pad2 = (3, 1, 1) if min(shape[1:]) < 16 else (5, 2, 0)
    height, width = ((size // 2 + 2 * pad2 - kernel + 1) // 2 for size in shape[1:])
    layers = [
        Images(),
        Convolution("conv1", shape[0], maps1, kernel, pad1),
        MaxPool(),
        Relu(),
        Convolution("conv2", maps1, maps2, kernel, pad2),
        MaxPool(),
        Relu(),
        Features(),
        Dense("dense1", maps2 * height * width, wide),
        Relu(),
        Dense("dense2", wide, narrow),
        Relu(),
        Dense("dense3", narrow, checked_whole("lenet: classes", classes, 2)),
    ]
    return Network(layers, shape, seed)


def _pair(name: str, given: Sequence[int]) -> tuple[int, ...]:
    pair = sample_shape(f"lenet: {name}", given)
    if len(pair) != 2:
        raise ConfigError(f"lenet: {name} is {list(pair)}, expected two numbers")
    return pair
