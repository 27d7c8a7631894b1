"""CPU time of one GRPO step, ours against TRL's GRPOTrainer, each in its own process, in turns.

    OMP_NUM_THREADS=1 python benchmarks/step.py [--trl DIRECTORY] [--rounds 3]

Qwen3-like model (hidden 64, 2 layers, 4 heads, vocabulary 512), 8 prompts x 8 responses of 32
tokens, the end token never sampled, one thread, float32. Ours is publish, engine load, sampling,
reward, advantage and update. DIRECTORY is where TRL and what it needs beyond our own environment
was installed: pip install --no-deps --target DIRECTORY trl accelerate datasets ... (another
environment's dependencies must not mix with ours, so it is no extra of the project).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_PROMPTS, GROUP, LENGTH, STEPS = 8, 8, 32, 12


def make_policy(directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)


def prompts() -> list[str]:
    return [f"What is {i}+{i + 3}? " for i in range(256)]


def reward(text: str) -> float:
    return sum(letter in "0123456789" for letter in text) / max(1, len(text))


def ours(policy: Path) -> dict[str, float]:
    from relax.data.prompts import load_tokenizer
    from relax.engines import open_engine
    from relax.trainer.actor import Actor
    from relax.trainer.numerics import make_deterministic
    from relax.trainer.options import TrainerOptions

    make_deterministic(1)
    actor = Actor.load(policy, TrainerOptions(lr=1e-4), num_schedule_steps=STEPS)
    engine, tokenizer = open_engine("transformers"), load_tokenizer(policy)
    step_s, update_s = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for step in range(STEPS):
            start = time.process_time()
            actor.publish(Path(scratch) / f"{step:06d}", "float32")
            engine.load(Path(scratch) / f"{step:06d}")
            sequences = sample(engine, tokenizer, step)
            middle = time.process_time()
            train(actor, sequences)
            step_s.append(time.process_time() - start)
            update_s.append(time.process_time() - middle)
    return summary(step_s, update_s)


def sample(engine, tokenizer, step: int) -> list:
    import numpy as np
    import torch

    from relax.algorithms.advantages import group_normalized
    from relax.engines import Request, SamplingParams
    from relax.trainer.sequences import TrainSequence

    texts = prompts()[step * NUM_PROMPTS :][:NUM_PROMPTS]
    prompt_B = [tuple(ids) for ids in tokenizer(texts)["input_ids"] for _ in range(GROUP)]
    requests = [Request(tokens, seed=1000 * step + i) for i, tokens in enumerate(prompt_B)]
    params = SamplingParams(max_response_len=LENGTH, ignore_eos=True)
    responses = engine.sample(requests, params)
    reward_B = torch.tensor([reward(tokenizer.decode(one.tokens)) for one in responses])
    group_B = torch.arange(len(responses)) // GROUP
    advantage_B = group_normalized(reward_B, group_B).tolist()
    sequences = []
    for i, (tokens, response) in enumerate(zip(prompt_B, responses, strict=True)):
        fields = {
            "mask": np.ones(LENGTH, np.float32),
            "advantage": np.full(LENGTH, advantage_B[i], np.float32),
        }
        whole = np.array([*tokens, *response.tokens])
        sequences.append(TrainSequence(i, whole, LENGTH, fields))
    return sequences


def train(actor, sequences: list) -> None:
    from relax.algorithms.objectives import ppo_clip
    from relax.trainer.sequences import LossParts

    num_tokens = sum(sequence.response_len for sequence in sequences)

    def loss(batch):
        logp_BT, mask_BT = batch["logp_BT"], batch["mask_BT"]
        loss_BT, clipped_BT = ppo_clip(logp_BT, logp_BT.detach(), batch["advantage_BT"], mask_BT)
        sums = {
            "pg_clipfrac": clipped_BT.sum() / num_tokens,
            "entropy_loss": (batch["entropy_BT"].detach() * mask_BT).sum() / num_tokens,
        }
        return LossParts(loss_BT.sum() / num_tokens, sums)

    actor.train_step(sequences, loss)


def make_trainer(policy: Path, kind):
    """TRL's trainer of the class `kind`, set as ours is."""
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=NUM_PROMPTS * GROUP,
        gradient_accumulation_steps=1, num_generations=GROUP, max_completion_length=LENGTH,
        max_steps=STEPS, learning_rate=1e-4, beta=0.0, loss_type="dapo", logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
        disable_tqdm=True, temperature=1.0, seed=0, generation_kwargs={"suppress_tokens": [1]},
    )  # fmt: skip
    return kind(
        model=AutoModelForCausalLM.from_pretrained(policy),
        processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts()}),
    )


def trl(policy: Path) -> dict[str, float]:
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        ends: list[float] = []  # noqa: RUF012

        def on_step_end(self, *args, **kwargs):
            self.ends.append(time.process_time())

    update_s: list[float] = []

    class Timed(GRPOTrainer):
        generation_s = 0.0

        def _generate_and_score_completions(self, *args, **kwargs):
            start = time.process_time()
            found = super()._generate_and_score_completions(*args, **kwargs)
            self.generation_s += time.process_time() - start
            return found

        def training_step(self, *args, **kwargs):
            start, self.generation_s = time.process_time(), 0.0
            found = super().training_step(*args, **kwargs)
            update_s.append(time.process_time() - start - self.generation_s)
            return found

    trainer = make_trainer(policy, Timed)
    trainer.add_callback(Clock())
    trainer.train()
    return summary([b - a for a, b in zip(Clock.ends, Clock.ends[1:], strict=False)], update_s)


def summary(step_s: list[float], update_s: list[float]) -> dict[str, float]:
    """Medians in ms, the first steps left out."""
    return {
        "step_ms": 1e3 * statistics.median(step_s[2:]),
        "update_ms": 1e3 * statistics.median(update_s[2:]),
    }


def run_child(script: str, side: str, policy: Path, extra: str) -> dict[str, float]:
    """One side of a benchmark in a fresh process."""
    path = os.pathsep.join([extra, *sys.path] if extra else sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, script, "--side", side, "--policy", str(policy)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", default="", help="directory where TRL is installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--policy", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps({"ours": ours, "trl": trl}[options.side](options.policy)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        policy = Path(scratch)
        make_policy(policy)
        sides = ("ours", "trl") if options.trl else ("ours",)
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                extra = options.trl if side == "trl" else ""
                found[side].append(run_child(__file__, side, policy, extra))
    best = {
        side: {key: min(one[key] for one in rounds) for key in rounds[0]}
        for side, rounds in found.items()
    }
    for side, numbers in best.items():
        tokens_per_s = NUM_PROMPTS * GROUP * LENGTH / numbers["update_ms"] * 1e3
        print(
            f"{side:5} step {numbers['step_ms']:6.0f} ms CPU, update {numbers['update_ms']:6.0f} "
            f"ms CPU, {tokens_per_s:7.0f} response tokens/s in the update"
        )
    if options.trl:
        print(
            f"ours / TRL: step {best['ours']['step_ms'] / best['trl']['step_ms']:.2f}, update "
            f"{best['ours']['update_ms'] / best['trl']['update_ms']:.2f}"
        )


if __name__ == "__main__":
    main()
