"""Post-training on two cores: a character transformer learns to turn words around, by GRPO.

It learns from answers until it is right at times, then from rewards of its own answers. Generators
answer in batches, an environment tries each answer out, a reward judges it; these two block, at times
for long. With mode `sync` all wait for the slowest one; with `async`, generators work ahead.
"""

import json
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launchpad_lite as lp
from launchpad_lite import rollouts

CHARACTERS = "abcdefghijkl="
LENGTH = 8
GROUPS, GROUP_SIZE, THREADS = 16, 8, 16
STALENESS = {"sync": 0, "async": 4}
Params = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How to learn."""

    target: float  # share of right answers at which the program ends
    tail_s: float  # the longest wait for an environment or a reward; mostly it is 10 ms
    hang: str  # name of an environment that hangs once
    device: str
    width: int  # of the model; its layers are as many as 64 goes into it, but at least 2
    output: Path | None

    def wait(self) -> None:
        """Takes some time, as code that runs, or another model."""
        time.sleep(min(self.tail_s, 0.008 * random.paretovariate(1.1)))

    def write(self, name: str, **record: Any) -> None:
        """Appends a line to a file."""
        if self.output is not None:
            with (self.output / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"at": time.time(), **record}) + "\n")


def words(number: int, seed: int | None = None) -> list[str]:
    """Returns random words."""
    chosen = random.Random(seed)
    return ["".join(chosen.choices(CHARACTERS[:-1], k=LENGTH)) for _ in range(number)]


def tensor_of(prompts: list[str], device: str) -> Any:
    """Returns tokens of words and of their answers, shape (n, 17): `abcdefgh=hgfedcba`."""
    import torch

    texts = [f"{prompt}={prompt[::-1]}" for prompt in prompts]
    return torch.tensor(
        [[CHARACTERS.index(each) for each in text] for text in texts], device=device
    )


def initial(settings: Settings) -> Params:
    """Returns random parameters of a transformer."""
    import torch

    width, vocabulary = settings.width, len(CHARACTERS)
    shapes = {"token": (vocabulary, width), "place": (2 * LENGTH + 1, width)}
    for layer in range(max(2, width // 64)):
        shapes |= {f"{layer}.attend": (width, 3 * width), f"{layer}.join": (width, width)}
        shapes |= {f"{layer}.up": (width, 4 * width), f"{layer}.down": (4 * width, width)}
    shapes["out"] = width, vocabulary
    made = {name: torch.randn(shape) * max(shape) ** -0.5 for name, shape in shapes.items()}
    return {name: each.to(settings.device).requires_grad_() for name, each in made.items()}


def logits(params: Params, tokens: Any) -> Any:
    """Returns scores of the next token, shape (n, length, 13), for tokens of shape (n, length)."""
    from torch.nn import functional

    hidden = params["token"][tokens] + params["place"][: tokens.shape[1]]
    width = hidden.shape[2:]
    for layer in range(sum(name.endswith("up") for name in params)):
        heads = functional.layer_norm(hidden, width) @ params[f"{layer}.attend"]
        heads = heads.unflatten(2, (3, -1, 16)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + mixed.transpose(1, 2).flatten(2) @ params[f"{layer}.join"]
        inner = functional.layer_norm(hidden, width) @ params[f"{layer}.up"]
        hidden = hidden + functional.gelu(inner) @ params[f"{layer}.down"]
    return functional.layer_norm(hidden, width) @ params["out"]


def log_p(params: Params, tokens: Any) -> Any:
    """Returns logarithms of the probabilities of answers, shape (n, LENGTH)."""
    scores = logits(params, tokens[:, :-1])[:, LENGTH:].log_softmax(2)
    return scores.gather(2, tokens[:, LENGTH + 1 :, None])[..., 0]


def answered(params: Params, tokens: Any) -> Any:
    """Returns tokens with answers that the model has drawn."""
    import torch

    tokens = tokens[:, : LENGTH + 1]
    with torch.no_grad():
        for _ in range(LENGTH):
            p = logits(params, tokens)[:, -1].softmax(1)
            tokens = torch.cat([tokens, torch.multinomial(p, 1)], 1)
    return tokens


def share_right(params: Params, right: Any) -> float:
    """Returns how many answers of the model are right, from 0 to 1."""
    return float((answered(params, right) == right).all(1).float().mean())


def policy_loss(new: Any, old: Any, advantages: Any) -> Any:
    """Returns the clipped loss of GRPO, for log-probabilities (n, LENGTH) and advantages (n, 1)."""
    ratio = (new - old).exp()
    return -(ratio * advantages).minimum(ratio.clamp(0.8, 1.2) * advantages).sum(1).mean()


def learn(optimizer: Any, loss: Any) -> None:
    """Makes one step of an optimizer."""
    import torch

    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def copied(params: Params, device: str, **more: Any) -> Params:
    """Returns parameters without gradients."""
    return {
        name: each.detach().to(device) for name, each in params.items() if name != "step"
    } | more


def use_one_core() -> None:
    """Leaves the others to other nodes, and draws random numbers of this node's own."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(lp.current_node().seed)


