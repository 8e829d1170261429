"""D4PG of DeepMind's Acme, on a small task of control: nothing here knows launchpad-lite.

python examples/acme/launch.py --lp_launch_type=local_mp
"""

import dm_env
import numpy as np
import sonnet as snt
from absl import app, flags
from acme import specs, wrappers
from acme.agents.tf import d4pg
from acme.tf import networks, utils

import launchpad as lp

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 10_000, "Steps of all actors together.")
flags.DEFINE_integer("actors", 2, "How many actors there are.")


class Reach(dm_env.Environment):  # type: ignore[misc] # has no types
    """A point on a line is pushed to a place; the reward is how near it is."""

    _STEPS = 50

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._left = 0

    def reset(self) -> dm_env.TimeStep:
        """Begins an episode with a place and a target by chance."""
        self._position, self._target = self._random.uniform(-1.0, 1.0, 2)
        self._left = self._STEPS
        return dm_env.restart(self._observation())

    def step(self, action: np.ndarray) -> dm_env.TimeStep:
        """Pushes the point; each episode has the same number of steps."""
        if self._left == 0:
            return self.reset()
        self._position = float(np.clip(self._position + 0.2 * action[0], -1.0, 1.0))
        self._left -= 1
        reward = 1.0 - abs(self._position - self._target)
        if self._left == 0:
            return dm_env.termination(reward, self._observation())
        return dm_env.transition(reward, self._observation())

    def observation_spec(self) -> specs.Array:
        """Where the point is, and where it should be."""
        return specs.Array((2,), np.float32, "position and target")

    def action_spec(self) -> specs.BoundedArray:
        """How hard, and in which direction."""
        return specs.BoundedArray((1,), np.float32, -1.0, 1.0, "push")

    def _observation(self) -> np.ndarray:
        return np.array([self._position, self._target], np.float32)


def make_environment(evaluation: bool) -> dm_env.Environment:
    """Returns the task; it is the same for actors and the evaluator."""
    del evaluation
    return wrappers.SinglePrecisionWrapper(Reach())


def make_networks(action_spec: specs.BoundedArray) -> dict[str, snt.Module]:
    """Returns the networks of D4PG, small ones."""
    policy = snt.Sequential(
        [
            networks.LayerNormMLP((64, 64), activate_final=True),
            networks.NearZeroInitializedLinear(action_spec.shape[0]),
            networks.TanhToSpec(action_spec),
        ]
    )
    critic = snt.Sequential(
        [
            networks.CriticMultiplexer(),
            networks.LayerNormMLP((64, 64), activate_final=True),
            networks.DiscreteValuedHead(0.0, 50.0, 51),
        ]
    )
    return {"policy": policy, "critic": critic, "observation": utils.batch_concat}


def make_program(steps: int, actors: int) -> lp.Program:
    """Returns Acme's own program of a distributed agent.

    Args:
        steps: Of all actors together, after which the program stops.
        actors: How many there are.
    """
    agent = d4pg.DistributedD4PG(
        make_environment,
        make_networks,
        num_actors=actors,
        batch_size=64,
        min_replay_size=500,
        samples_per_insert=8.0,
        max_actor_steps=steps,
        log_every=5.0,
    )
    program: lp.Program = agent.build()
    return program


def main(_: list[str]) -> None:
    """Launches it."""
    lp.launch(make_program(FLAGS.steps, FLAGS.actors))


if __name__ == "__main__":
    app.run(main)
