"""The drafter's loss: labels, weights, memory, leaks, and rows without anything to learn."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import DFlashDrafter, Drafter, block_embeddings, draft_logits
from dflash_jax.target import Target, TargetModel, target_forward
from train.anchors import sample_anchors
from train.labels import block_labels, greedy_labels
from train.loss import LossConfig, drafter_loss, mean_loss, slot_weights

BLOCK, LENGTH, MASK_ID = 4, 14, 39
KINDS = ("decay", "uniform", "dpace")
MEANS = ("decay", "dpace")  # a mean over slots, a mean over rows
ATTENTIONS = ("dense", "chunked")


def loss_config(kind, chunk_bytes=2000, **changes):
    """By default the logits of two or three blocks at once."""
    return LossConfig(kind, gamma=3.0, alpha=0.25, chunk_bytes=chunk_bytes, **changes)


def random_params(model, *inputs):
    """Matrices large enough for context to matter; drawn by NumPy, as compiling `init` is slow."""
    rng = np.random.default_rng(0)

    def draw(path, x):
        mean, deviation = (1.0, 0.1) if path[-1].key == "scale" else (0.0, 0.15)
        return jnp.asarray(rng.normal(mean, deviation, x.shape), x.dtype)

    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    return jax.tree_util.tree_map_with_path(draw, shapes)


@cache
def make_models(num_layers, **changes):
    c = TargetConfig.tiny(num_hidden_layers=2)
    model = TargetModel(c, jnp.dtype(jnp.float32))
    target = Target(c, model, random_params(model, jnp.zeros((1, 1), jnp.int32)))
    config = DrafterConfig.for_target(
        c,
        mask_token_id=MASK_ID,
        num_layers=num_layers,
        target_layer_ids=(0, 1),
        block_size=BLOCK,
        **changes,
    )
    drafter = DFlashDrafter(config, jnp.dtype(jnp.float32))
    inputs = (jnp.zeros((1, 1, 64)), jnp.zeros((1, 1, 1, 32)), jnp.zeros((1, 1), jnp.int32))
    return target, Drafter(config, drafter, random_params(drafter, *inputs))


@pytest.fixture(scope="module")
def models():
    return make_models(num_layers=1)


def rows(*lengths_and_starts, seed=0):
    """A batch of rows (length, first supervised position), padded to LENGTH."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MASK_ID, (len(lengths_and_starts), LENGTH)).astype(np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, (length, start) in enumerate(lengths_and_starts):
        tokens[row, length:] = 0
        mask[row, start:length] = True
    return {"tokens_BT": jnp.asarray(tokens), "loss_mask_BT": jnp.asarray(mask)}


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def step(
    target_model: Any,
    drafter_model,
    config,
    attention,
    target_params,
    params,
    features,
    batch,
    anchors,
    valid,
):
    def loss_of(params, features):
        sums = drafter_loss(
            target_model,
            target_params,
            drafter_model,
            params,
            batch,
            features,
            anchors,
            valid,
            config,
            attention,
        )
        return mean_loss(sums), sums

    return jax.value_and_grad(loss_of, (0, 1), has_aux=True)(params, features)


def run(models, batch, anchors, valid, config, attention="chunked"):
    """(loss, sums, parameter gradients, feature gradients)."""
    target, drafter = models
    _, features = target_forward(target, batch["tokens_BT"], drafter.config.target_layer_ids)
    (loss, sums), bars = step(
        *(target.model, drafter.model, config, attention, target.params, drafter.params),
        *(features, batch, anchors, valid),
    )
    return loss, sums, *bars


def norm(tree):
    return float(sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(tree)))


def assert_trees_close(got, want, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, want)


# Labels and weights


def test_labels_not_shifted():
    """Slot k's label is the token AT anchor + k; beyond the row or the mask there is none."""
    tokens = jnp.arange(10, 20)[None]
    mask = jnp.array([[0, 1, 1, 1, 1, 0, 1, 1, 1, 1]])
    anchors, valid = jnp.array([[1, 3, 7, 0]]), jnp.array([[True, True, True, False]])
    labels, supervised = block_labels(tokens, mask, anchors, valid, BLOCK)
    np.testing.assert_array_equal(
        labels, [[[0, 12, 13, 14], [0, 14, 0, 16], [0, 18, 19, 0], [0, 0, 0, 0]]]
    )
    np.testing.assert_array_equal(
        supervised, [[[0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]]]
    )


