"""Operators of the domain ai.onnx.ml: trees, linear models, and their preprocessing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv_bundle.onnx_import.operators import ML, Context, Unsupported, op, refuse_large

Array = np.ndarray[Any, Any]


def _numbers(values: Any) -> Array:
    return np.asarray(values, np.float32)


@op("Scaler", domain=ML)
def _scaler(ctx: Context, x: Any, *, offset: Any = (0.0,), scale: Any = (1.0,)) -> Any:
    return (x.astype(np.float32) - _numbers(offset)) * _numbers(scale)


@op("Normalizer", domain=ML)
def _normalizer(ctx: Context, x: Any, *, norm: str = "MAX") -> Any:
    x = x.astype(np.float32)
    size = {
        "MAX": lambda: jnp.max(jnp.abs(x), -1, keepdims=True),
        "L1": lambda: jnp.sum(jnp.abs(x), -1, keepdims=True),
        "L2": lambda: jnp.sqrt(jnp.sum(x * x, -1, keepdims=True)),
    }[norm]()
    return x / jnp.where(size == 0, 1, size)


@op("Binarizer", domain=ML)
def _binarizer(ctx: Context, x: Any, *, threshold: float = 0.0) -> Any:
    return (x > np.array(threshold, x.dtype)).astype(x.dtype)


@op("Imputer", domain=ML)
def _imputer(
    ctx: Context, x: Any, *, imputed_value_floats: Any = None, imputed_value_int64s: Any = None, replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Any:  # fmt: skip
    if imputed_value_int64s:
        return jnp.where(x == replaced_value_int64, np.asarray(imputed_value_int64s, x.dtype), x)
    missing = jnp.isnan(x) if np.isnan(replaced_value_float) else x == np.array(replaced_value_float, x.dtype)
    return jnp.where(missing, np.asarray(imputed_value_floats, x.dtype), x)


@op("ArrayFeatureExtractor", domain=ML)
def _array_feature_extractor(ctx: Context, x: Any, index: Any) -> Any:
    return jnp.take(jnp.atleast_2d(x), jnp.ravel(index), -1, mode="clip")


@op("FeatureVectorizer", domain=ML)
def _feature_vectorizer(ctx: Context, *x: Any, inputdimensions: Any = None) -> Any:
    return jnp.concatenate([jnp.reshape(value, (value.shape[0], -1)).astype(np.float32) for value in x], -1)


@op("LabelEncoder", domain=ML)
def _label_encoder(ctx: Context, x: Any, **tables: Any) -> Any:
    used = {name: value for name, value in tables.items() if not name.startswith("default")}
    keys = next(
        (value for name, value in used.items() if name.startswith("keys_") and "string" not in name), None
    )
    name, values = next(
        ((n, v) for n, v in used.items() if n.startswith("values_") and "string" not in n), ("", None)
    )
    if keys is None or values is None:
        raise Unsupported(
            "its labels are strings, which a compiled model cannot take or make; cut the model here"
        )
    table, made = np.asarray(keys).ravel(), np.asarray(values).ravel()
    if np.asarray(values).dtype == np.float64:
        made = made.astype(np.float32)
    default = tables.get(
        f"default_{name.removeprefix('values_').removesuffix('s')}", -1 if made.dtype.kind == "i" else 0
    )
    default = np.ravel(default)[0]
    same = jnp.asarray(x)[..., None] == table.astype(x.dtype)
    if np.isnan(np.asarray(table, np.float64)).any():
        same = same | (jnp.isnan(x)[..., None] & np.isnan(table))
    return jnp.where(same.any(-1), jnp.asarray(made)[jnp.argmax(same, -1)], np.array(default, made.dtype))


@op("OneHotEncoder", domain=ML)
def _one_hot_encoder(
    ctx: Context, x: Any, *, cats_int64s: Any = None, cats_strings: Any = None, zeros: int = 1
) -> Any:
    if cats_int64s is None:
        raise Unsupported(
            "its categories are strings, which a compiled model cannot take; encode them in preprocess"
        )
    return (jnp.asarray(x)[..., None] == np.asarray(cats_int64s, x.dtype)).astype(np.float32)


# --- classes and scores -----------------------------------------------------------------------------------


def _transformed(scores: Any, how: str) -> Any:
    if how == "LOGISTIC":
        # As in onnxruntime, this formula gives 0 for scores below about -17. This matters if sums of the results decide the
        # label.
        high = 1 / (1 + jnp.exp(-jnp.abs(scores)))
        return jnp.where(scores < 0, 1 - high, high)
    if how == "SOFTMAX":
        return jax.nn.softmax(scores)
    if how == "SOFTMAX_ZERO":
        finite = jnp.where(scores == 0, -np.inf, scores)
        probabilities = jax.nn.softmax(finite)
        return jnp.where(scores == 0, 0, jnp.where(jnp.isfinite(probabilities), probabilities, 0))
    if how == "NONE":
        return scores
    raise Unsupported(f"its transformation '{how}' is not supported")


def _of_two(scores: Any, how: str) -> Any:
    """Transform the scores of a model for two classes that has one score per row: the score of the second class."""
    if how not in ("NONE", "LOGISTIC"):
        raise Unsupported(f"it has one score for two classes, which the transformation '{how}' does not fit")
    return _transformed(scores, how)


def _labels(ctx: Context, scores: Any, integers: Any, strings: Any) -> Any:
    if strings:
        if ctx.wants(0):
            raise Unsupported(
                "its labels are strings, which a compiled model cannot make; take only the scores with --outputs, or"
                " train it with whole numbers as labels"
            )
        return None
    return jnp.asarray(np.asarray(integers, np.int64))[jnp.argmax(scores, -1)]


def _product(x: Any, coefficients: Any, rows: int) -> Any:
    """Return the products of each row of `x` and the rows of the matrix `coefficients`, which has `rows` rows."""
    matrix = _numbers(coefficients).reshape(rows, -1)
    if x.shape[-1] != matrix.shape[1]:
        raise Unsupported(
            f"its coefficients are for {matrix.shape[1]} features, and its input has {x.shape[-1]}; the file is damaged"
        )
    return jnp.matmul(x.astype(np.float32), matrix.T)


@op("LinearRegressor", domain=ML)
def _linear_regressor(
    ctx: Context,
    x: Any,
    *,
    coefficients: Any,
    intercepts: Any = None,
    post_transform: str = "NONE",
    targets: int = 1,
) -> Any:
    y = _product(x, coefficients, targets)
    return _transformed(y if intercepts is None else y + _numbers(intercepts), post_transform)


@op("LinearClassifier", domain=ML)
def _linear_classifier(
    ctx: Context, x: Any, *, classlabels_ints: Any = None, classlabels_strings: Any = None, coefficients: Any,
    intercepts: Any = None, multi_class: int = 0, post_transform: str = "NONE",
) -> Any:  # fmt: skip
    rows = len(intercepts) if intercepts else len(classlabels_ints or classlabels_strings)
    scores = _product(x, coefficients, rows)
    scores = scores if intercepts is None else scores + _numbers(intercepts)
    if rows == 1 and len(classlabels_ints or classlabels_strings) == 2:
        positive = _of_two(scores, post_transform)
        limit = 0.5 if post_transform == "LOGISTIC" else 0.0
        both = jnp.concatenate([1 - positive, positive], -1)
        chosen = jnp.concatenate([jnp.full_like(positive, limit), positive], -1)
        return _labels(ctx, chosen, classlabels_ints, classlabels_strings), both
    labels = _labels(ctx, scores, classlabels_ints, classlabels_strings)
    return labels, _transformed(scores, post_transform)


# --- trees ------------------------------------------------------------------------------------------------


class _Forest:
    """Trees as arrays over [tree, node]. A row descends all trees at once, by one level in each round."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        trees, nodes = (
            np.asarray(attributes[f"nodes_{column}"], np.int64) for column in ("treeids", "nodeids")
        )
        order = {tree: index for index, tree in enumerate(dict.fromkeys(trees.tolist()))}
        self.shape = (len(order), int(nodes.max()) + 1)
        refuse_large(*self.shape, 16)
        self.order = order
        at = (np.array([order[tree] for tree in trees.tolist()]), nodes)
        modes = np.asarray(attributes["nodes_modes"])
        if unknown := sorted(set(modes.tolist()) - {*_COMPARISONS, "LEAF"}):
            raise Unsupported(f"its comparison '{unknown[0]}' is not supported")
        leaf = modes == "LEAF"
        self.leaf = self._filled(at, leaf, True)
        numbers = {mode: number for number, mode in enumerate(_COMPARISONS)}
        self.mode = self._filled(at, [numbers.get(mode, 0) for mode in modes.tolist()], 0)
        own = np.broadcast_to(np.arange(self.shape[1]), self.shape).copy()
        self.yes, self.no = own.copy(), own.copy()
        for target, name in ((self.yes, "nodes_truenodeids"), (self.no, "nodes_falsenodeids")):
            target[at] = np.where(leaf, nodes, np.asarray(attributes[name], np.int64))
        self.feature = self._filled(
            at, np.where(leaf, 0, np.asarray(attributes["nodes_featureids"], np.int64)), 0
        )
        values = attributes.get("nodes_values_as_tensor")
        self.limit = self._filled(
            at, _numbers(attributes["nodes_values"]) if values is None else np.asarray(values), 0
        )
        missing = attributes.get("nodes_missing_value_tracks_true")
        self.missing = self._filled(at, missing or np.zeros(len(trees), np.int64), 0).astype(bool)
        self.depth = self._depth()

    def _filled(self, at: Any, values: Any, empty: Any) -> Array:
        values = np.asarray(values)
        table = np.full(self.shape, empty, values.dtype)
        table[at] = values
        return table

    def _depth(self) -> int:
        """Return the number of levels. Raises Unsupported for a tree that leads back to itself."""
        here = np.zeros(self.shape, bool)
        here[:, 0] = True
        for depth in range(self.shape[1] + 1):
            inner = here & ~self.leaf
            if not inner.any():
                return depth
            following = np.zeros_like(here)
            tree, node = np.nonzero(inner)
            following[tree, self.yes[tree, node]] = True
            following[tree, self.no[tree, node]] = True
            here = following
        raise Unsupported("a branch of a tree leads back to it; the file is damaged")

    def leaves(self, x: Any) -> Any:
        """Return the leaf that each row reaches in each tree: [n, trees]."""
        tree = np.arange(self.shape[0])

        def down(_: Any, at: Any) -> Any:
            value = jnp.take_along_axis(x, jnp.asarray(self.feature)[tree, at], 1)
            limit = jnp.asarray(self.limit)[tree, at]
            kinds = sorted(set(self.mode.ravel().tolist()))
            compare = list(_COMPARISONS.values())
            results = [compare[kind](value, limit) for kind in kinds]
            mode = jnp.asarray(self.mode)[tree, at]
            holds = jnp.select([mode == kind for kind in kinds], results, False)
            if self.missing.any():
                holds = jnp.where(jnp.isnan(value), jnp.asarray(self.missing)[tree, at], holds)
            return jnp.where(holds, jnp.asarray(self.yes)[tree, at], jnp.asarray(self.no)[tree, at])

        first = jnp.zeros((x.shape[0], self.shape[0]), np.int64)
        return jax.lax.fori_loop(0, self.depth, down, first)

    def scores(
        self, at: Any, attributes: dict[str, Any], what: str, columns: int, how: str
    ) -> tuple[Any, Any]:
        """Return the aggregated weights of the leaves, [n, columns], and for each column whether any leaf has a weight."""
        weights = attributes.get(f"{what}_weights_as_tensor")
        weights = _numbers(attributes[f"{what}_weights"]) if weights is None else np.asarray(weights)
        table = np.zeros((*self.shape, columns), weights.dtype)
        trees, nodes, ids = (
            np.asarray(attributes[f"{what}_{part}"], np.int64) for part in ("treeids", "nodeids", "ids")
        )
        places = np.array([self.order[tree] for tree in trees.tolist()])
        np.add.at(table, (places, nodes, ids), weights)
        picked = jnp.asarray(table)[np.arange(self.shape[0]), at]
        has_leaf = np.zeros((*self.shape, columns), bool)
        has_leaf[places, nodes, ids] = True
        inside = jnp.asarray(has_leaf)[np.arange(self.shape[0]), at]
        if how in ("MIN", "MAX"):
            edge = np.inf if how == "MIN" else -np.inf
            total = (jnp.min if how == "MIN" else jnp.max)(jnp.where(inside, picked, edge), 1)
        else:
            # Add tree by tree, as onnxruntime does for up to 50 rows, because rounding decides an even vote.
            total = functools.reduce(jnp.add, (picked[:, tree] for tree in range(self.shape[0])))
            total = total / (self.shape[0] if how == "AVERAGE" else 1)
        return jnp.where(inside.any(1), total, 0), inside.any(1)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "BRANCH_LEQ": jnp.less_equal, "BRANCH_LT": jnp.less, "BRANCH_GTE": jnp.greater_equal, "BRANCH_GT": jnp.greater,
    "BRANCH_EQ": jnp.equal, "BRANCH_NEQ": jnp.not_equal,
}  # fmt: skip


