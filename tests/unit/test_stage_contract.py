"""A model that cannot be cut into stages is refused by what it lacks."""

import pytest

from mpidist import models
from mpidist.models.layers import Dense, Relu
from mpidist.pipeline import why_no_stages


class Scale:
    """A layer of a user's own, with the three methods that are needed."""

    def shapes(self):
        return {}

    def forward(self, parameters, x):
        return x * 2, None

    def backward(self, parameters, saved, dy, gradients, ready, first=False):
        return dy * 2


class Own:
    """A model of a user's own, without a base class."""

    def __init__(self, layers, **more):
        self.layers = layers
        vars(self).update(more)

    def loss(self, scores, labels):
        return scores.mean(axis=(1, 2)), scores


class NoBackward:
    def shapes(self):
        return {}

    def forward(self, parameters, x):
        return x, None


class NoLoss(Own):
    loss = None


DENSE = Dense("d", 2, 3)


@pytest.mark.parametrize(
    "make",
    [
        models.lenet,
        lambda: models.mlp([4, 3, 2]),
        lambda: models.logistic(4, 2),
        lambda: Own([DENSE, Scale()]),
        lambda: Own((Scale(), DENSE), state={}),
    ],
)
def test_a_chain_of_layers_can_be_cut(make):
    model = make()
    assert why_no_stages(model) == ""
    assert "parameters" not in vars(model), "nothing was allocated"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: models.tagger(4, 3),
            "model Tagger has no layers (a list of objects with shapes, forward, backward)",
        ),
        (lambda: Own([]), "model Own has no layers (a list"),
        (lambda: Own("layers"), "model Own has no layers (a list"),
        (lambda: Own(None), "model Own has no layers (a list"),
        (lambda: None, "model NoneType has no layers"),
        (lambda: NoLoss([DENSE]), "model NoLoss has no method loss(scores, labels)"),
        (lambda: Own([DENSE], state={"mean": 0}), "model Own has a state, such as running means"),
        (lambda: Own([DENSE, NoBackward()]), "layer 1 of model Own (NoBackward) has no method bac"),
        (lambda: Own([None]), "layer 0 of model Own (NoneType) has no method shapes"),
        (lambda: Own([Relu]), "layer 0 of model Own is the class Relu, not an object of it"),
        (
            lambda: Own([DENSE, Relu(), DENSE]),
            "layer 2 of model Own (Dense) has the parameter 'd.weight' of layer 0, too",
        ),
        (lambda: Own([Relu()]), "model Own has no layer with parameters"),
    ],
)
def test_what_a_model_lacks(make, expected):
    found = why_no_stages(make())
    assert expected in found
    assert "\n" not in found