def test_greedy_labels_end_where_the_row_leaves_them():
    """The slot at which row and target differ is the last one that is supervised."""
    tokens = jnp.arange(10, 20)[None]
    mask = jnp.array([[0, 1, 1, 1, 1, 0, 1, 1, 1, 1]])
    # The target's choices FOR the positions: its own at 3 and 8.
    choices = tokens.at[0, 3].set(73).at[0, 8].set(78)
    predicted = jnp.roll(choices, -1, axis=1)
    anchors, valid = jnp.array([[1, 2, 3, 6, 0]]), jnp.array([[True] * 4 + [False]])
    labels, supervised = greedy_labels(tokens, predicted, mask, anchors, valid, BLOCK)
    np.testing.assert_array_equal(
        supervised[0], [[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0] * 4]
    )
    np.testing.assert_array_equal(
        labels[0], [[0, 12, 73, 0], [0, 73, 0, 0], [0, 14, 0, 0], [0, 17, 78, 0], [0] * 4]
    )
    # The loss mask's gap at 5 ends anchor 3 too: past it greedy decoding is somewhere else.


def test_greedy_labels_of_a_greedy_row_are_its_tokens():
    batch = rows((LENGTH, 2), (9, 3))
    place = (batch["loss_mask_BT"], jnp.array([[3, 7], [4, 0]]), jnp.array([[1, 1], [1, 0]], bool))
    tokens = batch["tokens_BT"]
    own = greedy_labels(tokens, jnp.roll(tokens, -1, axis=1), *place, BLOCK)
    jax.tree.map(np.testing.assert_array_equal, own, block_labels(tokens, *place, BLOCK))


def test_slot_weights():
    supervised = jnp.array([[True, True, True], [True, False, True], [False, False, False]])
    probs = jnp.array([[0.2, 0.6, 1.0]] * 3)
    e = float(np.exp(-1 / 3))
    decay = slot_weights(supervised, probs, loss_config("decay"))
    np.testing.assert_allclose(decay, [[1, e, e**2], [1, 0, e**2], [0, 0, 0]], rtol=1e-6)
    uniform = slot_weights(supervised, probs, loss_config("uniform"))
    np.testing.assert_array_equal(uniform, supervised)
    # s = 0.75 q + 0.25 = 0.4, 0.7, 1, so P = 0.4, 0.28, 0.28; with slot 2 unsupervised 0.4, -, 0.4.
    dpace = slot_weights(supervised, probs, loss_config("dpace"))
    np.testing.assert_allclose(dpace, [[0.96, 0.56, 0.28], [0.8, 0, 0.4], [0, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "focal"),
        ("gamma", 0.0),
        ("alpha", 1.5),
        ("labels", "row"),
        ("soft_weight", -0.5),
        ("chunk_bytes", 0),
    ],
)
def test_config_out_of_range(field, value):
    with pytest.raises(ValueError, match=rf"{field}: '?{value}"):
        dataclasses.replace(loss_config("decay"), **{field: value})


