"""The kinds of models that bundles are written from."""

from collections.abc import Mapping

#: kind -> what it is, for people
KINDS: Mapping[str, str] = {
    "jax": "a JAX function of parameters and inputs, with its parameters",
    "nnx": "a Flax NNX module",
    "equinox": "an Equinox module",
    "torch": "a PyTorch module",
}
