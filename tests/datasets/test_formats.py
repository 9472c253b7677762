"""Exports that DI-engine itself loads, imports that give the same rows, and episodes of recorded runs."""

import json
import sys

import numpy as np
import pytest
import torch
from easydict import EasyDict
from rows import element, numbers, write

from ding_store.cli import main
from ding_store.datasets import DataSet, DataSetWriter, episodes_of, export, import_
from ding_store.errors import ConfigError, CorruptPayload


def interleaved(path, nstep=1):
    """Two environments in turn, of which the second is cut. With n-step returns, as a collector makes them."""
    from ding_store.middleware.trajectories import add_returns

    steps = {env: [element(100 * env + i, env, env == 0 and i == 5) for i in range(6)] for env in (0, 1)}
    plain = {env: [each.clone() for each in steps[env]] for env in steps}
    if nstep > 1:
        for env in steps:
            add_returns(steps[env], nstep, 0.9)
    with DataSetWriter(str(path)) as writer:
        writer.append_elements([steps[env][i] for i in range(6) for env in (0, 1)])
    return plain


def test_episodes_are_found_among_interleaved_rows(tmp_path):
    interleaved(tmp_path)
    episodes = episodes_of(DataSet(tmp_path))
    assert episodes.rows(0).tolist() == [0, 2, 4, 6, 8, 10]
    assert episodes.rows(1).tolist() == [1, 3, 5, 7, 9, 11]
    assert episodes.is_whole.tolist() == [True, False]
    assert episodes.returns.tolist() == [15.0, 615.0]


@pytest.mark.parametrize('nstep', [1, 3])
def test_hdf5_export_is_loaded_by_ding_engine(tmp_path, nstep):
    """n-step rows become the steps that they were made of."""
    pytest.importorskip('h5py')
    from ding.data import create_dataset

    plain = interleaved(tmp_path / 'set', nstep)
    data = DataSet(tmp_path / 'set')
    assert episodes_of(data).returns.tolist() == [15.0, 615.0]
    export(data, str(tmp_path / 'set.hdf5'), 'hdf5')
    collect = dict(data_type='hdf5', data_path=str(tmp_path / 'set.hdf5'))
    theirs = create_dataset(EasyDict(policy=dict(collect=collect)))
    steps = plain[0] + plain[1]
    assert len(theirs) == 12
    for i, step in enumerate(steps):
        for name in ('obs', 'action', 'reward', 'done', 'next_obs'):
            if nstep > 1 and name == 'next_obs' and i == 11:
                continue  # the recording was cut there
            found = theirs[i][name]
            assert np.array_equal(found, step[name].numpy()), (i, name)
            assert np.asarray(found).dtype == step[name].numpy().dtype


@pytest.mark.parametrize('kind', ['hdf5', 'd4rl'])
def test_export_is_imported_again(tmp_path, kind):
    pytest.importorskip('h5py')
    write(tmp_path / 'set')
    source = DataSet(tmp_path / 'set')
    export(source, str(tmp_path / 'file'), kind)
    assert import_(str(tmp_path / 'file'), str(tmp_path / 'copy')) == 70
    copy = DataSet(tmp_path / 'copy')
    ours, theirs = source.columns(range(70)), copy.columns(range(70))
    for name in ours:
        assert np.array_equal(ours[name], theirs[name]), name
    with pytest.raises(ConfigError, match='there is a data set in'):
        import_(str(tmp_path / 'file'), str(tmp_path / 'copy'))


def test_d4rl_file_without_next_observations_is_imported(tmp_path):
    h5py = pytest.importorskip('h5py')
    with h5py.File(tmp_path / 'file', 'w') as file:
        file['observations'] = np.arange(20, dtype=np.float32).reshape(10, 2)
        file['actions'] = np.zeros((10, 1), np.float32)
        file['rewards'] = np.ones(10, np.float32)
        file['terminals'] = np.arange(10) == 3
        file['timeouts'] = np.arange(10) == 6
    assert import_(str(tmp_path / 'file'), str(tmp_path / 'set')) == 8
    found = DataSet(tmp_path / 'set').columns(range(8))
    # Row 6 was cut by its time limit, and row 9 by the end of the file: nothing follows them.
    assert found['obs'][:, 0].tolist() == [0, 2, 4, 6, 8, 10, 14, 16]
    assert found['next_obs'][:, 0].tolist() == [2, 4, 6, 8, 10, 12, 16, 18]
    assert found['env_data_id'][:, 0].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]