# The whole step


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_leak_forward(attention):
    """Changing a target feature at position p moves only blocks with anchor > p."""
    target, drafter = make_models(num_layers=2)
    batch = rows((LENGTH, 2))
    _, features = target_forward(target, batch["tokens_BT"], drafter.config.target_layer_ids)
    anchors = jnp.array([[9, 2, 5, 6, 12]])
    blocks = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, BLOCK, 32)), jnp.float32)

    @jax.jit
    def forward(features):
        return drafter.model.apply({"params": drafter.params}, features, blocks, anchors, attention)

    before = forward(features)
    for p in (0, 5, 11, 13):
        after = forward(features.at[0, p].add(1.0))
        moved = np.abs(np.asarray(after - before)).max(-1) > 0
        np.testing.assert_array_equal(moved[0], np.repeat(anchors[0, :, None] > p, BLOCK, 1))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_leak_gradient(models, attention):
    """A block's loss depends on exactly the features below its anchor."""
    batch = rows((LENGTH, 2))
    anchors = jnp.array([[9, 3, 5, 12]])
    for index, anchor in enumerate(np.asarray(anchors[0])):
        valid = jnp.arange(4)[None] == index
        *_, bar = run(models, batch, anchors, valid, loss_config("decay"), attention)
        reached = np.abs(np.asarray(bar[0])).max(-1) > 0
        np.testing.assert_array_equal(reached, np.arange(LENGTH) < anchor)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="full"),
        pytest.param(
            {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3},
            id="sliding",
        ),
    ],
)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_training_forward_equals_decode_forward(changes, attention):
    """Logits of all blocks in one pass equal `draft_logits`, one block at a time."""
    target, drafter = make_models(num_layers=2, **changes)
    tokens = rows((LENGTH, 0), (LENGTH, 0))["tokens_BT"]
    _, features = target_forward(target, tokens, drafter.config.target_layer_ids)
    anchors = jnp.array([[1, 5, 11], [12, 3, 8]])

    @jax.jit
    def training_logits(features):
        def of_target(x, method):
            return target.model.apply({"params": target.params}, x, method=method)

        anchor_tokens = jnp.take_along_axis(tokens, anchors, axis=1)
        blocks = block_embeddings(
            lambda x: of_target(x, "embed"), anchor_tokens, BLOCK, drafter.config.mask_token_id
        )
        hidden = drafter.model.apply(
            {"params": drafter.params}, features, blocks, anchors, attention
        )
        return of_target(hidden, "head")

    got = training_logits(features)
    for a in range(3):
        position = anchors[:, a]
        unknown = jnp.arange(LENGTH)[None, :, None] >= position[:, None, None]
        want = draft_logits(
            target,
            drafter,
            jnp.where(unknown, 1e3, features),
            tokens[jnp.arange(2), position],
            position,
        )
        np.testing.assert_allclose(got[:, a], want, atol=1e-5, rtol=0)


def test_nothing_of_the_target_is_trained(models):
    target, drafter = models
    batch = rows((LENGTH, 2))
    _, features = target_forward(target, batch["tokens_BT"], drafter.config.target_layer_ids)

    @jax.jit
    @jax.grad
    def bar(target_params):
        return drafter_loss(
            target.model,
            target_params,
            drafter.model,
            drafter.params,
            batch,
            features,
            jnp.array([[3, 8]]),
            jnp.ones((1, 2), bool),
            loss_config("decay"),
        ).numerator

    assert norm(bar(target.params)) == 0


def test_the_targets_own_logits(models):
    """Labels and soft labels, against a loop over anchors and slots with whole logits."""
    target, drafter = models
    batch = rows((LENGTH, 2), (10, 1))
    for t in range(LENGTH - 1):  # the rows follow the target, but for every fourth token
        if t % 4 != 1:
            choice = jnp.argmax(target_forward(target, batch["tokens_BT"])[0][:, t], axis=-1)
            batch["tokens_BT"] = batch["tokens_BT"].at[:, t + 1].set(choice)
    all_logits, features = target_forward(target, batch["tokens_BT"], (0, 1))
    hidden, _, _ = target.model.apply({"params": target.params}, batch["tokens_BT"])
    anchors, valid = jnp.array([[3, 8], [2, 5]]), jnp.array([[True, True], [True, False]])
    config = loss_config("decay", labels="target", soft_weight=0.25)
    sums = drafter_loss(
        *(target.model, target.params, drafter.model, drafter.params),
        *(batch, features, anchors, valid, config),
        hidden_BTD=hidden,
    )
    numerator = denominator = accepted = 0.0
    for row, a in ((0, 3), (0, 8), (1, 2)):
        tokens = np.asarray(batch["tokens_BT"][row])
        drafts = draft_logits(target, drafter, features[row : row + 1], tokens[a : a + 1], [a])
        log_q = np.asarray(jax.nn.log_softmax(drafts[0]))
        leading = True
        for k in range(1, BLOCK):
            if a + k >= LENGTH or not batch["loss_mask_BT"][row, a + k]:
                break
            before = np.asarray(all_logits[row, a + k - 1])
            label, weight = before.argmax(), np.exp(-(k - 1) / 3.0)
            soft = -np.sum(np.asarray(jax.nn.softmax(before)) * log_q[k])
            numerator += weight * (0.75 * -log_q[k, label] + 0.25 * soft)
            denominator += weight
            leading &= log_q[k].argmax() == label
            accepted += leading
            if tokens[a + k] != label:
                break
        accepted += 1
    np.testing.assert_allclose(sums.numerator, numerator, rtol=1e-5)
    np.testing.assert_allclose(sums.denominator, denominator, rtol=1e-6)
    assert (float(sums.accepted), float(sums.blocks)) == (accepted, 3)


