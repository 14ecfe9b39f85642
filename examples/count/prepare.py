"""Makes the three small models that the count example starts from, in `models/` beside this file.

    actor   LlamaForCausalLM: counts without mistakes, but the further it has counted the sooner it stops
    reward  LlamaForSequenceClassification: predicts the true reward of a prompt and its response
    critic  LlamaForTokenClassification: the reward model, head and all, as a first guess of the value

The actor and the reward model are trained side by side, in two processes of one thread each. The folder
appears as a whole when all three are done; when it is there already, nothing happens.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)
from transformers.utils import logging

from nereus.rl.tasks.base import Prompt
from nereus.rl.tasks.count import CountTask

EXAMPLE_DIR = Path(__file__).parent
MODEL_NAMES = ("actor", "critic", "reward")
MODEL_FILES = ("config.json", "model.safetensors")

TASK = CountTask()
PROMPT_LENGTH = 2

STOP_SLOPE, STOP_MOST = 0.016, 0.22
"""The actor's chance to stop grows by so much with each number, up to so much: a response has 11 tokens on average, and
in a step of 48 the longest has about 25. So both the mean and the longest have far to grow."""

MISTAKE_RATES = (0.0, 0.03, 0.03, 0.05, 0.5, 0.5)
"""Mistakes per token in the reward model's training sequences, one rate a sequence: clean ones, ones with a
mistake or two, and ones that are full of them, which is where it learns quickly what a mistake is."""

SEED = 0
BATCH_SIZE = 32
ACTOR_UPDATES = 350
REWARD_UPDATES = 600
PEAK_LEARNING_RATE = 4e-3
WARMUP_UPDATES = 20
NUM_EVALUATED = 512


def llama_config() -> LlamaConfig:
    """The shape that all three models share: 2 layers, hidden 128, 8 heads over 4 KV heads, no dropout."""
    return LlamaConfig(
        vocab_size=TASK.vocab_size,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=TASK.bos_token_id,
        eos_token_id=TASK.eos_token_id,
        pad_token_id=TASK.pad_token_id,
        num_labels=1,
        classifier_dropout=0.0,
        dtype="float32",
    )


def correct_sequences(num: int, generator: torch.Generator) -> Tensor:
    """Prompts, each with its full correct answer: `(num, PROMPT_LENGTH + max_new_tokens)` token ids."""
    start = torch.randint(TASK.modulus, (num, 1), generator=generator)
    numbers = (start + torch.arange(1 + TASK.max_new_tokens)) % TASK.modulus
    return torch.cat([torch.full((num, 1), TASK.bos_token_id), numbers], dim=1)


def spoilt_sequences(num: int, generator: torch.Generator) -> Tensor:
    """Sequences like the correct ones, with mistakes at `MISTAKE_RATES`.

    Seven mistakes in ten jump to another number, a near one or any, and count on from there; three put a
    special token, or any token, in the place of one number.
    """

    def chance(probability: float | Tensor) -> Tensor:
        return torch.rand((num, TASK.max_new_tokens), generator=generator) < probability

    def choose(values: Tensor) -> Tensor:
        return values[torch.randint(len(values), (num, TASK.max_new_tokens), generator=generator)]

    tokens = correct_sequences(num, generator)
    rate = torch.tensor(MISTAKE_RATES)[torch.randint(len(MISTAKE_RATES), (num, 1), generator=generator)]
    near, far = choose(torch.tensor([-2, -1, 1, 2])), choose(torch.arange(1, TASK.modulus))
    jumps = torch.where(chance(0.5), near, far) * chance(0.7 * rate)
    numbers = (tokens[:, PROMPT_LENGTH:] + jumps.cumsum(dim=1)) % TASK.modulus
    special = choose(torch.tensor([TASK.eos_token_id, TASK.bos_token_id]))
    strangers = torch.where(chance(0.5), special, choose(torch.arange(TASK.vocab_size)))
    tokens[:, PROMPT_LENGTH:] = torch.where(chance(0.3 * rate), strangers, numbers)
    return tokens


def prefix_rewards(tokens: Tensor) -> Tensor:
    """The true rewards after 0, 1, ... tokens of the response: `(num, 1 + max_new_tokens)`.

    What `CountTask.reward` says, for a whole batch and all lengths at once.
    """
    numbers = tokens[:, PROMPT_LENGTH - 1 :]
    expected = (numbers[:, :1] + torch.arange(1 + TASK.max_new_tokens)) % TASK.modulus
    return ((numbers == expected).cumprod(dim=1).cumsum(dim=1) - 1) / TASK.max_new_tokens


def start_training() -> None:
    """One thread, the same random numbers every time, and no progress bars."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    logging.disable_progress_bar()


