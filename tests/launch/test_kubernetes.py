"""
The manifests of ops/kubernetes: valid, consistent, and their commands run as processes. There is no API server: what a
controller would do, such as to replace a pod, the test does.
"""

import ast
import functools
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import redis
import yaml
from jobs import ROOT, TINY, ding_store, job, status
from netns import Network, why_not
from redis_server import WAIT_S, find_binary, left_by_runs

from ding_store.storage.testing import eventually

pytest.importorskip('ding')
pytest.importorskip('gym')
pytestmark = pytest.mark.timeout(600)
KUBERNETES = ROOT / 'ops' / 'kubernetes'
OVERLAYS = sorted(path.name for path in (KUBERNETES / 'overlays').iterdir())
WORKERS = ('learner', 'evaluator', 'collector', 'metrics')
PASSWORD = 'a-password-of-the-test'


@functools.cache
def rendered(overlay):
    """The objects of an overlay, as kustomize makes them. Without kubectl, the files of the base."""
    if shutil.which('kubectl'):
        done = subprocess.run(
            ['kubectl', 'kustomize', str(KUBERNETES / 'overlays' / overlay)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return tuple(filter(None, yaml.safe_load_all(done.stdout)))
    names = yaml.safe_load((KUBERNETES / 'base' / 'kustomization.yaml').read_text())['resources']
    texts = [(KUBERNETES / 'base' / name).read_text() for name in names]
    found = [each for text in texts for each in yaml.safe_load_all(text)]
    for each in found:  # as the base's labels do
        for labels in (each['metadata'].setdefault('labels', {}), *map(labels_of, pods([each]).values())):
            labels['app.kubernetes.io/part-of'] = 'ding-store'
    return tuple(found)


def of_kind(objects, *kinds):
    return {each['metadata']['name']: each for each in objects if each['kind'] in kinds}


def pods(objects):
    """Name -> object that makes pods."""
    return of_kind(objects, 'Job', 'Deployment', 'StatefulSet')


def spec_of(made):
    return made['spec']['template']['spec']


def labels_of(made):
    return made['spec']['template']['metadata']['labels']


def containers_of(made):
    return [*spec_of(made).get('initContainers', []), *spec_of(made)['containers']]


def selects(selector, labels):
    matches = all(labels.get(key) == value for key, value in selector.get('matchLabels', {}).items())
    return matches and all(
        labels.get(each['key']) in each['values']
        for each in selector.get('matchExpressions', [])
        if each['operator'] == 'In'
    )


@pytest.mark.parametrize('overlay', OVERLAYS)
def test_manifests_follow_the_schemas_of_kubernetes(overlay):
    validate = pytest.importorskip('kubernetes_validate')
    for each in rendered(overlay):
        validate.validate(each, '1.32', strict=True)


@pytest.mark.parametrize('overlay', OVERLAYS)
def test_manifests_name_only_what_there_is(overlay):
    objects = rendered(overlay)
    maps, secrets = of_kind(objects, 'ConfigMap'), of_kind(objects, 'Secret')
    claims = of_kind(objects, 'PersistentVolumeClaim')
    for name, made in pods(objects).items():
        spec, volumes = spec_of(made), set()
        for volume in spec.get('volumes', []):
            volumes.add(volume['name'])
            if 'secret' in volume:
                keys = secrets[volume['secret']['secretName']]['stringData']
                assert {item['key'] for item in volume['secret']['items']} <= set(keys)
            if 'persistentVolumeClaim' in volume:
                assert volume['persistentVolumeClaim']['claimName'] in claims
        volumes |= {claim['metadata']['name'] for claim in made['spec'].get('volumeClaimTemplates', [])}
        for container in containers_of(made):
            assert {mount['name'] for mount in container['volumeMounts']} <= volumes, name
            assert all(each['configMapRef']['name'] in maps for each in container.get('envFrom', []))
            for variable in container.get('env', []):
                reference = variable['valueFrom']['secretKeyRef']
                assert reference['key'] in secrets[reference['name']]['stringData']
            limits = container['securityContext']
            assert limits['readOnlyRootFilesystem']
            assert not limits['allowPrivilegeEscalation']
        assert spec['securityContext']['runAsNonRoot']
        if 'selector' in made['spec']:
            assert selects(made['spec']['selector'], labels_of(made))


@pytest.mark.parametrize('overlay', OVERLAYS)
def test_selectors_match_pods_and_ports(overlay):
    objects = rendered(overlay)
    made = pods(objects)

    def matched(selector):
        return [each for each in made.values() if selects(selector, labels_of(each))]

    for service in of_kind(objects, 'Service').values():
        (target,) = matched({'matchLabels': service['spec']['selector']})
        names = {port['name'] for container in containers_of(target) for port in container.get('ports', [])}
        assert {port['targetPort'] for port in service['spec']['ports']} <= names
    for budget in of_kind(objects, 'PodDisruptionBudget').values():
        assert len(matched(budget['spec']['selector'])) == 1
    for policy in [each for each in objects if each['kind'] == 'NetworkPolicy']:
        assert matched(policy['spec']['podSelector'])
        for rule in [*policy['spec'].get('ingress', []), *policy['spec'].get('egress', [])]:
            assert all(matched(peer['podSelector']) for peer in [*rule.get('from', []), *rule.get('to', [])])
    for scaler in of_kind(objects, 'HorizontalPodAutoscaler').values():
        assert made[scaler['spec']['scaleTargetRef']['name']]['kind'] == scaler['spec']['scaleTargetRef']['kind']
        metric = scaler['spec']['metrics'][0]['external']['metric']['name']
        assert f'| `{metric}` |' in (ROOT / 'docs' / 'reference' / 'metrics.md').read_text()


def test_overlays_differ_from_the_base_where_they_say_so():
    if not shutil.which('kubectl'):
        pytest.skip('needs kubectl, to render overlays')
    learner = containers_of(pods(rendered('gpu'))['learner'])[0]
    assert learner['resources']['limits']['nvidia.com/gpu'] == '1'
    assert learner['image'].endswith(':gpu')
    sentinel = rendered('sentinel')
    assert of_kind(sentinel, 'StatefulSet')['redis']['spec']['replicas'] == 2
    url = of_kind(sentinel, 'Secret')['ding-store']['stringData']['DING_STORE_URL']
    name = url.rpartition('/')[2]
    (script,) = of_kind(sentinel, 'StatefulSet')['sentinel']['spec']['template']['spec']['initContainers'][0]['args']
    assert f'sentinel monitor {name} redis-0.redis' in script


def test_component_shares_memory_of_the_host(tmp_path):
    if not shutil.which('kubectl'):
        pytest.skip('needs kubectl, to render components')
    shutil.copytree(KUBERNETES, tmp_path / 'kubernetes')
    overlay = tmp_path / 'kubernetes' / 'overlays' / 'single' / 'kustomization.yaml'
    overlay.write_text(overlay.read_text() + 'components: [../../components/host-shm]\n')
    done = subprocess.run(['kubectl', 'kustomize', str(overlay.parent)], capture_output=True, text=True, timeout=120)
    made = pods([each for each in yaml.safe_load_all(done.stdout) if each])
    for role in ('learner', 'evaluator', 'collector'):
        (shm,) = [volume for volume in spec_of(made[role])['volumes'] if volume['name'] == 'shm']
        assert shm['hostPath']['path'] == '/dev/shm/ding_store'


def test_security_page_and_manifests_give_the_same_rights():
    page = (ROOT / 'docs' / 'howto' / 'security.md').read_text()
    (rights,) = re.findall(r'^user ding on >CHANGE-ME (.*)$', page, re.M)
    for overlay in OVERLAYS:
        for secret in of_kind(rendered(overlay), 'Secret').values():
            assert f'user ding on >CHANGE-ME {rights}' in secret['stringData']['users.acl']


#: The fields that DI-orchestrator's CRD has around the pods. The pods themselves are Kubernetes' own.
DIJOB_SPEC = {
    'type': 'object',
    'additionalProperties': False,
    'required': ['tasks'],
    'properties': {
        'backoffLimit': {'type': 'integer'},
        'cleanPodPolicy': {'enum': ['Running', 'All', 'None']},
        'group': {'type': 'string'},
        'preemptible': {'type': 'boolean'},
        'priority': {'enum': ['normal', 'high']},
        'tasks': {
            'type': 'array',
            'items': {
                'type': 'object',
                'additionalProperties': False,
                'properties': {
                    'name': {'type': 'string'},
                    'type': {'enum': ['learner', 'collector', 'evaluator', 'none']},
                    'replicas': {'type': 'integer', 'minimum': 1},
                    'template': {'type': 'object'},
                },
            },
        },
    },
}


def test_dijob_has_the_fields_of_its_definition():
    jsonschema = pytest.importorskip('jsonschema')
    validate = pytest.importorskip('kubernetes_validate')
    made = yaml.safe_load((KUBERNETES / 'dijob.yaml').read_text())
    jsonschema.validate(made['spec'], DIJOB_SPEC)
    for task in made['spec']['tasks']:
        pod = {'apiVersion': 'v1', 'kind': 'PodTemplate', 'metadata': {'name': 'pod'}, 'template': task['template']}
        validate.validate(pod, '1.25', strict=True)
        for container in task['template']['spec']['containers']:
            mounted = {mount['name'] for mount in container['volumeMounts']}
            assert mounted == {volume['name'] for volume in task['template']['spec']['volumes']}


def test_dijob_has_its_tasks_in_the_order_of_node_ids():
    made = yaml.safe_load((KUBERNETES / 'dijob.yaml').read_text())
    assert (made['apiVersion'], made['kind']) == ('diengine.opendilab.org/v2alpha1', 'DIJob')
    assert [task['type'] for task in made['spec']['tasks']] == ['learner', 'evaluator', 'collector']
    (container,) = made['spec']['tasks'][0]['template']['spec']['containers']
    assert container['args'][:4] == ['ding-store', 'run', '--', 'ditask']


def test_dockerfile_has_what_the_manifests_need():
    text = (KUBERNETES / 'Dockerfile').read_text()
    targets = set(re.findall(r'^FROM \S+ AS (\w+)$', text, re.M))
    images = {
        container['image'].rpartition(':')[2]
        for overlay in OVERLAYS
        for name, made in pods(rendered(overlay)).items()
        for container in containers_of(made)
        if name in WORKERS
    }
    assert images <= targets
    for line in re.findall(r'^COPY (.+) \S+$', text, re.M):
        assert all((ROOT / name).exists() for name in line.split())
    assert 'ENTRYPOINT ["/usr/bin/tini", "--"]' in text
    for overlay in OVERLAYS:  # a command would replace the entry point
        assert all(
            'command' not in c for n, m in pods(rendered(overlay)).items() if n in WORKERS for c in containers_of(m)
        )


class Cluster:
    """
    What a cluster gives to containers: settings, secrets, volumes, a network namespace each, and Redis at its address.
    """

    #: The pods of the test, in the order in which it starts them, and Redis first.
    PODS = ('redis', 'collector-1', 'collector-2', 'evaluator-3', 'learner-4', 'collector-5', 'collector-6')

    def __init__(self, directory, network):
        self.directory, self.network, self.objects = directory, network, rendered('single')
        # The test itself is in no namespace of the cluster, so it uses Redis through its directory.
        self.socket = str(directory / 'redis.sock')
        self.inspecting_url = f'unix://ding:{PASSWORD}@{self.socket}'
        secret = of_kind(self.objects, 'Secret')['ding-store']['stringData']
        secret = {name: text.replace('CHANGE-ME', PASSWORD) for name, text in secret.items()}
        self.url = secret['DING_STORE_URL'].replace('redis:6379', f'{network.addresses["redis"]}:6379')
        acl = secret['users.acl'] + f'user test on >{PASSWORD} ~* +@all\n'
        self.paths = {'/etc/redis': self.volume('acl'), '/data': self.volume('data')}
        Path(self.paths['/etc/redis'], 'users.acl').write_text(acl)
        self.settings = of_kind(self.objects, 'ConfigMap')['ding-store']['data']
        (directory / 'main.py').write_text(
            f'import runpy, sys\nsys.argv[1:] = ["--ckpt", "--trace", {str(directory / "trace")!r}, "--until", '
            f'{str(directory / "stop")!r}]\nrunpy.run_path({TINY!r}, run_name="__main__")\n'
        )
        self.num_pods = 0

    def volume(self, name):
        path = self.directory / 'volumes' / name
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def replaced(self, word, paths):
        for path, at in paths.items():
            if word.startswith(path):
                return at + word[len(path) :]
        return word

    def redis(self):
        (container,) = containers_of(pods(self.objects)['redis'])
        words = [self.replaced(word, self.paths) for word in container['args']]
        words += ['--bind', self.network.addresses['redis'], '--unixsocket', self.socket]
        return subprocess.Popen(self.network.command('redis', find_binary(), *words), stdout=subprocess.DEVNULL)

    def pod(self, name):
        """The container's command in a directory of its own, with its variables."""
        self.num_pods += 1
        pod = f'{name}-{self.num_pods}'
        (container,) = containers_of(pods(self.objects)[name])
        assert {mount['mountPath'] for mount in container['volumeMounts']} >= {'/run/ding_store', '/work', '/tmp'}
        paths = {
            '/app': str(self.directory),
            '/checkpoints': self.volume('checkpoints'),
            '/tmp': os.environ.get('TMPDIR', '/tmp'),
        }
        paths['/run/ding_store'] = self.volume(f'{pod}/health')
        variables = {key: self.replaced(value, paths) for key, value in self.settings.items() if key != 'HOME'}
        variables['DING_STORE_URL'] = self.url
        settings = ast.literal_eval(variables['DING_STORE_SETTINGS'])  # a pod has a /dev/shm of its own
        variables['DING_STORE_SETTINGS'] = repr(
            {**settings, 'store_options': {'host_cache_dir': self.volume(f'{pod}/shm')}}
        )
        words = [self.replaced(word, paths) for word in container['args']]
        assert words.pop(0) == 'ding-store'
        command = self.network.command(pod, *ding_store(*words))
        started = job(command, self.volume(f'{pod}/work'), name=pod, **variables)
        return Pod(started, container, variables, self.directory)


class Pod:
    def __init__(self, started, container, variables, directory):
        self.started, self.container, self.variables, self.directory = started, container, variables, directory

    def __enter__(self):
        self.job = self.started.__enter__()
        return self

    def __exit__(self, *error):
        self.started.__exit__(*error)

    def probe(self, name):
        words = self.container[name]['exec']['command']
        with job(ding_store(*words[1:]), self.directory, name='probe', **self.variables) as probe:
            return probe.wait()

    def terminate(self):
        """Send SIGTERM, and SIGKILL when the grace is over, as Kubernetes does."""
        os.kill(self.job.process.pid, signal.SIGTERM)
        return self.job.wait()


def test_commands_of_the_manifests_run_and_lose_nothing(tmp_path):
    if find_binary() is None:
        pytest.skip('needs a redis-server')
    if why_not():
        pytest.skip(why_not())
    with Network(*Cluster.PODS) as network:
        run_in_a_cluster(tmp_path, network)


def run_in_a_cluster(tmp_path, network):
    cluster = Cluster(tmp_path, network)

    def now():
        return status(tmp_path, 'pong', cluster.inspecting_url)

    def working():
        return [
            m
            for m in now()['members']
            if m['state'] == 'alive' and m['figures'].get('rows') and m['role'] == 'collector'
        ]

    server = cluster.redis()
    client = redis.Redis(unix_socket_path=cluster.socket, username='test', password=PASSWORD)
    try:
        eventually(lambda: is_answering(client), 'redis')
        with (
            cluster.pod('collector') as first,
            cluster.pod('collector') as second,
            cluster.pod('evaluator') as evaluator,
        ):
            with cluster.pod('learner') as learner:
                learner.job.wait_for(lambda: len(working()) == 2, 'rows of both collectors')
                for pod in (first, second, evaluator, learner):
                    pod.job.wait_for(lambda pod=pod: pod.probe('startupProbe') == 0, 'a started pod')
                    assert pod.probe('livenessProbe') == 0
                assert first.terminate() == 128 + signal.SIGTERM, first.job.text
                # This one does not hear the first signal before the grace is over.
                os.kill(second.job.process.pid, signal.SIGSTOP)
                os.kill(second.job.process.pid, signal.SIGTERM)
                os.kill(second.job.process.pid, signal.SIGKILL)
                second.job.wait()
                with cluster.pod('collector') as third:
                    learner.job.wait_for(lambda: len(working()) == 1, 'rows of another')
                    assert third.terminate() == 128 + signal.SIGTERM, third.job.text
                # No collector runs: all that was appended is ingested, once.
                learner.job.wait_for(lambda: is_balanced(now()), 'all rows')
                figures = now()['figures']
                with cluster.pod('collector') as fourth:
                    learner.job.wait_for(
                        lambda: now()['figures']['rows_ingested'] > figures['rows_ingested'], 'more rows'
                    )
                    (tmp_path / 'stop').touch()
                    assert learner.job.wait() == 0, learner.job.text
                    assert evaluator.job.wait() == 0, evaluator.job.text
                    assert fourth.job.wait() == 0, fourth.job.text
        assert left_by_runs(client) == []
    finally:
        client.close()
        server.kill()
        server.wait(WAIT_S)


def is_answering(client):
    try:
        return client.ping()
    except redis.ConnectionError:
        return False


def is_balanced(found):
    """Each chunk has eight rows, and the server numbers the chunks."""
    figures, number = found['figures'], found['streams']['experience']['last']
    return figures['rows_ingested'] == 8 * number > 0 and figures['chunks_lost'] == 0