def _based(scores: Any, attributes: dict[str, Any]) -> Any:
    base = attributes.get("base_values_as_tensor")
    base = attributes.get("base_values") if base is None else base
    return scores if base is None or not len(base) else scores + _numbers(base)


def _features(x: Any, forest: _Forest) -> Any:
    # As in onnxruntime, rows are compared in f64 if the limits are f64, and otherwise in f32.
    return x.astype(forest.limit.dtype) if forest.limit.dtype == np.float64 else x.astype(np.float32)


@op("TreeEnsembleRegressor", domain=ML)
def _tree_regressor(ctx: Context, x: Any, **attributes: Any) -> Any:
    forest = _Forest(attributes)
    how = attributes.get("aggregate_function", "SUM")
    at = forest.leaves(_features(x, forest))
    scores, reached = forest.scores(at, attributes, "target", attributes.get("n_targets", 1), how)
    # As in onnxruntime, the result is 0 if no leaf has a weight for a target.
    based = jnp.where(reached, _based(scores, attributes), 0)
    return _transformed(based, attributes.get("post_transform", "NONE")).astype(np.float32)


@op("TreeEnsembleClassifier", domain=ML)
def _tree_classifier(ctx: Context, x: Any, **attributes: Any) -> Any:
    forest = _Forest(attributes)
    integers, strings = attributes.get("classlabels_int64s"), attributes.get("classlabels_strings")
    classes: Sequence[Any] = integers or strings or ()
    how = attributes.get("post_transform", "NONE")
    at = forest.leaves(_features(x, forest))
    if len(classes) == 2 and set(attributes["class_ids"]) == {0}:
        # A binary model may have scores for one class only.
        positive = _based(forest.scores(at, attributes, "class", 1, "SUM")[0], attributes)
        if positive.shape[-1] != 1:
            raise Unsupported("it has two base values, and scores for one class only")
        limit = 0.5 if (np.asarray(attributes["class_weights"]) >= 0).all() else 0.0
        labels = _labels(
            ctx, jnp.concatenate([jnp.full_like(positive, limit), positive], -1), integers, strings
        )
        shown = _of_two(positive, how)
        negative = 1 - shown if how == "LOGISTIC" or limit else -shown
        return labels, jnp.concatenate([negative, shown], -1).astype(np.float32)
    if len(classes) == 2:
        raise Unsupported(
            "it has two classes, and not all scores are for the first; onnxruntime has no clear rule for that"
        )
    scores, reached = forest.scores(at, attributes, "class", len(classes), "SUM")
    based = _based(scores, attributes)
    # Only a class with a weight can be the label, unless all classes have base values.
    chosen = jnp.where(reached, based, -np.inf) if based is scores else based
    return _labels(ctx, chosen, integers, strings), _transformed(based, how).astype(np.float32)


@op("ZipMap", domain=ML)
def _zip_map(ctx: Context, x: Any, **attributes: Any) -> Any:
    raise Unsupported(
        "it makes a dictionary of each row; export the model with options={'zipmap': False}, or take its input with --outputs"
    )
