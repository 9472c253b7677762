"""
Jobs that are slow or broken, each in a way of its own, to try whether the package's own reports lead to the cause.

    python scripts/broken_jobs.py 1              runs job-1 in runs/jobs until Ctrl-C
    cd runs/jobs && ding-store status --run job-1
    cd runs/jobs && ding-store doctor --run job-1
    tensorboard --logdir runs/jobs

Give the person who tries a number from 1 to 7, and half a minute after the start nothing but `status`, `doctor --run`
and TensorBoard. The causes are the docstrings of the classes below.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Tuple

ROOT = Path(__file__).resolve().parent.parent
CONFIG = 'dizoo_configs.cartpole.cartpole_dqn_config'
END_S = 60.0


class Job:
    """A job of CartPole in which all is well."""

    roles = 'learner=1,evaluator=1,collector=2'
    #: Keys of the config and their values.
    settings: Tuple[Tuple[str, Any], ...] = ()
    has_checkpoints = False

    def env(self) -> Any:
        import gym

        return gym.make('CartPole-v0')

    def make_env(self) -> Any:
        from ding.envs import DingEnvWrapper

        return DingEnvWrapper(self.env())

    def begin(self) -> None:
        """Prepare this process, which has a role by now."""

    def weights(self, parts: Any, model: Any) -> Any:
        return parts.ModelExchanger(model)

    def learned(self, ctx: Any) -> None:
        """Run after each iteration of a learner."""


class SlowEnvironments(Job):
    """A step of an environment takes 200 ms. A collector steps 8 of them one after the other."""

    def env(self) -> Any:
        return _slow(super().env(), 0.2)


class LowRatio(Job):
    """samples_per_insert allows a twentieth of the training that the script asks for. More collectors do not help."""

    settings = (('store.samples_per_insert', 2.0), ('store.error_buffer', 128.0))


class FrequentCheckpoints(Job):
    """A checkpoint of 20 MB twice a second."""

    settings = (
        ('policy.model.encoder_hidden_size_list', [512, 1024, 512]),
        ('store.checkpoint', {'interval_s': 0.5}),
    )
    has_checkpoints = True


class DyingEvaluator(Job):
    """The evaluator's environment raises an error in its second episode. The launcher starts it again and again."""

    settings = (('store.checkpoint', {'max_restarts': 1000}),)
    has_checkpoints = True

    def env(self) -> Any:
        from ding.framework import task

        return _failing(super().env(), 15) if task.router.node_id == 1 else super().env()


class DeadReader(Job):
    """A second durable reader of the experience reads nothing, so the stream fills up to its limit of 100 kB."""

    settings = (('store.max_pending_bytes', 100_000),)

    def begin(self) -> None:
        from ding.framework import task

        from ding_store.environment import read_environment
        from ding_store.storage import open_store

        if task.router.node_id == 0:
            environment = read_environment()
            with open_store(environment.url, run=environment.run) as store:
                store.register('experience', 'backup')


class RareWeights(Job):
    """Collectors load weights once in 1,000 iterations of the learner."""

    def weights(self, parts: Any, model: Any) -> Any:
        from ding.framework import task

        if task.has_role(task.role.COLLECTOR):
            return parts.PeriodicalModelExchanger(model, mode='receive', period=1000)
        return parts.ModelExchanger(model)


class SlowRank(Job):
    """One of two learners takes 300 ms longer for each iteration. The other one waits for it."""

    roles = 'learner=2,evaluator=1,collector=1'

    def learned(self, ctx: Any) -> None:
        from ding_store.environment import read_environment

        if read_environment().rank == '1':
            time.sleep(0.3)


JOBS = dict(enumerate((SlowEnvironments, LowRatio, FrequentCheckpoints, DyingEvaluator, DeadReader), 1))
JOBS.update({6: RareWeights, 7: SlowRank})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('number', type=int, choices=sorted(JOBS))
    parser.add_argument('--dir', default=str(ROOT / 'runs' / 'jobs'), help='directory of the run and its files')
    parser.add_argument('--seconds', type=float, help='end the job after so many seconds')
    parser.add_argument('--role', action='store_true', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        play(options.number)
        return 0
    os.makedirs(options.dir, exist_ok=True)
    command = [sys.executable, '-m', 'ding_store.cli', 'run', '--run', f'job-{options.number}']
    command += ['--roles', JOBS[options.number].roles, '--', 'python', __file__, str(options.number), '--role']
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore'}
    process = subprocess.Popen(command, cwd=options.dir, env=environment)
    try:
        return process.wait(options.seconds)
    except (KeyboardInterrupt, subprocess.TimeoutExpired) as stop:
        if isinstance(stop, subprocess.TimeoutExpired):  # else the terminal has interrupted it too
            process.terminate()  # not SIGINT: a shell lets jobs in the background ignore that
        try:
            return process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def play(number: int) -> None:
    """Run the loop of one role of a job."""
    from ding.framework import task
    from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator
    from ding.model import DQN
    from ding.policy import DQNPolicy

    from dizoo_configs.builder import start
    from dizoo_configs.command import Options

    job = JOBS[number]()
    settings = (('exp_name', f'job-{number}'), ('env.stop_value', 10**9), *job.settings)
    with start(Options(settings=settings, checkpoint=job.has_checkpoints), CONFIG, job.make_env) as loop:
        job.begin()
        cfg, parts = loop.cfg, loop.parts
        model = DQN(**cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = DQNPolicy(cfg.policy, model=model)
        task.use(parts.ContextExchanger(skip_n_iter=1))
        task.use(job.weights(parts, model))
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        if task.has_role(task.role.LEARNER):
            task.use(job.learned)
        loop.run(policy, show_freq=10, save_freq=1000)


def _slow(env: Any, seconds: float) -> Any:
    import gym

    class Slow(gym.Wrapper):
        def step(self, action: Any) -> Any:
            time.sleep(seconds)
            return self.env.step(action)

    return Slow(env)


def _failing(env: Any, num_steps: int) -> Any:
    import gym

    class Failing(gym.Wrapper):
        count = 0

        def step(self, action: Any) -> Any:
            self.count += 1
            if self.count > num_steps:
                raise OverflowError('cart position 1e+308 is out of range')
            return self.env.step(action)

    return Failing(env)


if __name__ == '__main__':
    sys.exit(main())