def test_damaged_source_leaves_no_data_set(tmp_path):
    h5py = pytest.importorskip('h5py')
    with h5py.File(tmp_path / 'file', 'w') as file:
        for name in ('obs', 'action', 'reward', 'done'):
            file[name] = np.zeros((7 if name == 'action' else 8, 1))
    for name, reason in (('file', 'different lengths'), ('text', 'cannot be read')):
        (tmp_path / 'text').write_text('no file of HDF5')
        with pytest.raises(CorruptPayload, match=reason):
            import_(str(tmp_path / name), str(tmp_path / 'set'))
        with pytest.raises(ConfigError, match='there is no data set'):
            DataSet(tmp_path / 'set')


@pytest.mark.parametrize(('package', 'kind'), [('h5py', 'hdf5'), ('minari', 'minari')])
def test_missing_package_is_named_with_the_command(tmp_path, package, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    write(tmp_path)
    with pytest.raises(ConfigError, match=f'pip install {package}'):
        export(DataSet(tmp_path), str(tmp_path / 'x'), kind)


def test_minari_export_is_imported_again(tmp_path, monkeypatch):
    pytest.importorskip('minari')
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path / 'minari'))
    write(tmp_path / 'set', num_rows=25)
    source = DataSet(tmp_path / 'set')
    export(source, 'ding/test-v0', 'minari')
    assert import_('minari:ding/test-v0', str(tmp_path / 'copy')) == 25
    ours, theirs = source.columns(range(25)), DataSet(tmp_path / 'copy').columns(range(25))
    for name in ours:
        assert np.array_equal(ours[name], theirs[name]), name


def test_elements_without_the_needed_leaves_are_refused(tmp_path):
    with DataSetWriter(str(tmp_path)) as writer:
        writer.append_elements([{'obs': torch.zeros(2)}])
    with pytest.raises(ConfigError, match="no leaf 'action', which d4rl needs"):
        export(DataSet(tmp_path), str(tmp_path / 'x'), 'd4rl')


def test_data_inspect_prints_what_the_set_has(tmp_path, capsys):
    write(tmp_path / 'set', segment_bytes=400)
    assert main(['data', 'inspect', str(tmp_path / 'set'), '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found['rows'], found['episodes'], found['cut_episodes'], found['damaged']) == (70, 7, 0, {})
    assert found['return'] == {'min': 45.0, 'mean': 345.0, 'max': 645.0}
    assert found['policy_versions'] == {str(version): 7 for version in range(10)}
    assert sum(count for _, _, count in found['histogram']) == 7
    assert main(['data', 'inspect', str(tmp_path / 'set')]) == 0
    assert 'episodes    7 whole, 0 cut' in capsys.readouterr().out
    (tmp_path / 'set' / '000001.rows').unlink()
    assert main(['data', 'inspect', str(tmp_path / 'set')]) == 1
    assert 'DAMAGED     segment 000001' in capsys.readouterr().out


def test_data_export_and_import_commands(tmp_path, capsys):
    pytest.importorskip('h5py')
    write(tmp_path / 'set')
    assert main(['data', 'export', str(tmp_path / 'set'), str(tmp_path / 'file')]) == 0
    assert main(['data', 'import', str(tmp_path / 'file'), str(tmp_path / 'copy')]) == 0
    assert capsys.readouterr().out.count('wrote 70 rows') == 2
    assert numbers(DataSet(tmp_path / 'copy').columns([69])) == [69]
    assert main(['data', 'inspect', str(tmp_path / 'nowhere')]) == 2
    assert main(['data', 'export', str(tmp_path / 'set'), str(tmp_path / 'no' / 'file')]) == 2
