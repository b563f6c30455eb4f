"""A seeded tiny target and a drafter for it: no files, no network.

    python -m train.main --config=configs/tiny.py --workdir=runs/tiny

The target is random; prompts are random ids and the responses its own. Prompts, responses and
evaluation rows are drawn anew for every seed, and kept in the workdir.

Hardware: 2 CPU cores, 58 s of CPU time (most of it compilation). Expected: held out, slot accuracy
0.46 (chance 1/64), simulated acceptance 2.1, decoded 1.7 of at most 4 (with drafter.init=random).
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    config = common.base()
    config.target.path = "tiny"
    config.drafter.update(
        num_layers=2, num_taps=3, target_layer_ids=(0, 2, 3), block_size=4, mask_token_id=1
    )
    # A random target has little else than loops to say.
    config.data.update(max_length=40, batch_size=16, held_out_fraction=0.1, loops="keep")
    config.synthetic.update(rows=1024, prompt_length=8, response_length=32)
    config.train.update(
        steps=250,
        gamma=4.0,
        num_anchors=16,
        attention="dense",
        log_every=10,
        eval_every=125,
        checkpoint_every=100,
    )
    config.optimizer.update(learning_rate=1e-2)
    config.eval.update(num_rows=32, num_prompts=8, max_new_tokens=32)
    return config
