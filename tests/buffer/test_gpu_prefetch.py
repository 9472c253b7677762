"""Batches that the prefetching thread copies to a GPU equal those of the host, to the bit."""

import numpy as np
import pytest
import torch

pytest.importorskip('ding')

from ding.framework import task  # noqa: E402
from ding.framework.context import OnlineRLContext  # noqa: E402
from ding.model import DQN  # noqa: E402
from ding.policy import DQNPolicy  # noqa: E402
from easydict import EasyDict  # noqa: E402

from ding_store.buffer import StoreBuffer  # noqa: E402
from ding_store.errors import ConfigError  # noqa: E402
from ding_store.middleware.replay import OffPolicyLearner  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU: scripts/simulated_gpu.py runs it')
NUM = 64


def element(i, frames=4):
    levels = torch.arange(i, i + frames * 64, dtype=torch.float32).remainder(256).reshape(frames, 8, 8)
    return {
        'obs': levels / 255,
        'next_obs': (levels + 1).remainder(256) / 255,
        'action': torch.tensor([i % 2]),
        'reward': torch.tensor([i / 7.0]),
        'done': torch.tensor(i % 5 == 0),
    }


def filled(share_frames=False, **options):
    buffer_ = StoreBuffer(NUM, seed=3, share_frames=share_frames, **options)
    buffer_.extend_elements([element(i) for i in range(NUM)])
    return buffer_


@needs_gpu
@pytest.mark.parametrize('share_frames', ['auto', False])
def test_batches_sent_ahead_equal_those_of_the_host(share_frames):
    host, sent = (filled(share_frames, prefetch=2) for _ in range(2))
    sent.send_to('cuda')
    for _ in range(6):
        ours, theirs = sent.sample_batch(16), host.sample_batch(16)
        assert (ours.rows == theirs.rows).all()
        for key in element(0):
            assert ours.data[key].device.type == 'cuda'
            assert ours.data[key].dtype == theirs.data[key].dtype
            assert torch.equal(ours.data[key].cpu(), theirs.data[key])
        assert all(torch.equal(a['obs'], b['obs']) for a, b in zip(ours.elements(), theirs.elements()))


@needs_gpu
def test_all_levels_of_a_byte_are_widened_to_the_same_bits():
    buffer_ = StoreBuffer(4, prefetch=1)
    levels = torch.arange(256, dtype=torch.float32) / 255
    buffer_.extend_elements([{'obs': levels, 'done': torch.tensor(False)} for _ in range(4)])
    buffer_.send_to('cuda')
    for _ in range(3):
        found = buffer_.sample_batch(2).data.obs.cpu().numpy()
    assert (found.view(np.uint32) == levels.numpy().view(np.uint32)).all()


@needs_gpu
def test_kept_batches_stay_as_they_are():
    buffer_ = filled(prefetch=2)
    buffer_.send_to('cuda')
    kept = [buffer_.sample_batch(8) for _ in range(12)]
    for batch in kept:
        assert batch.data.reward.flatten().cpu().tolist() == pytest.approx([row / 7.0 for row in batch.rows.tolist()])


@needs_gpu
def test_learner_on_a_gpu_trains_on_batches_sent_ahead():
    cfg = EasyDict(policy=DQNPolicy.default_config())
    cfg.policy.update(cuda=True)
    cfg.policy.learn.update(batch_size=16, update_per_collect=4)
    model = DQN(obs_shape=8, action_shape=2, encoder_hidden_size_list=[8, 8])
    policy = DQNPolicy(cfg.policy, model=model, enable_field=['learn'])
    buffer_ = StoreBuffer(NUM, seed=3, prefetch=2)
    rows = [{**element(i), 'obs': torch.randn(8), 'next_obs': torch.randn(8)} for i in range(NUM)]
    buffer_.extend_elements(rows)
    ctx, seen = OnlineRLContext(), []
    sample = buffer_.sample_batch
    buffer_.sample_batch = lambda size: seen.append(sample(size)) or seen[-1]
    with task.start(async_mode=False, ctx=ctx):
        OffPolicyLearner(cfg, policy.learn_mode, buffer_)(ctx)
    assert ctx.train_iter == 4
    assert [batch.data.obs.device.type for batch in seen] == ['cuda'] * 4


def test_device_that_is_no_gpu_is_refused():
    with pytest.raises(ConfigError, match='must be a GPU'):
        filled(prefetch=1).send_to('cpu')
