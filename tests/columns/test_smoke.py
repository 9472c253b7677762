import numpy as np
import torch
import treetensor.torch as ttorch
from ding.utils.data import default_collate
from ding_store.columns import Schema


def test_smoke():
    def el(i):
        return ttorch.Tensor(
            {
                'obs': {'a': torch.randn(4), 'b': torch.randn(2, 3).bfloat16()},
                'action': torch.tensor([i]),
                'done': torch.tensor([False]),
            }
        )

    els = [el(i) for i in range(5)]
    s = Schema.infer(els)
    c = s.encode(els)
    back = s.decode(c)
    for a, b in zip(els, back):
        assert type(a) is type(b) and (a == b).all()
    b = s.decode_batch(c)
    want = default_collate(back)
    assert b.json().keys() == want.keys()
    assert torch.equal(b.obs.a, want['obs']['a']) and b.action.shape == want['action'].shape == (5,)
    els = [
        {
            'x': np.ones(3),
            'p': [(torch.ones(2), 3), None, (torch.zeros(2), 4)],
            0: {'o': None if i else torch.ones(1)},
            'f': 0.5,
        }
        for i in range(3)
    ]
    s = Schema.infer(els)
    print(s, Schema.from_json(__import__('json').loads(__import__('json').dumps(s.to_json()))) == s)
    print(s.decode(s.encode(els)))