class Sandbox:
    """An environment: tries answers out."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def step(self, answer: str) -> str:
        """Returns the word that an answer comes from."""
        if lp.current_node().name == self._settings.hang and lp.restart_count() == 0:
            threading.Event().wait()
        self._settings.wait()
        return answer[::-1]


class Judge:
    """A reward: 1 for the right answer, else 0."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def reward(self, prompt: str, rollout: tuple[Any, Any, str]) -> float:
        """Returns it, at times late."""
        self._settings.wait()
        return float(rollout[2] == prompt)


class Generator:
    """Answers questions: those of all its threads in one batch."""

    def __init__(self, settings: Settings) -> None:
        use_one_core()
        self._device, self._lock = settings.device, threading.Lock()
        self._step, self._params = -1, Params()
        self._answer = lp.batched_handler(THREADS, timeout_s=0.005)(self._answer_all)

    def generate(self, prompt: str, weights: Params, sandbox: Sandbox) -> Any:
        """Returns tokens, log-probabilities of the answer, and what came out."""
        with self._lock:  # all of a batch have the newest weights that one of them has
            if weights["step"] > self._step:
                self._step, self._params = weights["step"], copied(weights, self._device)
        tokens, old = self._answer(prompt)
        return tokens, old, sandbox.step("".join(CHARACTERS[each] for each in tokens[LENGTH + 1 :]))

    def _answer_all(self, prompts: list[str]) -> list[Any]:
        params = self._params
        tokens = answered(params, tensor_of(prompts, self._device))
        return list(zip(tokens.cpu().numpy(), log_p(params, tokens).cpu().numpy(), strict=True))


class Trainer:
    """Learns from answers, then from rewards."""

    def __init__(self, made: rollouts.RolloutsClient, settings: Settings) -> None:
        self._made, self._settings = made, settings

    def run(self) -> None:
        """Learns until all prompts are used, or the program stops."""
        import numpy as np
        import torch

        use_one_core()
        device = self._settings.device
        params, others = initial(self._settings), tensor_of(words(500), device)
        optimizer = torch.optim.Adam(params.values(), 1e-3)
        while share_right(params, others) < 0.15:
            for _ in range(3):
                learn(optimizer, -log_p(params, tensor_of(words(128), device)).mean())
        optimizer = torch.optim.Adam(params.values(), 3e-4, betas=(0.9, 0.99))
        self._made.publish(copied(params, "cpu", step=0))
        waits_at = time.time()
        for batch in self._made.batches(GROUPS):
            idle_s = time.time() - waits_at
            made: list[Any] = []
            for group in batch:
                mean = sum(group.rewards) / GROUP_SIZE
                made += [(*each.value[:2], [each.reward - mean]) for each in group.rollouts]
            tokens, old, advantages = (
                torch.tensor(np.array(each), device=device) for each in zip(*made, strict=True)
            )
            learn(optimizer, policy_loss(log_p(params, tokens), old, advantages))
            self._made.publish(copied(params, "cpu", step=batch.step + 1))
            groups = [(each.index, each.staleness, sum(each.rewards)) for each in batch]
            self._settings.write("steps", step=batch.step, idle_s=idle_s, groups=groups)
            waits_at = time.time()
        lp.stop()


class Evaluator:
    """Tries the newest weights on words of its own."""

    def __init__(self, weights: rollouts.WeightsClient, settings: Settings) -> None:
        self._weights, self._settings = weights, settings

    def run(self) -> None:
        """Ends the program when enough of them are right."""
        use_one_core()
        others = tensor_of(words(500, seed=0), self._settings.device)
        for weights, _ in self._weights.versions():
            right = share_right(copied(weights, self._settings.device), others)
            print(f"step {weights['step']}: {right:.1%} of other words are right", flush=True)
            self._settings.write("evaluations", step=weights["step"], right=right)
            if right >= self._settings.target:
                lp.stop()
            lp.wait_for_stop(0.5)


def make_program(
    mode: str = "async",
    generators: int = 2,
    environments: int = 16,
    steps: int = 200,
    target: float = 0.9,
    tail_s: float = 2.0,
    hang: str = "",
    device: str = "cpu",
    width: int = 64,
    output: Path | None = None,
) -> lp.Program:
    """Returns the program; it ends after so many steps, or at the target."""
    if mode not in STALENESS:
        raise ValueError(f"mode is sync or async, not {mode!r}")
    settings = Settings(target, tail_s, hang, device, width, output)
    program = lp.Program("reasoning")
    prompts, staleness = words(steps * GROUPS, seed=1), STALENESS[mode]
    described = rollouts.Rollouts(
        prompts, group_size=GROUP_SIZE, max_staleness=staleness, environment_timeout_s=tail_s + 10
    )
    made = described.add_to(
        program,
        folder=output,
        generator=lp.Deferred(Generator, settings),
        generators=generators,
        threads=THREADS,
        environment=lp.Deferred(Sandbox, settings),
        environments=environments,
        reward=lp.Deferred(Judge, settings),
        rewards=2,
    )
    program.add_node(lp.PyClassNode(Trainer, made, settings), label="trainer")
    program.add_node(lp.PyClassNode(Evaluator, made.weights, settings), label="evaluator")
    return program


if __name__ == "__main__":
    lp.main(make_program)