def train(modules: nn.ModuleList, num_updates: int, loss: Callable[[], Tensor]) -> None:
    """Minimises `loss` over the parameters of `modules`, with a short warm-up and a cosine decay."""

    def schedule_factor(update: int) -> float:
        return min(1.0, (update + 1) / WARMUP_UPDATES) * 0.5 * (1 + math.cos(math.pi * update / num_updates))

    parameters = list(modules.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_factor)
    for _ in range(num_updates):
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def make_actor(folder: Path) -> str:
    """Trains and saves the actor; says how good it is.

    Its targets are distributions, not samples: at every place, stop with the chance of that place, else the next
    number. So it can count to the end although it nearly never gets there.
    """
    start_training()
    generator = torch.Generator().manual_seed(SEED)
    model = LlamaForCausalLM(llama_config())
    chance = (STOP_SLOPE * torch.arange(TASK.max_new_tokens)).clamp(max=STOP_MOST)

    def loss() -> Tensor:
        tokens = correct_sequences(BATCH_SIZE, generator)
        logits: Tensor = model(input_ids=tokens[:, :-1], use_cache=False).logits
        log_probs = logits[:, PROMPT_LENGTH - 1 :].log_softmax(dim=-1)
        count_on = log_probs.gather(-1, tokens[:, PROMPT_LENGTH:, None])[..., 0]
        stop = log_probs[..., TASK.eos_token_id]
        return -((1 - chance) * count_on + chance * stop).mean()

    train(nn.ModuleList([model]), ACTOR_UPDATES, loss)
    model.save_pretrained(folder)
    responses = sample_responses(model)
    reward = sum(TASK.reward(*pair) for pair in responses) / len(responses)
    length = sum(len(response) for _, response in responses) / len(responses)
    return f"actor: mean true reward {reward:.2f}, mean response {length:.1f} of {TASK.max_new_tokens} tokens"