@pytest.mark.parametrize("changes", [{"labels": "target"}, {"soft_weight": 0.5}])
def test_the_targets_logits_are_asked_for(models, changes):
    target, drafter = models
    batch = rows((LENGTH, 2))
    with pytest.raises(ValueError, match="hidden_BTD is needed"):
        drafter_loss(
            *(target.model, target.params, drafter.model, drafter.params, batch),
            *(jnp.zeros((1, LENGTH, 64)), jnp.array([[3]]), jnp.array([[True]])),
            loss_config("decay", **changes),
        )


@pytest.mark.parametrize("kind", MEANS)
def test_no_valid_anchor(models, kind):
    """Nothing to learn: loss 0 and zero gradients, not NaN."""
    batch = rows((LENGTH, LENGTH), (1, 0))
    anchors, valid = sample_anchors(jax.random.key(0), jnp.arange(2), batch["loss_mask_BT"], 4)
    assert not valid.any()
    loss, sums, *bars = run(models, batch, anchors, valid, loss_config(kind))
    assert float(loss) == 0
    assert norm(bars) == 0
    assert norm(sums) == 0


@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize(
    "empty",
    [
        pytest.param((LENGTH, LENGTH), id="all-masked"),
        pytest.param((0, 0), id="filler"),
        pytest.param((1, 0), id="length-1"),
    ],
)
def test_empty_row_changes_nothing(models, kind, empty):
    """One good and one empty row: finite, no gradient from the empty, the good one's unchanged."""
    both = rows((LENGTH, 3), empty)
    good = {name: x[:1] for name, x in both.items()}
    results = []
    for batch in (both, good):
        ids = jnp.arange(batch["tokens_BT"].shape[0])
        anchors, valid = sample_anchors(jax.random.key(0), ids, batch["loss_mask_BT"], 4)
        results.append(run(models, batch, anchors, valid, loss_config(kind)))
    (loss, sums, bars, features_bar), (want, want_sums, want_bars, want_features_bar) = results
    assert float(want) > 0
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert_trees_close(sums, want_sums, rtol=1e-6)
    assert_trees_close(bars, want_bars, atol=1e-6, rtol=1e-5)
    assert norm(features_bar[1]) == 0
    np.testing.assert_allclose(features_bar[:1], want_features_bar, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_short_rows(models, attention):
    """Lengths 1, block - 1 and block: supervised slots as many as there are next tokens."""
    # Length n has anchors 0..n-2, and anchor a has n - 1 - a next tokens: 2 + 1 and 3 + 2 + 1.
    for length, supervised in ((BLOCK - 1, [0, 2, 1, 0]), (BLOCK, [0, 3, 2, 1])):
        batch = rows((1, 0), (length, 0))
        anchors, valid = sample_anchors(jax.random.key(0), jnp.arange(2), batch["loss_mask_BT"], 4)
        np.testing.assert_array_equal(valid.sum(1), [0, length - 1])
        loss, sums, *bars = run(models, batch, anchors, valid, loss_config("decay"), attention)
        np.testing.assert_array_equal(sums.supervised_G, supervised)
        assert np.isfinite(loss)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(bars))
        assert norm(bars[1][0]) == 0
        assert norm(bars[1][1]) > 0


@pytest.mark.parametrize("kind", MEANS)
def test_sums_add_up_over_steps_and_devices(models, kind):
    """Four rows at once, in two halves, and over four devices: the same sums."""
    target, drafter = models
    batch = rows((LENGTH, 1), (LENGTH - 3, 6), (LENGTH, LENGTH), (9, 2))
    _, features = target_forward(target, batch["tokens_BT"], drafter.config.target_layer_ids)
    anchors, valid = sample_anchors(jax.random.key(0), jnp.arange(4), batch["loss_mask_BT"], 4)
    inputs = (batch, features, anchors, valid)

    @jax.jit
    def sums_of(inputs):
        batch, features, anchors, valid = inputs
        return drafter_loss(
            target.model,
            target.params,
            drafter.model,
            drafter.params,
            batch,
            features,
            anchors,
            valid,
            loss_config(kind),
        )

    want = sums_of(inputs)
    halves = [jax.tree.map(lambda x, h=h: x[2 * h : 2 * h + 2], inputs) for h in (0, 1)]
    assert_trees_close(jax.tree.map(jnp.add, *map(sums_of, halves)), want, rtol=1e-6)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert_trees_close(sums_of(jax.device_put(inputs, sharding)), want, rtol=1e-6)
