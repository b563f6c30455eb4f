"""The real 135M model against Transformers, both float32 from the same GGUF file."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import dflash_jax as dj

PROMPTS = ("Why is the sky blue?", "Write a haiku about the sea.")


@pytest.fixture(scope="module")
def target():
    return dj.load_target("smollm2-135m-instruct", dtype="float32")


@pytest.fixture(scope="module")
def reference(smollm2_gguf):
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    model.generation_config.eos_token_id = None  # as with `stop_token_ids=()`
    return model.eval()


def chat_ids(target, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


@pytest.mark.slow
def test_the_first_40_greedy_tokens_are_those_of_transformers(target, reference):
    prompts = [chat_ids(target, text) for text in PROMPTS]
    ours = dj.generate_ids(target, None, prompts, max_new_tokens=40, stop_token_ids=())
    for prompt, ids in zip(prompts, ours.token_ids, strict=True):
        with torch.inference_mode():
            theirs = reference.generate(
                torch.tensor([prompt]),
                # Left to itself it masks the end-of-turn tokens of the prompt as padding.
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=40,
                do_sample=False,
            )
        assert ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_logits_and_every_tapped_layer(target, reference):
    ids = np.array([chat_ids(target, PROMPTS[0])])
    layers = (0, 14, 29)
    logits, features = dj.target_forward(target, ids, layers)
    with torch.inference_mode():
        out = reference.model(torch.tensor(ids), output_hidden_states=True)
        theirs = reference.lm_head(out.last_hidden_state).numpy()
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=2e-3)
    width = target.config.hidden_size
    # The last entry of Transformers' hidden states has been through the final norm; ours has not.
    for slot, layer in enumerate(layers[:2]):
        ours = features[..., slot * width : (slot + 1) * width]
        np.testing.assert_allclose(ours, out.hidden_states[layer + 1], rtol=1e-4, atol=2e-3)


@pytest.mark.slow
def test_speculative_equals_plain_at_every_temperature(target):
    config = dj.DrafterConfig.for_target(
        target.config, mask_token_id=16, num_layers=1, num_taps=1, block_size=8
    )
    drafter = dj.init_drafter(target, config)
    prompts = [chat_ids(target, text) for text in PROMPTS]
    sampling = [dj.SamplingParams(0.0), dj.SamplingParams(0.8, top_p=0.9, seed=3)]
    plain, fast = (
        dj.generate_ids(target, d, prompts, sampling=sampling, max_new_tokens=32)
        for d in (None, drafter)
    )
    assert plain.token_ids == fast.token_ids
    assert plain.finish_reasons == fast.finish_reasons