def sample_responses(model: LlamaForCausalLM) -> list[tuple[Prompt, list[int]]]:
    """The first prompts of the run, each with a sampled response up to its end token."""
    prompts = [TASK.prompt(position) for position in range(NUM_EVALUATED)]
    sequences = model.eval().generate(
        torch.tensor([prompt.token_ids for prompt in prompts]),
        attention_mask=torch.ones(len(prompts), PROMPT_LENGTH, dtype=torch.long),
        max_new_tokens=TASK.max_new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    responses = sequences[:, PROMPT_LENGTH:].tolist()
    return [
        (prompt, [token for token in response if token != TASK.pad_token_id])
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def make_reward_and_critic(reward_folder: Path, critic_folder: Path) -> str:
    """Trains and saves the reward model, and the critic from it; says how good the reward model is.

    It is taught at every place of a sequence, for each prefix is a response too. Two more heads, thrown away
    afterwards, guide the layers: after the first, whether a token follows from the one before it; after the
    last, whether all has been right so far. Without them, finding mistakes takes much longer to learn.
    """
    start_training()
    generator = torch.Generator().manual_seed(SEED)
    model = LlamaForSequenceClassification(llama_config())
    follows_head = nn.Linear(model.config.hidden_size, 1)
    right_head = nn.Linear(model.config.hidden_size, 1)

    def loss() -> Tensor:
        tokens = spoilt_sequences(BATCH_SIZE, generator)
        rewards = prefix_rewards(tokens)
        current, previous = tokens[:, PROMPT_LENGTH:], tokens[:, PROMPT_LENGTH - 1 : -1]
        follows = (current < TASK.modulus) & ((current - previous) % TASK.modulus == 1)
        right = rewards.diff(dim=1) > 0
        _, after_first, after_last = model.model(
            input_ids=tokens, use_cache=False, output_hidden_states=True
        ).hidden_states
        scores = model.score(after_last)[:, PROMPT_LENGTH - 1 :, 0]
        follows_logits = follows_head(after_first)[:, PROMPT_LENGTH:, 0]
        right_logits = right_head(after_last)[:, PROMPT_LENGTH:, 0]
        return (
            functional.mse_loss(scores, rewards)
            + functional.binary_cross_entropy_with_logits(follows_logits, follows.float())
            + 0.03 * functional.binary_cross_entropy_with_logits(right_logits, right.float())
        )

    train(nn.ModuleList([model, follows_head, right_head]), REWARD_UPDATES, loss)
    model.save_pretrained(reward_folder)
    critic = LlamaForTokenClassification(model.config)
    critic.model.load_state_dict(model.model.state_dict())
    with torch.no_grad():
        critic.score.weight.copy_(model.score.weight)
        critic.score.bias.zero_()
    critic.save_pretrained(critic_folder)
    correlation, error = reward_quality(model.eval())
    return f"reward model: correlation with the true reward {correlation:.3f}, error {error:.3f} (RMS)"


@torch.no_grad()
def reward_quality(model: LlamaForSequenceClassification) -> tuple[float, float]:
    """Correlation and error of its scores, over unseen responses of all lengths, many with mistakes."""
    generator = torch.Generator().manual_seed(SEED + 1)
    tokens = spoilt_sequences(NUM_EVALUATED, generator)
    lengths = torch.randint(1 + TASK.max_new_tokens, (NUM_EVALUATED, 1), generator=generator)
    padding = torch.arange(tokens.shape[1]) >= PROMPT_LENGTH + lengths
    truth = prefix_rewards(tokens).gather(1, lengths)[:, 0]
    padded = tokens.masked_fill(padding, TASK.pad_token_id)
    scores = model(input_ids=padded, attention_mask=~padding).logits[:, 0]
    correlation = torch.corrcoef(torch.stack([scores, truth]))[0, 1]
    return correlation.item(), (scores - truth).square().mean().sqrt().item()


def is_complete(models: Path) -> bool:
    """Whether all three models are there."""
    return all((models / name / file).is_file() for name in MODEL_NAMES for file in MODEL_FILES)


def make_models(models: Path) -> None:
    """Makes all three models in a folder beside `models`, then puts it in the place of `models`."""
    started = time.monotonic()
    print(f"making the count example's models (under a minute on two cores): {models}", flush=True)
    with tempfile.TemporaryDirectory(prefix=f".{models.name}-", dir=models.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            actor = pool.submit(make_actor, fresh / "actor")
            print(make_reward_and_critic(fresh / "reward", fresh / "critic"), flush=True)
            print(f"{actor.result()}; {time.monotonic() - started:.0f} s in all", flush=True)
        if models.exists():
            models.rename(Path(scratch) / "replaced")
        fresh.rename(models)


def main() -> None:
    """Makes the models, unless they are there."""
    parser = argparse.ArgumentParser(description="Make the small models that the count example starts from.")
    parser.add_argument("--force", action="store_true", help="make them again when they are there already")
    force = parser.parse_args().force
    models = EXAMPLE_DIR / "models"
    if is_complete(models) and not force:
        print(f"the count example's models are there already: {models}")
        return
    make_models(models)


if __name__ == "__main__":
    main()
